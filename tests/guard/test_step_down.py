"""A step down: found while the noise is hardly known; a climb that stops and a bump that heals are none."""

import random
import re

import pytest

from diloco_orchestrator.guard import Evidence, SequentialGuard, Verdict
from diloco_orchestrator.guard.channels.alarm import Shown
from diloco_orchestrator.guard.channels.metrics import MetricChannels
from diloco_orchestrator.guard.channels.noise import Noise
from diloco_orchestrator.guard.channels.step_down import LIMITS, StepDown


def folded(held: list[float]) -> tuple[int, Verdict]:
    """The round of the halt and its verdict; (0, the last verdict) without one."""
    guard, state = SequentialGuard(), None
    for t, score in enumerate(held):
        state, verdict = guard.fold(state, Evidence(round=t + 1, heldout=score))
        if verdict.fire:
            return t + 1, verdict
    return 0, verdict


def stepped(seed: int, climb: float, onset: int, size: float, rounds: int = 80) -> list[float]:
    rng = random.Random(f"step {seed}")
    return [rng.gauss(0.5 + climb * min(t, onset) - size * (t > onset), 0.01) for t in range(rounds)]


@pytest.mark.parametrize(("climb", "onset"), [(0.0, 11), (0.005, 14), (0.02, 20)])
def test_a_small_step_after_a_short_climb_halts_while_the_noise_is_hardly_known(climb, onset):
    """Seven standard deviations, after 12 to 21 rounds: most halt within 12 rounds, and many of those by the step."""
    found = [folded(stepped(seed, climb, onset, 0.07)) for seed in range(12)]
    in_time = [verdict.reason for at, verdict in found if onset < at <= onset + 13]
    assert len(in_time) >= 8
    assert sum(reason.startswith("step down") for reason in in_time) >= 4


def judged(scores: list[float], coarse: float) -> list[bool]:
    """Whether the channel alone halts in each round."""
    channel = StepDown()
    return [bool(channel.judge(t, [each], coarse, 0.0, False, 10.0, Shown(0.0))) for t, each in enumerate(scores)]


def test_scores_of_few_items_that_lose_one_for_good_do_not_step_down():
    """A change of one item is all that was ever seen: it says nothing of how scores vary."""
    for later in ([0.6875] * 20, [0.6875, 0.625] * 20):
        scores = [0.75, 0.6875] * 10 + later
        assert not any(judged(scores, 0.0625))
    assert any(judged([0.75, 0.6875] * 10 + [0.25, 0.1875] * 10, 0.0625)[19:30])


def test_a_small_step_is_found_by_what_has_been_seen_since():
    """Five standard deviations after a climb of one in each of 20 rounds: within 48 rounds, and not all at once."""
    found = []
    for seed in range(6):
        scores = stepped(seed, 0.01, 20, 0.05, 70)
        found += [next((t - 20 for t, halts in enumerate(judged(scores, 0.0)) if halts), 80)]
    assert sum(each <= 48 for each in found) >= 5
    assert sum(20 < each <= 48 for each in found) >= 1


def test_after_the_first_rounds_only_short_steps_are_compared():
    scores = stepped(3, 0.0, 150, 0.04, 120)
    channel = StepDown()
    for t, each in enumerate(scores):
        channel.judge(t, [each], 0.0, 0.0, False, 10.0, Shown(0.0))
        assert channel.found is None or channel.found.since <= (48 if t < 96 else 20)
        assert len(channel.last) <= (60 if t < 96 else 32)


def test_a_spike_that_healed_long_ago_is_no_step_down():
    for seed in range(2):
        rng = random.Random(f"spike {seed}")
        for tau in (1.5, 4.0):
            scores = [rng.gauss(-0.1 * 2.718 ** (-(t - 40) / tau) * (t >= 40), 0.005) for t in range(95)]
            assert not any(judged(scores, 0.0)[52:])


def test_noise_that_was_larger_before_is_no_step_down():
    """Noise of five times the size that ends, and one score far above: what is left lies below them for good."""
    wrong = 0
    for seed in range(2):
        rng = random.Random(f"larger {seed}")
        noisy = [rng.gauss(0.0, 5.0 if t < 20 else 1.0) for t in range(60)]
        outlier = [rng.gauss(0.0, 1.0) + 9.0 * (t == 24) for t in range(60)]
        for scores in (noisy, outlier):
            channel = StepDown()
            for t, each in enumerate(scores):
                halts = channel.judge(t, [each], 0.0, 0.0, False, 10.0, Shown(0.0))
                wrong += bool(halts) and channel.found.since >= 12
    assert wrong == 0


@pytest.mark.parametrize(("height", "tau", "most"), [(30.0, 12.0, 0.35), (300.0, 40.0, 0.35), (0.0, 1.0, 0.35)])
def test_the_bend_of_a_climb_is_no_autocorrelation(height, tau, most):
    """White noise on climbs of up to seven standard deviations a round; 40 rounds after a first guess of .65."""
    found = []
    for seed in range(12):
        rng, noise = random.Random(f"bend {seed}"), Noise()
        for t in range(60):
            noise.add(rng.gauss(height * (1 - 2.718281828 ** (-t / tau)), 1.0))
        found.append(noise.rho)
    assert sum(found) / len(found) < most


def test_a_climb_that_stops_or_a_bump_that_heals_is_no_step_down():
    rng = random.Random("stops")
    for slope in (0.02, 0.1):
        stops = [rng.gauss(slope * min(t, 20), 0.01) for t in range(70)]
        bump = [rng.gauss(1 - 10 * slope * 0.8 ** max(t - 40, 0) * (t >= 40), 0.01) for t in range(70)]
        assert not any(folded(each)[1].reason.startswith("step down") for each in (stops, bump))


def test_every_number_of_the_sentence_follows_from_the_scores():
    words = re.compile(
        r"step down: the last (\d+) held-out scores that differ, (\S+) in the mean, lie (\S+) below where the scores "
        r"before lead\. A step explains them better than noise does, by a log-likelihood ratio of (\S+) \(halts "
        r"above (\S+)\)\. Roll back to round (\d+) and"
    )
    rng, seen = random.Random("words"), set[int]()
    for seed in range(30):
        onset, size = rng.randrange(8, 40), rng.choice([0.03, 0.04, 0.1, 0.3])
        held = stepped(seed, 0.0, onset, size)
        round_, verdict = folded(held)
        said = words.match(verdict.reason)
        if said is None:
            continue
        since, back = int(said[1]), int(said[6])
        seen.add(since)
        before, later = held[:round_][-since - 12 : round_ - since], held[round_ - since : round_]
        assert float(said[2]) == pytest.approx(sum(later) / since, rel=1e-3)
        # No climb goes before: what the scores before lead to is no lower than their mean, and not far above it.
        assert sum(before) / len(before) - float(said[2]) - 0.01 < float(said[3]) < 1.5 * size + 0.02
        assert float(said[4]) > float(said[5]) == LIMITS[since]
        assert held[back] == max(held[:round_]) and back == verdict.rollback_to
    assert min(seen) == 5 and max(seen) >= 20


@pytest.mark.parametrize("times", [4, 8])
def test_scores_that_are_given_again_are_counted_once(times):
    """An evaluation every few rounds: equal scores are no proof of a level."""
    rng = random.Random("again")
    for _ in range(4):
        scores = [each for _ in range(200 // times) for each in [rng.gauss(0.5, 0.01)] * times]
        assert not folded(scores)[1].reason.startswith("step down")


def test_a_step_that_was_dismissed_is_not_raised_again():
    channels, alarms = MetricChannels(), 0
    for t, score in enumerate(stepped(1, 0.0, 20, 0.1, rounds=60)):
        sudden, _ = channels.judge(t, score, None, 1.0, 10.0, None, {})
        raised = [alarm for alarm in sudden if alarm.what.startswith("step down")]
        alarms += len(raised)
        if raised:
            channels.dismiss(t)
    assert alarms == 1


@pytest.mark.parametrize("size", [1e18, 1e200, 1.7e308])
def test_scores_without_bounds_are_judged_without_an_error(size):
    channel = StepDown()
    scores = [0.0, 1.0] * 10 + [-size, size, -size, -size, -size, -size]
    for t, each in enumerate(scores):
        channel.judge(t, [each], 1.0, 0.0, False, 10.0, Shown(0.0))
    assert channel.rounds == len(scores)
