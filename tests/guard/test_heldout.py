"""`HeldOutGuard`: each tripwire, what never fires, and what survives a restart."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_orchestrator import HeldOutGuard, kl_token_trust_filter

NAN = math.nan


def feed(guard: HeldOutGuard, pairs, start: int = 1, **extra):
    """Fold (in_loop, heldout) pairs, one per round; the last status."""
    for offset, (in_loop, heldout) in enumerate(pairs):
        status = guard.update(start + offset, in_loop, heldout, **extra)
    return status


def quick(**fields) -> HeldOutGuard:
    return HeldOutGuard(**{"min_steps": 1, "ema_alpha": 0.0, "max_proxy_real_gap": 1e9, **fields})


def test_the_defaults_are_the_contract():
    guard = HeldOutGuard()
    assert (guard.kl_hard_stop, guard.max_proxy_real_gap, guard.min_steps) == (0.08, 0.10, 20)
    assert (guard.decline_patience, guard.ema_alpha, guard.rise_eps) == (3, 0.9, 1e-4)


# -- the three tripwires ----------------------------------------------------------------------------------------------


def test_a_held_out_score_that_falls_while_training_rises_fires_after_patience():
    guard = quick(decline_patience=3)
    statuses = [guard.update(r, 0.1 * r, 1.0 - 0.01 * r) for r in range(1, 6)]
    assert [s.fire for s in statuses] == [False, False, False, True, True]
    assert "held-out" in statuses[3].reason and "consecutive" in statuses[3].reason


def test_the_streak_holds_while_training_stands_still_and_breaks_when_held_out_recovers():
    held = quick(decline_patience=2)
    assert not feed(held, [(0, 1.0), (1, 0.9), (1, 0.8)]).fire  # +1, unchanged
    assert held.update(4, 2, 0.7).fire
    broken = quick(decline_patience=2)
    assert not feed(broken, [(0, 1.0), (1, 0.9), (2, 0.9), (3, 0.8)]).fire  # +1, 0, +1
    assert broken.update(5, 4, 0.7).fire


def test_the_streak_counts_in_warm_up():
    guard = quick(min_steps=5, decline_patience=3)
    statuses = [guard.update(r, r, -r) for r in range(1, 6)]
    assert [s.fire for s in statuses] == [False, False, False, False, True]


def test_both_falling_is_no_hack():
    assert not feed(quick(decline_patience=1), [(-r, -r) for r in range(50)]).fire


def test_drift_beyond_the_hard_stop_fires():
    guard = quick()
    assert not guard.update(1, 0, 0, kl_to_init=0.08).fire
    status = guard.update(2, 0, 0, kl_to_init=0.081)
    assert status.fire and "kl_to_init" in status.reason and "hard stop" in status.reason
    assert status.kl_ema == 0.081


def test_a_widening_gap_fires_even_while_held_out_still_rises():
    guard = HeldOutGuard(min_steps=2, ema_alpha=0.0)
    assert not guard.update(1, 0.0, 0.0).fire
    assert not guard.update(2, 0.2, 0.1).fire  # exactly 0.1: not above
    status = guard.update(3, 0.5, 0.2)
    assert status.fire and "Hacking Gap" in status.reason
    assert status.proxy_real_gap == pytest.approx(0.3)


def test_drift_is_named_before_the_streak_and_the_streak_before_the_gap():
    everything = HeldOutGuard(min_steps=3, ema_alpha=0.0, decline_patience=1)
    assert "hard stop" in feed(everything, [(0, 0), (5, -5), (9, -9)], kl_to_init=1.0).reason
    two = HeldOutGuard(min_steps=3, ema_alpha=0.0, decline_patience=1)
    assert "consecutive" in feed(two, [(0, 0), (5, -5), (9, -9)]).reason


def test_nothing_but_nonfinite_fires_before_min_steps():
    guard = HeldOutGuard(min_steps=20, ema_alpha=0.0)
    statuses = [guard.update(r, 10.0 * r, -10.0 * r, kl_to_init=9.0) for r in range(1, 21)]
    assert [s.fire for s in statuses] == [False] * 19 + [True]
    assert all(s.reason == "" for s in statuses[:19])


# -- after it fired ---------------------------------------------------------------------------------------------------


def test_a_verdict_is_latched_with_its_first_reason_and_one_prefix():
    guard = quick()
    first = guard.update(1, 0, 0, kl_to_init=1.0)
    for round_ in range(2, 60):
        later = guard.update(round_, 0, 0, kl_to_init=0.0)
        assert later.fire and later.reason == f"latched: {first.reason}"
    assert guard.should_halt()


def test_reading_never_advances():
    guard = HeldOutGuard()
    assert guard.proxy_real_gap() == 0.0 and guard.last_status is None and not guard.should_halt()
    guard.update(1, 1.0, 1.0)
    before = guard.state()
    for _ in range(5):
        guard.should_halt(), guard.proxy_real_gap(), guard.last_status
    assert guard.state() == before


def test_statuses_hold_real_bools_and_averages():
    status = HeldOutGuard().update(7, 1.0, 2.0)
    assert status.fire is False and status.step == 7
    assert (status.in_loop_ema, status.heldout_ema, status.kl_ema) == (1.0, 2.0, None)


def test_the_average_weighs_the_past_with_alpha():
    status = feed(HeldOutGuard(ema_alpha=0.75), [(0.0, 0.0), (1.0, 2.0), (1.0, 2.0)])
    assert status.in_loop_ema == pytest.approx(0.4375) and status.heldout_ema == pytest.approx(0.875)


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_a_round_folded_again_identically_changes_nothing():
    guard = HeldOutGuard()
    status, state = guard.update(3, 1.0, NAN, kl_to_init=0.01), guard.state()
    assert guard.update(3, 1.0, NAN, kl_to_init=0.01) == status
    assert guard.state() == state


@pytest.mark.parametrize("again", [(3, 1.5, 1.0), (2, 1.0, 1.0), (0, 1.0, 1.0), (3, 1.0, NAN)])
def test_a_round_folded_otherwise_or_backwards_is_refused(again):
    guard = HeldOutGuard()
    guard.update(3, 1.0, 1.0)
    with pytest.raises(ValueError, match=f"round {again[0]} cannot be folded after round 3"):
        guard.update(*again)


def test_gaps_in_the_round_numbers_gate_nothing():
    dense, sparse = quick(decline_patience=2), quick(decline_patience=2)
    fires = [(dense.update(r, r, -r).fire, sparse.update(100 * r, r, -r).fire) for r in range(1, 6)]
    assert all(one == other for one, other in fires)


# -- numbers that are not finite --------------------------------------------------------------------------------------


def test_one_nan_does_not_disarm_the_rule():
    guard = HeldOutGuard(min_steps=2, ema_alpha=0.0)
    feed(guard, [(0.0, 0.0), (NAN, 0.0), (0.0, math.inf)][:2])
    assert guard.update(3, 5.0, 0.0).fire


@pytest.mark.parametrize("bad", [(NAN, 1.0), (1.0, NAN), (math.inf, 1.0), (1.0, -math.inf)])
def test_two_rounds_without_a_finite_score_fire_even_in_warm_up(bad):
    guard = HeldOutGuard()
    assert not guard.update(1, *bad).fire
    status = guard.update(2, *bad)
    assert status.fire and "nonfinite" in status.reason


def test_a_finite_round_in_between_forgives():
    guard = HeldOutGuard()
    assert not feed(guard, [(NAN, 1), (1, 1), (1, NAN), (1, 1), (NAN, NAN)]).fire
    assert guard.updates == 2


def test_rounds_without_finite_scores_do_not_count_towards_min_steps():
    guard = HeldOutGuard(min_steps=2, ema_alpha=0.0)
    assert not feed(guard, [(0, 0), (NAN, 0)]).fire
    assert guard.updates == 1
    assert guard.last_status is not None and guard.last_status.in_loop_ema == 0


def test_averages_are_none_before_the_first_finite_score():
    status = HeldOutGuard().update(1, NAN, 1.0)
    assert status.in_loop_ema is None and status.heldout_ema is None and status.proxy_real_gap == 0.0


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "kl_hard_stop": [0, -1, NAN, math.inf, "x", True],
        "max_proxy_real_gap": [0, -0.1, NAN],
        "min_steps": [0, -1, 1.5, True],
        "decline_patience": [0, 2.0],
        "ema_alpha": [1.0, -0.1, NAN],
        "rise_eps": [-1e-9, NAN],
    }.items(),
)
def test_settings_that_cannot_be_meant_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field):
            HeldOutGuard(**{field: value})


def test_settings_are_keywords_only():
    with pytest.raises(TypeError):
        HeldOutGuard(0.1)  # type: ignore[misc]


def test_the_token_filter_masks_above_the_threshold_and_nan():
    assert [kl_token_trust_filter(v) for v in (0.0, 0.08, 0.0800001, NAN, math.inf)] == [False, False, True, True, True]
    assert kl_token_trust_filter(0.2, threshold=0.3) is False


# -- restarts ---------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-3, 3) | st.sampled_from([NAN, math.inf, -math.inf])


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.none() | st.floats(0, 0.1)), max_size=40), st.integers(0, 40))
def test_a_guard_restored_from_json_at_any_point_goes_on_as_if_nothing_had_happened(rows, cut):
    settings = {"min_steps": 4, "ema_alpha": 0.5}
    straight, broken = HeldOutGuard(**settings), HeldOutGuard(**settings)
    for round_, (in_loop, heldout, kl) in enumerate(rows, 1):
        if round_ == cut:
            broken = HeldOutGuard.restore(json.loads(json.dumps(broken.state())), **settings)
        assert straight.update(round_, in_loop, heldout, kl) == broken.update(round_, in_loop, heldout, kl)
    assert straight.state() == broken.state()
    assert straight.should_halt() == broken.should_halt()
