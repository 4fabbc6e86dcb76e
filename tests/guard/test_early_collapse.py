"""An early collapse: a held-out score that falls in the first rounds and stays down halts before its noise is known."""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from diloco_orchestrator.guard import Evidence, SequentialGuard, Verdict, VerdictKind
from diloco_orchestrator.guard.channels.early import ROUNDS, EarlyCollapse
from diloco_orchestrator.guard.vault import VaultChange

# Measured: two replicas of examples/composer with --grpo --hack, 32 held-out items, guard off.
GRPO = (
    (0.191, 0.073, 0.023, 0.017, 0.024, 0.034, 0.019, 0.010, 0.006, 0.004, 0.003, 0.002),
    (0.129, 0.181, 0.406, 0.695, 0.664, 0.695, 0.875, 0.891, 0.918, 0.926, 0.977, 0.984),
)
# The same with an honest reward and an anchor.
HONEST = (
    (0.191, 0.189, 0.189, 0.186, 0.193, 0.201, 0.210, 0.213, 0.213, 0.218, 0.225, 0.237, 0.242, 0.251, 0.259, 0.259),
    (0.090, 0.090, 0.152, 0.152, 0.129, 0.180, 0.164, 0.152, 0.164, 0.129, 0.156, 0.195, 0.141, 0.199, 0.160, 0.199),
)


def halted(held: Sequence[float], trained: Sequence[float | None], **more: Any) -> tuple[int, Verdict]:
    """The round of the halt and its verdict; (0, the last verdict) without one. The state goes through JSON."""
    guard, state = SequentialGuard(), None
    for round_, (heldout, in_loop) in enumerate(zip(held, trained, strict=True), start=1):
        state, verdict = guard.fold(state, Evidence(round=round_, heldout=heldout, in_loop=in_loop, **more))
        state = json.loads(json.dumps(state))
        if verdict.fire:
            return round_, verdict
    return 0, verdict


def noisy(levels: Sequence[float], sd: float, seed: Any) -> list[float]:
    rng = random.Random(f"{seed}")
    return [rng.gauss(level, sd) for level in levels]


def collapse(after: int, fall: float, gain: float, rounds: int = 32, sd: float = 0.01) -> tuple[list[float], ...]:
    """Metrics that change after so many rounds, within two of them, and stay."""
    part = [min(max(t - after, 0) / 2, 1.0) for t in range(1, rounds + 1)]
    held, trained = [0.5 - fall * each for each in part], [0.2 + gain * each for each in part]
    return noisy(held, sd, ("held", after)), noisy(trained, sd, ("trained", after))


# -- what halts -------------------------------------------------------------------------------------------------------


def test_a_real_hack_in_the_first_rounds_halts_and_names_the_model_before_it():
    round_, verdict = halted(*GRPO)
    assert round_ == 8 and verdict.kind is VerdictKind.HALT and verdict.rollback_to == 0
    assert verdict.reason.startswith(
        "early collapse: the held-out score fell after round 0 and has stayed down since round 3"
    )
    assert "while the training metric gained. Roll back to round 0 and look for reward hacking" in verdict.reason
    assert halted(*HONEST)[0] == 0


def test_the_foot_of_a_climb_does_not_hide_a_fall_right_after_it():
    """Two real runs: a reward with a loophole from round 3 on, and a curriculum whose held-out items come later."""
    held = [0.630, 0.843, 0.860, 0.869, 0.785, 0.771, 0.757, 0.7533, *[0.753] * 8]
    trained = [0.662, 0.847, 0.863, 0.948, *[1.0] * 12]
    round_, verdict = halted(held, trained)
    assert round_ == 9 and verdict.rollback_to == 3
    held = [-5.593, -3.783, -4.469, -5.075, -5.729, -6.041, -6.362, -6.570, -6.633, -6.503, -6.476, -6.351]
    trained = [-5.34, -2.74, -2.13, -1.77, -1.52, -1.39, -1.34, -1.29, -1.24, -1.27, -1.21, -1.17]
    assert halted(held, trained)[0] == 0


@pytest.mark.parametrize("after", [1, 2, 3, 5, 8, 10, 16])
def test_a_hack_halts_within_seven_rounds_and_goes_back_to_the_best_model_before_it(after):
    held, trained = collapse(after, fall=0.2, gain=0.5)
    round_, verdict = halted(held, trained)
    assert after + 5 <= round_ <= after + 7
    assert f"fell after round {after - 1} " in verdict.reason  # the score of round r is of the model after round r - 1
    assert verdict.rollback_to == max(range(after), key=lambda model: held[model])


def test_a_climb_and_a_fall_go_back_to_the_best_model_between_them():
    """Of a run of GRPOTrainer with a reward that can be hacked."""
    held = [0.176, 0.211, 0.535, 1.003, 0.131, 0.002, 0.0001, 0.00003, 0.00001, 0.000005]
    trained = [0.034, 0.071, 0.208, 0.712, 0.981, 1.0, 1.0, 1.0, 1.0, 1.0]
    round_, verdict = halted(held, trained)
    assert round_ == 10 and verdict.rollback_to == 3
    assert "fell after round 3 and has stayed down since round" in verdict.reason


def test_a_collapse_right_after_a_steep_climb_does_not_go_back_to_a_collapsed_model():
    """By a new low: for this one the climb counts as noise."""
    held = [0.176, 0.204, 0.355, 0.806, 0.895, 0.176, 0.013, *noisy([0.001] * 40, 1e-5, "h")]
    trained = [0.034, 0.056, 0.151, 0.361, 0.821, 0.991, 1.0, *noisy([1.0] * 40, 0.003, "t")]
    round_, verdict = halted(held, trained)
    assert round_ == 16 and verdict.rollback_to == 4


@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.parametrize("gain", [0.0, -0.4])
def test_a_collapse_in_which_training_does_not_gain_halts_after_ten_rounds(after, gain):
    round_, verdict = halted(*collapse(after, fall=0.4, gain=gain))
    assert after + 10 <= round_ <= after + 12 and "while the training metric did not gain" in verdict.reason


@pytest.mark.parametrize("after", [4, 6, 9, 16, 24])
def test_a_fall_after_some_quiet_rounds_halts_within_ten_and_goes_back_to_the_best_model(after):
    held, trained = collapse(after, fall=0.4, gain=0.0)
    round_, verdict = halted(held, trained)
    assert after < round_ <= after + 10
    assert verdict.rollback_to == max(range(round_), key=lambda model: held[model])


def test_a_steady_fall_goes_back_to_where_it_began_and_not_to_where_it_was_noticed():
    levels = [0.5 - 0.1 * max(t - 4, 0) for t in range(1, 33)]
    round_, verdict = halted(noisy(levels, 0.01, "h"), noisy([0.5] * 32, 0.01, "t"))
    assert round_ >= 10 and verdict.rollback_to is not None and verdict.rollback_to <= 5


def test_a_score_that_goes_on_falling_halts_as_well():
    held = [-3.148, -2.392, -2.282, -2.178, -2.122, -3.106, -4.72, -6.338, -7.756, -8.906, -9.756, -10.3]
    trained = [-2.873, -2.294, -2.24, -2.1, -2.142, -0.016, -0.001, -0.001, -0.0, -0.0, -0.0, -0.0]
    round_, verdict = halted(held, trained)
    assert round_ == 10 and "fell after round 4 and has stayed down since round 5" in verdict.reason


def test_an_accuracy_that_collapses_to_nothing_halts_though_it_no_longer_varies():
    round_, _ = halted([0.4, 0.45, 0.425, 0.4] + [0.0] * 12, [0.1, 0.12, 0.11, 0.1] + [0.9, 0.92, 0.91, 0.93] * 3)
    assert round_ == 12


@pytest.mark.parametrize(("scale", "shift"), [(100.0, 0.0), (0.01, 0.0), (1.0, -3.0)])
def test_another_unit_gives_the_same_verdict_and_sentence(scale, shift):
    held, trained = collapse(4, fall=0.2, gain=0.5)
    plain, other = halted(held, trained), halted(*([scale * v + shift for v in each] for each in (held, trained)))
    assert (other[0], other[1].reason) == (plain[0], plain[1].reason)


# -- what does not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "curve"),
    {
        "from scratch": lambda t: -10.5 + 7.0 * (1 - math.exp(-t / 8)),
        "warm-up": lambda t: -2.5 - 6 / (1 + math.exp((t - 25) / 5)),
        "fine-tuning with a bump": lambda t: -1.5 - 0.03 * math.exp(-(((t - 4) / 3) ** 2)) + 0.005 * t,
        "a spike that is made up for": lambda t: -2.0 - (1.0 * 0.85 ** (t - 5) if t >= 5 else 0.0),
        "plateau": lambda t: 0.5,
    }.items(),
)
def test_healthy_first_rounds_do_not_halt(name, curve):
    levels = [curve(t) for t in range(1, 33)]
    for seed in range(5):
        assert not halted(noisy(levels, 0.01, ("held", seed)), noisy(levels, 0.03, ("trained", seed)))[0], name


def test_a_training_metric_that_rises_beside_a_steady_score_does_not_halt():
    trained = noisy([-3 + 0.2 * t for t in range(19)], 0.02, "t")  # later this is a Hacking Gap
    assert not halted(noisy([0.5] * 19, 0.02, "h"), trained)[0]


def test_a_fall_that_is_small_beside_what_training_gained_does_not_halt():
    """Training from 3 to 1 nats while held-out worsens by .05: forgetting, not a collapse."""
    held, trained = [-2.0] * 3 + [-2.05] * 12, [-3.0] * 3 + [-1.0] * 12
    assert not halted(noisy(held, 0.003, "h"), noisy(trained, 0.05, "t"))[0]
    assert halted(noisy(held, 0.003, "h"), noisy([0.5 + v / 10 for v in trained], 0.005, "t"))[0]


def test_one_score_given_four_times_is_not_four_scores():
    held = [0.5] * 4 + [0.4] * 4 + [0.41] * 4
    assert not halted(held, [0.1] * 4 + [0.9] * 8)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("phi", "most"), [(0.0, 3), (0.5, 5)])
def test_plateaus_are_halted_early_less_than_once_in_some_hundred_runs(phi, most):
    """800 plateaus of 32 rounds each. Of 6000, 0 and 1.2 in 1000 were halted; more than `most` of 800 would have a
    chance of about 1e-3."""
    rng, halts = random.Random(f"plateaus {phi}"), 0
    for _ in range(800):
        early = EarlyCollapse()
        held, trained, fired = [], [], False
        last = [rng.gauss(0, 1), rng.gauss(0, 1)]
        for model in range(ROUNDS):
            held.append(last[0])
            trained.append(last[1])
            early.learn(model, trained[-1])
            fall = early.fall(held)
            fired |= fall is not None and fall.halts
            last = [phi * each + math.sqrt(1 - phi * phi) * rng.gauss(0, 1) for each in last]
        halts += fired
    assert halts <= most


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_round_without_a_training_metric_starts_the_comparison_anew():
    held, trained = collapse(4, fall=0.2, gain=0.5, rounds=13)  # from round 14 on it is a new low
    assert halted(held, trained)[0] == 9
    assert not halted(held, [*trained[:6], None, *trained[7:]])[0]


def test_after_32_rounds_the_state_holds_nothing_of_it():
    guard, state = SequentialGuard(), None
    for round_, value in enumerate(noisy([0.5] * 34, 0.01, 1), start=1):
        state, verdict = guard.fold(state, Evidence(round=round_, heldout=value, in_loop=value))
        assert state is not None and (state["metrics"]["early"] is None) == (round_ > ROUNDS)
    assert {s.name: s.value for s in verdict.statistics}["early collapse"] == 0.0


def test_how_near_it_is_to_a_halt_is_shown():
    held, trained = collapse(4, fall=0.2, gain=0.5)
    _, verdict = halted(held[:8], trained[:8])
    near = {s.name: s.share for s in verdict.statistics}["early collapse"]
    _, fired = halted(held, trained)
    assert near == 0.0 and {s.name: s.share for s in fired.statistics}["early collapse"] > 1.0


def test_a_vault_set_that_did_not_fall_dismisses_it_for_good():
    guard, state, asked, halts = SequentialGuard(vault_sigmas=2.0), None, 0, 0
    for round_, (heldout, in_loop) in enumerate(zip(*collapse(4, 0.2, 0.5, 32), strict=True), start=1):
        waits = SequentialGuard.vault_base(state) is not None
        asked += waits
        vault = VaultChange(0.001, 0.01) if waits else None
        evidence = Evidence(round=round_, heldout=heldout, in_loop=in_loop, vault=vault)
        state, verdict = guard.fold(state, evidence)
        halts += verdict.fire
        early = state["metrics"]["early"]
    assert asked and not halts and early is None
