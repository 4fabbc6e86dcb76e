"""What the guard counts and how much: items and not shares, rounds in a row, gains in one direction only."""

import math
from typing import Any

import pytest

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import HeldOutGuard, fold
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.protocol.records import Contribution, Metric, Score

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
        folded = fold(
            self.state,
            SETTINGS,
            metric="reward",
            round_=self.round,
            scores=scored,
            in_loop=metric,
            total_items=self.total_items,
        )
        self.state = folded.state
        return folded.verdict


def manifest(replica_id: int, metric: str = "reward", **fields: Any) -> Contribution:
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
        metric=metric,
        heldout_items=20,
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


def test_the_training_metric_of_a_blind_round_is_kept_for_the_next_score():
    rounds, all_of_it = Rounds(), dict.fromkeys(range(4), (1.0, 10))
    rounds.next(all_of_it, in_loop=0.1)
    assert not rounds.next({0: (1.0, 10)}, in_loop=0.2).folded
    verdict = rounds.next(all_of_it, in_loop=0.3)
    assert verdict.folded and verdict.in_loop == pytest.approx(0.2)


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


def test_where_two_answers_hold_the_same_share_the_lower_replica_counts():
    said = [manifest(i, scores=(Score(share=0, sum=10.0 * (i + 1), count=20),)) for i in (0, 1)]
    folded = fold_round(None, GuardConfig(), 1, said, said)
    assert folded is not None and folded.verdict.value == pytest.approx(0.5)


def test_one_training_metric_that_is_not_finite_makes_the_rounds_so():
    said = [
        manifest(0, scores=(Score(share=0, sum=1.0, count=20),), in_loop=Metric(sum=5.0, count=5)),
        manifest(1, in_loop=Metric(sum=None, count=5)),
    ]
    folded = fold_round(None, GuardConfig(), 1, said, said)
    assert folded is not None and folded.state["pending"] == {"sum": None, "count": 10}


@pytest.mark.parametrize(("metric", "gap", "fires"), [("reward", 0.3, True), ("loss", 0.3, False), ("loss", 0.6, True)])
def test_a_gap_is_judged_in_the_unit_of_the_metric(metric: str, gap: float, fires: bool):
    """Rewards lie in [0, 1], losses in nats."""
    state: dict[str, Any] | None = None
    for step in range(3):
        scored = manifest(
            0, metric, scores=(Score(share=0, sum=0.0, count=20),), in_loop=Metric(sum=gap * step, count=1)
        )
        folded = fold_round(state, GuardConfig(min_steps=1, ema_alpha=0.0), step + 1, [scored], [scored])
        assert folded is not None
        state = folded.state
    assert folded is not None and folded.verdict.fire is fires
