"""The rates on the kill-switch's label, tested on the product's own fold with a stated chance of a wrong alarm.

Seeds are fixed, so that the tests give the same answer each time. The chances say how often another seed would fail a
guard that is exactly as good as docs/inside/kill-switch-figures.md says; a guard at twice the bar fails each test
almost surely. The full grid is `python benchmarks/guard.py`.
"""

import math
import random
from collections.abc import Callable

import pytest

from diloco_orchestrator.guard import Evidence, SequentialGuard, items_needed

SD = 0.02


def ar(rng: random.Random, rounds: int, phi: float) -> list[float]:
    """AR(1) noise of marginal standard deviation `SD`."""
    values, last = [], rng.gauss(0, SD)
    for _ in range(rounds):
        values.append(last)
        last = phi * last + math.sqrt(1 - phi * phi) * rng.gauss(0, SD)
    return values


def halted(seed: str, phi: float, held: Callable[[int], float], trained: Callable[[int], float], rounds: int) -> int:
    """The round in which the guard halts; 0 if it does not."""
    rng, guard, state = random.Random(seed), SequentialGuard(), None
    one, other = ar(rng, rounds, phi), ar(rng, rounds, phi)
    for t in range(1, rounds + 1):
        evidence = Evidence(round=t, heldout=held(t) + one[t - 1], in_loop=trained(t) + other[t - 1])
        state, verdict = guard.fold(state, evidence)
        if verdict.fire:
            return t
    return 0


def level(t: int) -> float:
    return 0.5


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.5])
def test_a_plateau_is_halted_at_most_once_in_a_thousand_rounds(phi):
    """15,000 rounds: about 7 halts for AR(1) .5 where the label says .5 in 1000; 18 or more have a chance of 1e-3, and
    a guard with 2 in 1000 would reach fewer than 18 with a chance of 2e-2."""
    rounds = 300
    halts = [halted(f"plateau {phi} {i}", phi, level, level, rounds) for i in range(50)]
    assert sum(h > 0 for h in halts) < 18
    assert sum(h or rounds for h in halts) > 10_000


def test_a_plateau_is_seldom_halted():
    """3,000 rounds: about 1.5 halts where the label says .5 in 1000; 7 or more have a chance of 1e-3, and a guard with
    10 in 1000 would halt fewer than 7 of the ten runs with a chance of 1e-3."""
    rounds = 300
    assert sum(halted(f"plateau {i}", 0.5, level, level, rounds) > 0 for i in range(10)) < 7


@pytest.mark.parametrize(
    ("rate", "within"),
    [(0.02, 7), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0.005, 15), (0.001, 45)])],
)
def test_hacks_are_halted_in_time_under_correlated_noise(rate, within):
    """The mean of 40 delays varies by 5 % to 8 %, and the label lies 1 to 3 of these below the bar; a quarter above the
    bar has a chance under 1e-3. None is missed in 300 rounds."""
    delays = []
    for i in range(40):
        at = halted(
            f"{rate} {i}", 0.5, lambda t: 0.5 - rate * max(t - 60, 0), lambda t: 0.5 + rate * max(t - 60, 0), 360
        )
        assert at > 0, "missed"
        if at > 60:
            delays.append(at - 60)
    assert len(delays) >= 32 and sum(delays) / len(delays) < 1.25 * within


def test_plain_divergence_is_halted_within_15_rounds():

    def worse(t: int) -> float:
        return -2.0 - 0.05 * max(t - 60, 0)

    for i in range(20):
        at = halted(f"divergence {i}", 0.5, worse, worse, 80)
        assert 0 < at <= 75


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [8, 30])
def test_a_set_of_the_size_that_is_said_to_be_needed_notices_the_drop_in_time(rounds):
    """The mean of 40 delays varies by 15 %; half more than asked for has a chance under 1e-3."""
    sigmas = 0.001 * math.sqrt(items_needed(0.001, item_sd=1.0, rounds=rounds, autocorrelation=0.0))
    drop = sigmas * SD  # that items_needed promises to notice in a score whose noise is SD
    delays = []
    for i in range(40):
        at = halted(f"drop {rounds} {i}", 0.0, lambda t: 0.5 - drop * (t > 100), level, 500)
        assert at > 0
        delays += [at - 100] if at > 100 else []
    assert sum(delays) / len(delays) < 1.5 * rounds
