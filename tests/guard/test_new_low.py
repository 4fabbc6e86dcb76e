"""A new low: ten scores that all lie far below every score before halt, although a climb hides how scores vary."""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import Evidence, SequentialGuard, Verdict, VerdictKind, fold
from diloco_orchestrator.guard.channels.early import LOW_BETWEEN, SINCE, Fall, NewLow
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol.records import Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet

# Measured: GRPOTrainer with a reward that can be hacked. The likelihood of held-out answers, and the reward.
CLIMB = (0.176, 0.204, 0.355, 0.806, 0.895, 0.176, 0.013, 0.001)
REWARD = (0.034, 0.056, 0.151, 0.361, 0.821, 0.991, 1.0, 1.0)


def hacked(rounds: int, slower: float = 1.0) -> tuple[list[float], list[float]]:
    """Both series, read as straight lines between the measured rounds; then zero, and a reward of 1."""
    places = [index / slower for index in range(rounds)]
    return [_read(CLIMB, place, 0.0) for place in places], [_read(REWARD, place, 1.0) for place in places]


def _read(points: Sequence[float], place: float, end: float) -> float:
    if place >= len(points):
        return end
    low, part = points[int(place)], place - int(place)
    return low + part * (points[min(int(place) + 1, len(points) - 1)] - low) if part else low


def halted(held: Sequence[float], trained: Sequence[float | None], state: Any = None) -> tuple[int, Verdict]:
    """The round of the halt and its verdict; (0, the last verdict) without one. The state goes through JSON."""
    guard, first = SequentialGuard(), 1 if state is None else state["last"][0] + 1
    for round_, (heldout, in_loop) in enumerate(zip(held, trained, strict=True), start=first):
        state, verdict = guard.fold(state, Evidence(round=round_, heldout=heldout, in_loop=in_loop))
        state = json.loads(json.dumps(state))
        if verdict.fire:
            return round_, verdict
    return 0, verdict


def lows(held: Sequence[float], gained: float = 0.0) -> list[Fall]:
    """What the rule alone finds after each round."""
    rule, found = NewLow(), []
    for model, _ in enumerate(held):
        rule = NewLow.restore(json.loads(json.dumps(rule.state())))
        rule.learn(model, held[: model + 1])
        low = rule.fall(held[: model + 1], gained)
        found += [] if low is None else [low]
    return found


def halts(held: Sequence[float], gained: float = 0.0) -> bool:
    return any(low.halts for low in lows(held, gained))


def noise(rounds: int, phi: float, sd: float, seed: Any) -> list[float]:
    rng, last, found = random.Random(f"{seed}"), 0.0, []
    for _ in range(rounds):
        last = phi * last + math.sqrt(1 - phi * phi) * rng.gauss(0, sd)
        found.append(last)
    return found


# -- what halts -------------------------------------------------------------------------------------------------------


def test_a_collapse_right_after_a_climb_halts_ten_rounds_later_and_goes_back_to_the_top():
    round_, verdict = halted(*hacked(30))
    assert (round_, verdict.kind, verdict.rollback_to) == (16, VerdictKind.HALT, 4)
    assert verdict.reason == (
        "new low: since round 6 the held-out score has been below every score before, by 12.5 times what it varies by "
        "since (halts above 4). Roll back to round 4 and look for reward hacking or divergence there, or lower the "
        "learning rate."
    )
    assert {s.name: s.share for s in verdict.statistics}["new low"] == pytest.approx(12.5 / 4, abs=0.1)


def test_it_needs_no_training_metric():
    held, _ = hacked(30)
    assert halted(held, [None] * 30)[0] == 16


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0, 4.0, 6.0])
def test_a_slower_collapse_halts_within_twelve_rounds_of_its_beginning(slower):
    """From twice to six times as slow the other statistics are faster or see it as well."""
    round_, _ = halted(*hacked(60, slower))
    assert 0 < round_ - 4 * slower - 1 <= 12 + slower  # one more of the stretched rounds is the first that is below


@pytest.mark.parametrize(("scale", "shift"), [(100.0, 0.0), (0.001, 0.0), (3.0, -7.0)])
def test_another_unit_gives_the_same_verdict_and_sentence(scale, shift):
    held, trained = hacked(30)
    other = halted(*([scale * value + shift for value in each] for each in (held, trained)))
    assert (other[0], other[1].reason) == (16, halted(held, trained)[1].reason)


def test_an_accuracy_that_climbs_and_then_is_exactly_zero_halts():
    held = [0.18, 0.2, 0.36, 0.8, 0.9, 0.18] + [0.0] * 12
    assert halted(held, [0.1, 0.2, 0.4, 0.6, 0.8, 0.9] + [1.0] * 12)[0] == 16


def test_a_fall_that_takes_four_rounds_counts_from_its_first_score_below_all():
    held = [0.5, 0.6, 0.9, 1.4, 1.2, 0.8, 0.4, 0.3, 0.2, *noise(14, 0, 0.005, "down")]
    found = [low for low in lows(held) if low.halts]
    assert found and (found[0].best, found[0].since) == (3, 6)


# -- what does not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.7])
def test_a_climb_and_a_plateau_do_not_halt(phi):
    for seed in range(10):
        held = [0.9 - 0.7 * 0.6**t + each for t, each in enumerate(noise(120, phi, 0.01, seed))]
        assert not halts(held) and not halts([0.5 + each for each in noise(120, phi, 0.01, seed)])


@pytest.mark.parametrize(
    ("kept", "sd"), [*((kept, sd) for kept in (0.7, 0.85, 0.93, 0.96, 0.98) for sd in (0.0, 0.002)), (0.995, 0.0)]
)
def test_a_spike_that_recovers_does_not_halt(kept, sd):
    """The last one recovers by half in 138 rounds: without noise its direction shows."""
    lost = [kept ** (t - 5) if t >= 5 else 0.0 for t in range(100)]
    assert not halts([0.001 * t - lost[t] + each for t, each in enumerate(noise(100, 0, sd, kept))])


@pytest.mark.parametrize("again", [1, 2, 4, 8, 16])
def test_scores_that_are_given_again_do_not_halt(again):
    for seed in range(40):
        values = noise(160 // again, 0.5, 0.02, seed)
        assert not halts([values[t // again] for t in range(160)])


@pytest.mark.parametrize("items", [8, 32])
@pytest.mark.parametrize("accuracy", [0.5, 0.95])
def test_accuracies_of_few_items_do_not_halt(items, accuracy):
    rng = random.Random(f"{items} {accuracy}")
    for _ in range(20):
        assert not halts([sum(rng.random() < accuracy for _ in range(items)) / items for _ in range(80)])


def test_a_score_that_never_changes_and_one_that_loses_a_single_item_do_not_halt():
    assert not lows([0.5] * 60)
    assert not halts([1.0] * 20 + [0.75] * 40)
    assert not halts([1.0, 0.75] * 10 + [0.5] * 40)  # by no more than scores can differ


def test_a_fall_that_is_small_beside_what_training_gained_does_not_halt():
    """Held-out worsens by .05 nats once, while training goes from 3 to 1 nats: forgetting, no new low."""
    held = [-2.0 - 0.05 * (t > 6) + each for t, each in enumerate(noise(40, 0, 0.001, "forgets"))]
    assert halts(held) and not halts(held, gained=2.0)


@pytest.mark.parametrize("since", [2, 20])
@pytest.mark.parametrize("lie", [-1000.0, -0.2])
def test_a_quarter_of_the_shares_that_lies_makes_no_new_low(since, lie):
    eight, rng, state = HeldoutSet(metric="reward", shares=(60,) * 8, digest="0" * 64), random.Random(1), None
    for round_ in range(1, 60):
        means = [0.5 + rng.gauss(0, 0.03) for _ in range(8)]
        if round_ >= since:
            means[:2] = [0.5 + lie + rng.gauss(0, 0.001)] * 2
        scores = [Score(share=i, sum=60 * mean, count=60) for i, mean in enumerate(means)]
        result = fold(state, GuardConfig(), eight, RoundReports(round_, scores, {0: Metric(sum=0.5, count=1)}))
        state = result.state
        assert {s.name: s.share for s in result.verdict.statistics}["new low"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.7])
def test_of_some_hundred_healthy_runs_none_is_halted(phi):
    """320 runs of 240 rounds each. docs/inside/kill-switch-figures.md counts those that were, of many more."""
    curves = {
        "plateau": lambda t: 0.5,
        "from scratch": lambda t: -10.5 + 7.0 * (1 - math.exp(-t / 8)),
        "warm-up": lambda t: -2.5 - 6 / (1 + math.exp((t - 25) / 5)),
        "bump": lambda t: -1.5 - 0.03 * math.exp(-(((t - 4) / 3) ** 2)) + 0.005 * t,
    }
    for name, curve in curves.items():
        for seed in range(80):
            assert not halts([curve(t) + each for t, each in enumerate(noise(240, phi, 0.01, (name, seed)))]), name


# -- in a run, and what is kept ---------------------------------------------------------------------------------------


def test_a_run_halts_at_the_same_round_in_all_replicas_and_verify_derives_it_again():
    fleet = Fleet(replicas=2, rounds=30, guard={"rule": "sequential"}, scored=True)
    participants = fleet.join_all()
    for held, trained in zip(*hacked(29), strict=True):
        play(participants, [1.0, 1.0], [report(i, held, trained) for i in range(2)])
        if any(p.open.stopped for p in participants):
            break
    assert all(p.open.stopped for p in participants)
    last = fleet.commits()[-1]
    assert last.verdict is not None and last.verdict.reason.startswith("new low: since round 6 ")
    assert (last.round, last.stop, last.verdict.rollback_to) == (16, "halted", 4)
    found = verify_run(fleet.store)
    assert found.agrees and found.checked["rounds"] == last.round


def test_a_leg_from_the_default_round_goes_on_and_halts_only_for_a_collapse_of_its_own():
    guard, state = SequentialGuard(), None
    held, trained = hacked(30)
    for round_ in range(1, 6):  # the commit of round 5 has scored the model of round 4, the one to go back to
        state, _ = guard.fold(state, Evidence(round=round_, heldout=held[round_ - 1], in_loop=trained[round_ - 1]))
    state = json.loads(json.dumps(state))
    well = [0.9 + each for each in noise(60, 0, 0.01, "well")]
    assert not halted(well, [0.8 + each for each in noise(60, 0, 0.01, "trained")], state)[0]
    assert halted(held[5:], trained[5:], state)[0] == 16


def test_the_state_stays_small_and_a_dismissed_alarm_starts_anew():
    rule, held = NewLow(), noise(300, 0, 0.01, "long")
    for model, _ in enumerate(held):
        rule.learn(model, held[max(0, model - 31) : model + 1])
    models, before, _ = rule.state()
    assert models == list(range(300 - SINCE - LOW_BETWEEN, 300)) and before[0] == 300 - SINCE - LOW_BETWEEN

    guard, state, asked = SequentialGuard(vault_sigmas=2.0), None, 0
    for round_, (heldout, in_loop) in enumerate(zip(*hacked(21), strict=True), start=1):
        waits = SequentialGuard.vault_base(state) is not None
        asked += waits
        vault = VaultChange(0.001, 0.01) if waits else None
        state, verdict = guard.fold(state, Evidence(round=round_, heldout=heldout, in_loop=in_loop, vault=vault))
        assert not verdict.fire
    assert asked == 1
