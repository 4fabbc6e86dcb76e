"""Folding shares over rounds: pairing, missing shares, blindness, and exactly-once."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import fold
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.protocol.records import Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet

SETTINGS = GuardConfig(min_steps=3, ema_alpha=0.0, max_proxy_real_gap=0.5, decline_patience=6)


def heldout(items: int) -> HeldoutSet:
    return HeldoutSet(metric="loss", shares=(items,), digest="0" * 64)


class Run:
    """Folds one round after another, the state through JSON as in a commit."""

    def __init__(self, settings: GuardConfig = SETTINGS, total_items: int = 40) -> None:
        self.settings, self.total_items = settings, total_items
        self.state, self.round = None, 0

    def next(self, shares: dict[int, float], in_loop: float | None = 0.0, items: int = 10):
        """`shares`: mean score by share; `in_loop`: mean training metric of this round."""
        self.round += 1
        scored = [
            Score(share=share, sum=None if math.isnan(mean) else mean * items, count=items)
            for share, mean in shares.items()
        ]
        metric = None if in_loop is None else Metric(sum=None if math.isnan(in_loop) else in_loop * 30, count=30)
        evidence = RoundReports(self.round, scored, {0: metric} if metric else {})
        result = fold(self.state, self.settings, heldout(self.total_items), evidence)
        self.state = json.loads(json.dumps(result.state))
        return result.verdict


def test_the_first_round_sets_the_baselines():
    verdict = Run().next({0: 1.0, 1: 3.0, 2: 2.0, 3: 2.0})
    assert verdict.folded and not verdict.fire and verdict.folds == 1
    assert verdict.value == 2.0 and verdict.proxy_real_gap == 0.0


def test_a_score_is_paired_with_the_metric_of_the_same_model():
    run = Run()
    run.next({0: 1.0, 1: 1.0}, in_loop=0.1, items=20)
    verdict = run.next({0: 2.0, 1: 2.0}, in_loop=0.7, items=20)
    assert verdict.in_loop == pytest.approx(0.7) and verdict.value == pytest.approx(2.0) and verdict.folds == 2


def test_the_final_evaluation_round_is_judged_with_the_last_training_metric():
    run = Run()
    run.next({0: 1.0, 1: 1.0}, in_loop=0.7, items=20)
    scores = [Score(share=share, sum=20.0, count=20) for share in (0, 1)]
    verdict = fold(run.state, SETTINGS, heldout(40), RoundReports(2, scores, final_evaluation=True)).verdict
    assert verdict.folded and verdict.in_loop == pytest.approx(0.7)
    assert not fold(run.state, SETTINGS, heldout(40), RoundReports(2, scores)).verdict.folded


def test_a_missing_hard_share_does_not_look_like_a_change():
    run = Run()
    run.next({0: 1.0, 1: 5.0, 2: 3.0})
    run.next({0: 1.1, 1: 5.1, 2: 3.1})
    assert run.next({0: 1.1, 1: 5.1}).value == pytest.approx(3.1)
    assert run.next({1: 5.2, 2: 3.2}).value == pytest.approx(3.2)


def test_a_share_first_seen_late_starts_where_the_others_are():
    run = Run()
    run.next({0: 1.0, 1: 2.0, 2: 3.0})
    run.next({0: 1.4, 1: 2.5, 2: 3.6})  # their gains differ, so that clipping to the others would not do
    assert run.next({0: 1.4, 1: 2.5, 2: 3.6, 3: -9.0}).value == pytest.approx(2.5)
    assert run.next({0: 1.65, 1: 2.75, 2: 3.85, 3: -8.75}).value == pytest.approx(2.75)


def test_fewer_than_half_of_the_items_are_inconclusive_and_not_folded():
    run = Run()
    run.next({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})
    verdict = run.next({0: 1.0})
    assert not verdict.folded and verdict.reason.startswith("inconclusive") and verdict.folds == 1
    assert run.next({0: 1.0, 1: 1.0}).folded


def test_five_blind_rounds_warn_and_never_fire():
    run = Run()
    run.next({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})
    verdicts = [run.next({0: -99.0}) for _ in range(6)]
    assert [bool(v.warning) for v in verdicts] == [False] * 4 + [True] * 2
    assert "blind" in verdicts[-1].warning and not any(v.fire for v in verdicts)


def test_a_share_that_is_not_finite_is_missing():
    run = Run()
    run.next({0: 1.0, 1: 3.0, 2: 2.0, 3: 2.0})
    for _ in range(3):
        verdict = run.next({0: 1.5, 1: math.nan, 2: 2.5, 3: 2.5})
        assert verdict.folded and not verdict.fire and verdict.value == pytest.approx(2.5)


def test_two_rounds_in_which_most_items_are_not_finite_fire():
    run = Run()
    run.next({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})
    assert not run.next({0: math.nan, 1: math.nan, 2: math.nan, 3: 1.0}).fire
    verdict = run.next({0: 1.0, 1: math.nan, 2: math.nan, 3: math.nan})
    assert verdict.fire and "nonfinite" in verdict.reason


def test_a_training_metric_that_is_not_finite_in_two_rounds_fires():
    run = Run()
    for in_loop in (0.0, math.nan, math.nan):
        verdict = run.next({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, in_loop=in_loop)
    assert verdict.fire and "nonfinite" in verdict.reason


def test_a_collapse_fires_and_stays():
    run = Run()
    for round_ in range(6):
        verdict = run.next(dict.fromkeys(range(4), -0.1 * round_), in_loop=0.1 * round_)
    assert verdict.fire and "Hacking Gap" in verdict.reason
    later = run.next(dict.fromkeys(range(4), 5.0), in_loop=0.0)
    assert later.fire and later.reason.startswith("latched:")
    assert run.next({0: 1.0}).fire  # also when a round is inconclusive


def test_one_share_scored_twice_is_refused():
    with pytest.raises(ValueError, match="one share twice"):
        fold(None, SETTINGS, heldout(2), RoundReports(1, [Score(share=0, sum=1.0, count=1)] * 2))


@given(st.lists(st.dictionaries(st.integers(0, 4), st.floats(-5, 5), max_size=5), min_size=1, max_size=20))
def test_the_order_of_shares_changes_nothing(rounds):
    forwards, backwards = Run(), Run()
    for shares in rounds:
        flipped = dict(reversed(shares.items()))
        one = forwards.next(dict(sorted(shares.items())))
        other = backwards.next(dict(sorted(flipped.items())))
        assert one == other


def test_a_common_drift_is_measured_whatever_shares_are_there():
    """Shares of very different difficulty, one of five missing in every round: the value follows the drift alone."""
    run, levels = Run(total_items=50), [0.0, 3.0, -4.0, 1.0, 10.0]
    run.next(dict(enumerate(levels)))
    for round_ in range(1, 30):
        present = {i: level + 0.01 * round_ for i, level in enumerate(levels) if i != round_ % 5}
        assert run.next(present).value == pytest.approx(2.0 + 0.01 * round_)
