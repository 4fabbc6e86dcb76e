"""What the guard counts and how much: items and not shares, rounds in a row, gains in one direction only."""

import functools
import json
import math
import random
from typing import Any

import pytest

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import HeldOutGuard, fold
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.protocol.records import Contribution, Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet

SETTINGS = GuardConfig(min_steps=1, ema_alpha=0.0, max_proxy_real_gap=0.5, decline_patience=6)


class Rounds:
    """Folds one round after another; each share is given as (mean score, items)."""

    def __init__(self, total_items: int = 40) -> None:
        self.state: dict[str, Any] | None = None
        self.round, self.total_items = 0, total_items

    def next(self, shares: dict[int, tuple[float, int]], in_loop: float | None = 0.0) -> Any:
        self.round += 1
        scored = [Score(share=share, sum=mean * items, count=items) for share, (mean, items) in shares.items()]
        metric = None if in_loop is None else Metric(sum=in_loop * 10, count=10)
        heldout = HeldoutSet(metric="reward", shares=(self.total_items,), digest="0" * 64)
        folded = fold(self.state, SETTINGS, heldout, RoundReports(self.round, scored, {0: metric} if metric else {}))
        self.state = folded.state
        return folded.verdict


def manifest(replica_id: int, **fields: Any) -> Contribution:
    return Contribution(
        write_id=f"w{replica_id}",
        at=0.0,
        round=1,
        leg=1,
        replica_id=replica_id,
        attempt=1,
        kind="delta",
        base_digest="b3:" + "0" * 64,
        snapshot_round=0,
        rebuilt_after=0,
        **fields,
    )


# -- folding ----------------------------------------------------------------------------------------------------------


def test_a_share_counts_by_its_items():
    rounds = Rounds()
    rounds.next({0: (1.0, 30), 1: (1.0, 10)})
    assert rounds.next({0: (2.0, 30), 1: (1.0, 10)}).value == pytest.approx(1.75)


def test_the_level_of_the_first_scores_counts_items_too():
    assert Rounds().next({0: (4.0, 30), 1: (0.0, 10)}).value == pytest.approx(3.0)


def test_blind_rounds_warn_only_when_they_follow_each_other():
    rounds, all_of_it = Rounds(), dict.fromkeys(range(4), (1.0, 10))
    rounds.next(all_of_it)
    for _ in range(2):
        assert not any(rounds.next({0: (1.0, 10)}).warning for _ in range(4))
        assert rounds.next(all_of_it).folded


# -- tripwires --------------------------------------------------------------------------------------------------------


def test_a_held_out_score_that_gains_more_than_training_never_fires():
    rounds = Rounds()
    for step in range(20):
        assert not rounds.next(dict.fromkeys(range(4), (0.5 * step, 10)), in_loop=0.0).fire
    assert rounds.next(dict.fromkeys(range(4), (10.0, 10))).proxy_real_gap < -5


def test_a_guard_that_was_put_down_in_mid_decline_fires_in_the_same_round():
    """Its state is in each commit; whoever commits next goes on with it."""
    settings: dict[str, Any] = {"min_steps": 1, "decline_patience": 3, "ema_alpha": 0.0, "max_proxy_real_gap": 100.0}
    straight, carried, fired = HeldOutGuard(**settings), HeldOutGuard(**settings), []
    for step in range(6):
        told = straight.update(step, 0.1 * step, -0.1 * step)
        carried = HeldOutGuard.restore(carried.state(), **settings)
        assert carried.update(step, 0.1 * step, -0.1 * step) == told
        fired.append(told.fire)
    assert fired == [False] * 3 + [True] * 3


def test_rounds_without_a_score_fire_only_when_they_follow_each_other():
    guard = HeldOutGuard(min_steps=100)
    for step in range(6):
        assert not guard.update(step, 0.0, math.nan if step % 2 else 1.0).fire
    guard.update(6, 0.0, math.nan)
    assert guard.update(7, 0.0, math.nan).fire


# -- what manifests say -----------------------------------------------------------------------------------------------

TWO = HeldoutSet(metric="reward", shares=(20, 20), digest="0" * 64)


def folded(said: list[Contribution], heldout: HeldoutSet | None = TWO, state: Any = None, round_: int = 1) -> Any:
    roster = range(len(heldout.shares)) if heldout else (0, 1)
    return fold_round(state, GuardConfig(min_steps=1, ema_alpha=0.0), round_, heldout, roster, said, said)


def test_a_share_counts_only_from_the_replica_to_which_it_was_dealt():
    said = [manifest(i, scores=tuple(Score(share=j, sum=10.0 * (i + 1), count=20) for j in (0, 1))) for i in (0, 1)]
    assert folded(said).verdict.value == pytest.approx(0.75)
    assert fold_round(None, GuardConfig(), 1, TWO, (1,), said, said).verdict.value == pytest.approx(1.0)


def test_a_score_over_another_number_of_items_than_the_share_has_is_missing():
    said = [manifest(0, scores=(Score(share=0, sum=10.0, count=20),))]
    said.append(manifest(1, scores=(Score(share=1, sum=-1e9, count=10**9),)))
    verdict = folded(said).verdict
    assert verdict.value == pytest.approx(0.5) and verdict.folded is False


def test_of_two_scores_of_one_share_the_first_counts():
    twice = (Score(share=0, sum=10.0, count=20), Score(share=0, sum=-1000.0, count=20))
    said = [manifest(0, scores=twice), manifest(1, scores=(Score(share=1, sum=10.0, count=20),))]
    assert folded(said).verdict.value == pytest.approx(0.5)


def test_without_a_held_out_set_nothing_is_folded_whatever_manifests_say():
    assert folded([manifest(0, scores=(Score(share=0, sum=10.0, count=20),))], None) is None


@pytest.mark.parametrize(
    ("metric", "gap", "fires"),
    [("reward", 0.2, True), ("reward", 0.04, False), ("loss", 0.2, False), ("loss", 0.3, True)],
)
def test_a_gap_is_judged_in_the_unit_of_the_metric(metric: Any, gap: float, fires: bool):
    """Rewards lie in [0, 1], losses in nats."""
    state, heldout = None, HeldoutSet(metric=metric, shares=(20,), digest="0" * 64)
    for step in range(3):
        scored = manifest(0, scores=(Score(share=0, sum=0.0, count=20),), in_loop=Metric(sum=gap * step, count=1))
        result = folded([scored], heldout, state, step + 1)
        state = result.state
    assert result.verdict.fire is fires


# -- one replica alone ------------------------------------------------------------------------------------------------

EIGHT = HeldoutSet(metric="reward", shares=(60,) * 8, digest="0" * 64)
LIES: dict[str, dict[str, Any]] = {
    "a score that is not finite": {"scores": (Score(share=7, sum=None, count=60),)},
    "a score of -1000": {"scores": (Score(share=7, sum=-60_000.0, count=60),)},
    "a score of +1000": {"scores": (Score(share=7, sum=60_000.0, count=60),)},
    "a count of a billion items": {"scores": (Score(share=7, sum=-1e12, count=10**9),)},
    "every share": {"scores": tuple(Score(share=share, sum=-60_000.0, count=60) for share in range(8))},
    "no score": {"scores": ()},
    "a training metric of 1e9": {"in_loop": Metric(sum=3e10, count=30)},
    "a training metric over a billion steps": {"in_loop": Metric(sum=1e18, count=10**9)},
    "a training metric that is not finite": {"in_loop": Metric(sum=None, count=30)},
    "a KL of 1e9": {"metrics": {"kl_to_init": Metric(sum=1e9, count=1)}},
    "a KL that is not finite": {"metrics": {"kl_to_init": Metric(sum=None, count=1)}},
}


def verdicts_of(lie: dict[str, Any], hack: float, rounds: int = 60) -> list[Any]:
    """Verdicts of a run of eight replicas, the last of which sends `lie`; from round 31 on held-out falls by `hack`."""
    rng, state, verdicts = random.Random(3), None, []
    for round_ in range(1, rounds + 1):
        fallen, said = hack * max(0, round_ - 30), []
        for i in range(8):
            mean = 0.3 + 0.05 * i - fallen + rng.gauss(0, 0.02)
            training = 0.5 + (hack and 0.01 * max(0, round_ - 30)) + rng.gauss(0, 0.02)
            fields: dict[str, Any] = {
                "scores": (Score(share=i, sum=60 * mean, count=60),),
                "in_loop": Metric(sum=30 * training, count=30),
                "metrics": {"kl_to_init": Metric(sum=0.01, count=1)},
            }
            said.append(manifest(i, **(fields | (lie if i == 7 else {}))))
        result = fold_round(state, GuardConfig(), round_, EIGHT, range(8), said, said)
        assert result is not None
        state = json.loads(json.dumps(result.state))
        verdicts.append(result.verdict)
    return verdicts


OWN_LIMIT = GuardConfig(max_extra={"toxicity": 0.1})


@pytest.mark.parametrize("name", ["kl_to_init", "extra.toxicity"])
@pytest.mark.parametrize("value", [10.0, 0.0, -1e9, None], ids=str)
@pytest.mark.parametrize("replicas", [2, 3, 8, 16])
def test_one_replica_alone_brings_no_metric_that_the_others_do_not_observe(replicas: int, value, name: str):
    """The verdicts are those of the same rounds without it."""
    heldout = HeldoutSet(metric="reward", shares=(60,) * replicas, digest="0" * 64)

    def folds(metrics: dict[str, Metric]) -> list[tuple[Any, Any]]:
        state, found = None, []
        for round_ in range(1, 5):
            said = [
                manifest(
                    i,
                    scores=(Score(share=i, sum=60 * 0.5, count=60),),
                    in_loop=Metric(sum=15.0, count=30),
                    metrics=metrics if i == replicas - 1 else {},
                )
                for i in range(replicas)
            ]
            folded = fold_round(state, OWN_LIMIT, round_, heldout, range(replicas), said, said)
            assert folded is not None and not folded.verdict.fire
            state = json.loads(json.dumps(folded.state))
            found.append((state, folded.verdict))
        return found

    assert folds({name: Metric(sum=value, count=1)}) == folds({})


@functools.cache
def honest_delay() -> int:
    """Rounds from the begin of a hack to the halt where nobody lies."""
    return [verdict.fire for verdict in verdicts_of({}, hack=0.02)].index(True) - 30


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_one_replica_of_eight_neither_halts_a_healthy_run_nor_hides_a_hack(lie: dict[str, Any]):
    healthy = verdicts_of(lie, hack=0.0)
    assert not any(verdict.fire for verdict in healthy)
    far = [verdict.warning for verdict in healthy if verdict.warning]  # of a metric that no other replica is near to
    assert all(words.startswith("the training metric of replica 7 has been ") for words in far)
    assert all(verdict.folded for verdict in healthy)
    lied = [verdict.fire for verdict in verdicts_of(lie, hack=0.02)].index(True) - 30
    assert lied <= 2 * honest_delay()
