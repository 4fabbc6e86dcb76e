"""What a run's guard says to scores and settings that cannot be meant. None of them halts a healthy run."""

import itertools
import json
import logging
import math
import random
from typing import Any

import pytest
import torch
from protocol_fleet import Fleet, tiny_model
from sessions import context_of

from diloco_orchestrator.config import GuardConfig, make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard import VerdictKind, fold
from diloco_orchestrator.guard.robust import RoundReports, first_mean, weighted_mean
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.launching.plan import plan_launch
from diloco_orchestrator.protocol.records import Contribution, Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Verdict
from replica.training.heldout_scorer import HeldOutScorer

EIGHT = HeldoutSet(metric="reward", shares=(60,) * 8, digest="0" * 64)


def manifest(replica_id: int, scores: list[Score], **fields: Any) -> Contribution:
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
        scores=tuple(scores),
        **fields,
    )


class Rounds:
    """Rounds of eight replicas, judged with the default settings of a run."""

    def __init__(self, heldout: HeldoutSet = EIGHT, guard: Any = None) -> None:
        self.config = make_config({"entrypoint": "m:f", "guard": guard or {}}).guard
        self.heldout, self.state, self.round = heldout, None, 0
        self.rng = random.Random(7)

    def next(self, change: Any = lambda share, score: score, observed: str | None = "reward") -> Verdict:
        """`change`: of a share's score before it is sent. `observed`: the metric that replicas observe."""
        self.round += 1
        said = []
        for i in range(8):
            score = change(i, 0.5 + self.rng.gauss(0, 0.05))
            metric = Metric(sum=5.0 + self.rng.gauss(0, 0.1), count=10)
            fields: dict[str, Any] = {} if observed is None else {"metrics": {observed: metric}}
            if observed == self.heldout.metric:
                fields["in_loop"] = metric
            sent = [] if score is None else [Score(share=i, sum=None if score != score else 60 * score, count=60)]
            said.append(manifest(i, sent, **fields))
        result = fold_round(self.state, self.config, self.round, self.heldout, range(8), said, said)
        assert result is not None
        self.state = json.loads(json.dumps(result.state))
        return result.verdict


# -- the evaluation ---------------------------------------------------------------------------------------------------


def test_an_evaluation_that_raises_is_named_beside_its_own_error():
    def raises(model: torch.nn.Module, items: Any) -> Any:
        raise KeyError("a bug in the user's own code")

    scorer = HeldOutScorer(raises, list("abcd"), 2, "loss")
    with pytest.raises(KeyError, match="the user's own code") as caught:
        scorer.score(tiny_model(), 1, 0, (0, 1))
    assert caught.value.__notes__ == ["heldout(model, items) raised this, for the 2 items of share 1."]


@pytest.mark.parametrize(
    ("returned", "said"),
    [([1.0], "1 numbers for 2"), ([1.0] * 3, "3 numbers for 2"), (0.5, "1 numbers for 2"), (torch.ones(()), "1 num")],
)
def test_another_number_of_scores_than_items_is_refused(returned, said):
    scorer = HeldOutScorer(lambda model, items: returned, list("abcd"), 2, "loss")
    with pytest.raises(ConfigError, match=f"heldout returned {said}.* items; it must be one for each"):
        scorer.score(tiny_model(), 0, 0, (0, 1))


def test_a_held_out_function_that_changes_its_items_is_refused():
    def changes(model: Any, items: Any) -> list[float]:
        items[-1][0] += 1.0
        return [0.0] * len(items)

    scorer = HeldOutScorer(changes, [[1.0], [2.0], [3.0], [4.0]], 2, "loss")
    with pytest.raises(ConfigError, match=r"changed item 1 of share 0 in place.*copy\.deepcopy\(items\)"):
        scorer.score(torch.nn.Linear(1, 1), 0, 0, (0, 1))


def test_one_evaluation_that_returns_nan_costs_its_share_and_five_rounds_without_any_halt():
    rounds = Rounds()
    verdicts = [rounds.next(lambda i, score: float("nan") if i == 3 else score) for _ in range(40)]
    assert all(v.folded and not v.fire and not v.warning for v in verdicts)
    assert not rounds.next(lambda i, score: float("nan")).fire  # most of the items in one round
    last = rounds.next(lambda i, score: float("nan"))
    assert last.fire and "nonfinite: no finite metrics in 2 consecutive rounds" in last.reason


@pytest.mark.parametrize("start", [1, 40])
def test_another_scorer_in_one_replica_neither_halts_nor_hides(start):
    """One share is scored ten times as high, from the first round or from one in the middle."""
    rounds = Rounds()

    def other(share: int, score: float) -> float:
        score -= 0.02 * max(rounds.round - 80, 0)
        return 10 * score if share == 3 and rounds.round >= start else score

    healthy = [rounds.next(other) for _ in range(80)]
    assert not any(verdict.fire for verdict in healthy)
    assert any(rounds.next(other).fire for _ in range(16))


@pytest.mark.parametrize("rule", ["sequential", "heldout"])
@pytest.mark.parametrize("made_up", [1.7e308 / 60, -1.7e308 / 60, 1e16])
@pytest.mark.parametrize("liars", [(3,), (3, 5)], ids=["one", "two"])
def test_a_first_score_that_nobody_can_have_measured_neither_ends_the_fold_nor_hides_a_collapse(
    liars: tuple[int, ...], made_up: float, rule: str
):
    """In the mean of the first scores it left no digits for what comes after."""
    rounds = Rounds(guard={"rule": rule})

    def lied(share: int, score: float) -> float:
        return made_up if share in liars else score - 0.04 * max(rounds.round - 40, 0)

    verdicts = [rounds.next(lied) for _ in range(40)]
    assert not any(verdict.fire for verdict in verdicts)
    changes = [abs(a.value - b.value) for a, b in itertools.pairwise(verdicts)]  # type: ignore[operator]
    assert 0 < max(changes) < 1
    assert any(rounds.next(lied).fire for _ in range(30))


def test_first_scores_that_can_have_been_measured_are_averaged_as_they_are():
    scores = [(60, 0.0), (60, 0.0), (60, 0.0), (61, -900.0), (60, 2.5e5)]
    assert first_mean(scores) == weighted_mean(scores)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([(60, 1.7e308), (60, 1.7e308)], 1.7e308),
        ([(60, 1.7e308), (60, -1.7e308)], 0.0),
        ([(1, 1.7e308), (1, 1.7e308)], 1.7e308),
        ([(1, math.inf), (1, -math.inf)], None),
    ],
)
def test_a_mean_of_numbers_beyond_the_range_of_a_sum(values: list[tuple[int, float]], mean: float | None):
    found = weighted_mean(values)
    assert math.isnan(found) if mean is None else found == pytest.approx(mean)


def test_shares_that_are_scored_too_low_for_good_are_named_and_do_not_halt():
    rounds = Rounds()
    verdicts = [rounds.next(lambda i, s: s - (i in (5, 6) and rounds.round > 40)) for _ in range(120)]
    assert not any(verdict.fire for verdict in verdicts)
    assert any("on a few shares alone (5, 6), which does not halt" in verdict.warning for verdict in verdicts)


# -- the set ----------------------------------------------------------------------------------------------------------


def test_an_item_given_twice_is_refused_because_shares_would_overlap():
    with pytest.raises(ConfigError, match=r"held-out items 1 and 4 are the same, so that the shares of two replicas"):
        HeldOutScorer(lambda model, items: [0.0] * len(items), list("abcdb"), 2, "loss")


def test_a_share_given_twice_in_a_round_is_refused():
    twice = [Score(share=0, sum=1.0, count=60), Score(share=0, sum=2.0, count=60)]
    with pytest.raises(ValueError, match=r"shares \[0, 0\] hold one share twice"):
        fold(None, GuardConfig(), EIGHT, RoundReports(1, twice))


def attach(guard: Any, items: list[Any] | None) -> None:
    fleet, model = Fleet(replicas=1, guard=guard), tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {}
    if items is not None:
        given = {"heldout": lambda model, items: [0.0] * len(items), "heldout_items": items}
    context_of(fleet, 0).attach(model, optimizer, **given)


def test_a_set_too_small_for_the_sensitivity_is_refused_at_attach_with_the_number_it_takes():
    with pytest.raises(ConfigError, match=r"96 items is too small .* a drop of 0\.05 within 15 rounds takes 791"):
        attach({"notice_drop": 0.05}, list(range(96)))
    attach({"notice_drop": 0.05, "item_sd": 0.15}, list(range(96)))
    attach({}, list(range(2)))


def test_a_set_too_small_is_refused_at_launch_where_launch_knows_the_items(tmp_path):
    with pytest.raises(ConfigError, match="takes 791 items"):
        plan_launch("json:dumps", store=str(tmp_path), heldout_items=[*range(96)], guard={"notice_drop": 0.05})


def test_a_run_without_a_held_out_set_is_warned_about_unless_it_is_meant(caplog):
    with caplog.at_level(logging.WARNING):
        attach("off", None)
        assert not caplog.records
        attach({}, None)
    assert 'the kill-switch is off (launch with guard="off" to mean it)' in caplog.text


def test_a_guard_that_is_off_records_scores_and_never_fires():
    rounds = Rounds(guard="off")
    verdicts = [rounds.next(lambda i, score: score - 0.1 * rounds.round) for _ in range(60)]
    assert not any(v.fire or v.statistics for v in verdicts) and all(v.folded for v in verdicts)
    assert verdicts[-1].value == pytest.approx(0.5 - 6.0, abs=0.1) and verdicts[-1].kind is VerdictKind.CONTINUE


# -- the training metric ----------------------------------------------------------------------------------------------


def test_scores_without_any_training_metric_are_judged_and_said():
    rounds = Rounds()
    verdicts = [rounds.next(observed=None) for _ in range(40)]
    assert all(v.folded and not v.fire for v in verdicts)
    assert [bool(v.warning) for v in verdicts[:6]] == [False] * 4 + [True] * 2
    assert (
        "a Hacking Gap cannot be seen (no training metric was observed: call observe(reward=…)" in verdicts[-1].warning
    )
    assert any(rounds.next(lambda i, s: s - 0.02 * (rounds.round - 40), observed=None).fire for _ in range(10))


def test_a_loss_that_is_observed_where_rewards_are_scored_is_named():
    rounds = Rounds()
    verdicts = [rounds.next(observed="loss") for _ in range(5)]
    assert "replicas observe loss, and held-out is scored as reward: call observe(reward=…)" in verdicts[-1].warning


def test_the_rule_heldout_folds_nothing_without_a_training_metric_and_says_so():
    rounds = Rounds(guard={"rule": "heldout"})
    verdicts = [rounds.next(observed="loss") for _ in range(5)]
    assert not any(v.folded for v in verdicts)
    assert "the kill-switch is blind (replicas observe loss" in verdicts[-1].warning


def test_rows_of_a_data_set_that_occur_twice_are_refused_with_a_line_that_leaves_each_once():
    items = [{"prompt": str(i % 5)} for i in range(8)]
    with pytest.raises(ConfigError, match="items 0 and 5 are the same") as refused:
        HeldOutScorer(lambda model, items: [0.0] * len(items), items, 2, "loss")
    line = str(refused.value).partition("as in ")[2].rstrip(".")
    once = eval(line, {"items": items})
    assert once == items[:5]
    HeldOutScorer(lambda model, items: [0.0] * len(items), once, 2, "loss")
