"""Simulated runs for the guard's benchmark: what held-out score and training metric do, round after round.

Arrays are (rounds, runs). Higher is better: losses are negated. Which rule stops where is left to `guard_rules`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_orchestrator.guard import robust

Array = NDArray[np.float64]
CHANGE = 100  # the last round before anything goes wrong
ROUNDS = 600
Pair = tuple[Array, Array]


def _twice(curve: Array) -> Pair:
    return curve, curve


def _rise(t: Array, size: float, rounds: float) -> Array:
    return size * (1 - np.exp(-t / rounds))


# Held-out score and training metric of healthy runs at round t; rewards first, then negated losses in nats.
HEALTHY: dict[str, Callable[[Array], Pair]] = {
    "plateau": lambda t: _twice(0.5 + 0 * t),
    "co-rising, saturating": lambda t: _twice(0.4 + _rise(t, 0.25, 100)),
    "co-rising, linear": lambda t: _twice(0.3 + 0.0005 * t),
    "benign gap, rising": lambda t: (0.4 + _rise(t, 0.2, 60), 0.4 + _rise(t, 0.27, 60)),
    "benign gap, flat": lambda t: (0.5 + 0 * t, 0.5 + _rise(t, 0.07, 60)),
    "from scratch": lambda t: _twice(-10.5 + _rise(t, 7.0, 8) + _rise(t, 1.2, 60)),
    "from scratch, slow": lambda t: _twice(-10 + _rise(t, 7.0, 40)),
    "power law": lambda t: _twice(-1.8 - 6 / np.sqrt(t + 1)),
    "warm-up": lambda t: _twice(-2.5 - 6 / (1 + np.exp((t - 25) / 5))),
    "memorisation": lambda t: (-3.5 + _rise(t, 1.0, 200), -3.5 + _rise(t, 1.0, 200) + _rise(t, 0.6, 150)),
    "memorisation, linear": lambda t: (-3 + 0.0012 * t, -3 + 0.0024 * t),
    "fine-tuning": lambda t: (_bump(t) + _rise(t, 0.25, 50), _bump(t) + _rise(t, 0.28, 50)),
}


# Their unit is nats per token, in which the launch default of `max_proxy_real_gap` is 0.5 and not 0.10.
LOSSES = (*[*HEALTHY][5:], "divergence, from scratch", "jump, from scratch")


def _bump(t: Array) -> Array:
    """A loss that rises by .03 in the first rounds, while the optimizer's state is fresh."""
    return -1.5 - 0.03 * np.exp(-(((t - 4) / 3) ** 2))


@dataclass(frozen=True)
class Fault:
    """What goes wrong after round `CHANGE`, added to a plateau; u counts the rounds since."""

    heldout: Callable[[Array], Array]
    in_loop: Callable[[Array], Array]
    within: float | None = None  # rounds of mean delay in the bar, for noise up to sd .02 and AR(1) .5


def _ramp(rate: float) -> Callable[[Array], Array]:
    return lambda u: rate * u


FAULTS = {
    "fast hack": Fault(_ramp(-0.02), _ramp(0.02), 7),
    "medium hack": Fault(_ramp(-0.005), _ramp(0.005), 15),
    "slow hack": Fault(_ramp(-0.001), _ramp(0.001), 45),
    "divergence": Fault(_ramp(-0.05), _ramp(-0.05), 15),
    "proxy only, fast": Fault(_ramp(0.0), _ramp(0.02)),
    "proxy only, medium": Fault(_ramp(0.0), _ramp(0.005)),
    "proxy only, slow": Fault(_ramp(0.0), _ramp(0.001)),
    "saturated proxy": Fault(_ramp(-0.005), _ramp(0.0)),
    "jump": Fault(lambda u: -0.2 * (u > 0), lambda u: 0.1 * (u > 0)),
}
BOTH_MOVE = ("fast hack", "medium hack", "slow hack")


@dataclass(frozen=True)
class Collapse:
    """A plateau that collapses in the first rounds and stays down."""

    after: int  # rounds before it falls
    fall: float  # of the held-out score, in all
    gain: float  # of the training metric meanwhile
    over: int = 2  # rounds
    climb: float = 0.0  # of the held-out score in the rounds before, all of which is lost as well
    within: float | None = None  # rounds of mean delay in the bar, for noise up to sd .02 and AR(1) .5


# The first is like a reward that a policy learnt to win by one character: .13 to .67, held-out .191 to .024.
COLLAPSES = {
    **{f"hack after round {after}": Collapse(after, 0.167, 0.54, within=10) for after in (2, 3, 5, 10, 16, 24)},
    "small hack after round 5": Collapse(5, 0.1, 0.1),
    "divergence after round 3": Collapse(3, 0.5, -0.5, within=12),
    "divergence after round 10": Collapse(10, 0.5, -0.5, within=12),
    "saturated proxy after round 5": Collapse(5, 0.3, 0.0, within=12),
}
# The first is like a GRPO run with a reward that can be hacked: .176 to .895 in 5 rounds, and .000 three later.
CLIMBS = {f"climb, then {low:g} below all": Collapse(5, low, 0.3, over=3, climb=0.7) for low in (0.17, 0.5)}


def collapsing(rng: np.random.Generator, name: str, runs: int, phi: float, sd: float, rounds: int = ROUNDS) -> Pair:
    heldout, in_loop = healthy(rng, "plateau", runs, phi, sd, rounds)
    collapse = {**COLLAPSES, **CLIMBS}[name]
    t = times(rounds)[0]
    part = np.clip((t - collapse.after) / collapse.over, 0, 1)[:, None]
    climbed = collapse.climb * np.clip((t - 1) / (collapse.after - 1), 0, 1)[:, None]
    heldout = heldout + climbed - (collapse.climb + collapse.fall) * part
    return heldout, in_loop + climbed + collapse.gain * part


def noise(rng: np.random.Generator, rounds: int, runs: int, phi: float, sd: float) -> Array:
    """AR(1) noise of marginal standard deviation `sd`; white for `phi` = 0."""
    found = sd * rng.standard_normal((rounds, runs))
    if phi:
        found[1:] *= np.sqrt(1 - phi * phi)
        for t in range(1, rounds):
            found[t] += phi * found[t - 1]
    return found


def times(rounds: int = ROUNDS) -> tuple[Array, Array]:
    """Rounds from 1, and the number of them since the change."""
    t = np.arange(1, rounds + 1, dtype=float)
    return t, np.maximum(t - CHANGE, 0)


def healthy(rng: np.random.Generator, family: str, runs: int, phi: float, sd: float, rounds: int = ROUNDS) -> Pair:
    heldout, in_loop = HEALTHY[family](times(rounds)[0])
    one, other = noise(rng, rounds, runs, phi, sd), noise(rng, rounds, runs, phi, sd)
    return heldout[:, None] + one, in_loop[:, None] + other


def faulty(
    rng: np.random.Generator,
    fault: str,
    runs: int,
    phi: float,
    sd: float,
    family: str = "plateau",
    rounds: int = ROUNDS,
) -> Pair:
    heldout, in_loop = healthy(rng, family, runs, phi, sd, rounds)
    u = times(rounds)[1]
    return heldout + FAULTS[fault].heldout(u)[:, None], in_loop + FAULTS[fault].in_loop(u)[:, None]


def gao(rng: np.random.Generator, runs: int, phi: float, sd: float, rounds: int = ROUNDS) -> tuple[Pair, Array]:
    """Over-optimisation of a reward model (arXiv 2210.10760): gold = d (a - b log d), d = sqrt(KL), KL linear in t.

    Returns the noisy pair and the gold score without noise; its peak is at round 150.
    """
    t = times(rounds)[0]
    d = np.sqrt(t / 10)
    b = 0.12
    a = b * (1 + np.log(np.sqrt(15.0)))
    gold, proxy = d * (a - b * np.log(d)), a * d
    one, other = noise(rng, rounds, runs, phi, sd), noise(rng, rounds, runs, phi, sd)
    return (gold[:, None] + one, proxy[:, None] + other), gold


# Gold scores by the formulas of Gao et al. (arXiv 2210.10760): d (a - b log d) for RL, d (a - b d) for the best of n.
# d is the root of the KL divergence from the first policy, x = d / d of the peak, and the peak is 1.
OVER_OPTIMISED: dict[str, Callable[[Array], Array]] = {
    "RL": lambda x: x * (1 - np.log(x)),
    "best of n": lambda x: x * (2 - x),
}


# -- shares ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """How the held-out score of a round comes from the shares of the replicas."""

    shares: int = 8
    stays: int = 1  # rounds for which a share that is missing stays missing
    dropout: float = 0.0  # chance that a share is missing in a round; at least half of them are there
    unequal: bool = False  # shares of different size and difficulty
    liars: int = 0  # replicas that report a score of their own making from round CHANGE on
    lie: str = ""  # of LIES
    at_first: float = 0.0  # that the liars add to their scores of the first 8 rounds
    repeated: int = 1  # rounds for which one measurement is given again (accumulation; evaluation every k-th round)


# A liar's share, from the mean and the standard deviation of the honest ones, and the rounds since it began to lie.
LIES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "down by 1 sd": lambda mean, sd, u: mean - sd,
    "down by 2 sd": lambda mean, sd, u: mean - 2 * sd,
    "down by 1000": lambda mean, sd, u: mean - 1000 + 0 * u,
    "down by .001 more each round": lambda mean, sd, u: mean - 0.001 * u,
    "down for 15 rounds of 30": lambda mean, sd, u: mean - np.where((u // 15) % 2, 1000.0, 0.0),
    "up and down by 1000": lambda mean, sd, u: mean + np.where(u % 2, 1000.0, -1000.0),
    "up by 1 sd": lambda mean, sd, u: mean + sd,
    "up by 1000": lambda mean, sd, u: mean + 1000 + 0 * u,
    "up by .003 more each round": lambda mean, sd, u: mean + 0.003 * u,
    "mirrored": lambda mean, sd, u: -mean,
}


def through_shares(
    rng: np.random.Generator, signal: Array, phi: float, sd: float, fleet: Fleet, runs: int
) -> tuple[Array, Array, Array]:
    """Held-out scores (rounds, runs) as the guard folds them, the share of the items in each, and what is left of each
    share's gain after clipping (rounds, shares, runs), NaN where the share is missing.

    `signal`: of the model, (rounds, 1). A share's gain is counted from its first score. All shares together have noise
    of `sd`.
    """
    rounds = len(signal)
    sizes = np.array([3.0 if fleet.unequal else 1.0] + [1.0] * (fleet.shares - 1))
    levels = rng.normal(0, 0.2, (fleet.shares, 1)) if fleet.unequal else np.zeros((fleet.shares, 1))
    scale = np.sqrt(sizes.sum() / sizes)[:, None]
    noises = np.stack([noise(rng, rounds, runs, phi, sd) for _ in range(fleet.shares)], axis=1) * scale
    scores = signal[:, None, :] + levels + noises  # (rounds, shares, runs)
    scores[:8, : fleet.liars] += fleet.at_first
    gains = scores - scores[0]
    if fleet.lie:
        honest, since = gains[:, fleet.liars :], np.arange(rounds, dtype=float)[:, None] - CHANGE
        lies = LIES[fleet.lie](honest.mean(axis=1), honest.std(axis=1), since)
        gains[:, : fleet.liars] = np.where((since >= 0)[:, None], lies[:, None], gains[:, : fleet.liars])
    there = repeat(rng.random((rounds, fleet.shares, runs)) >= fleet.dropout, fleet.stays)
    there[0] = True
    enough = (there * sizes[:, None]).sum(axis=1) >= sizes.sum() / 2
    there |= ~enough[:, None]
    weights = there * sizes[:, None]
    total = weights.sum(axis=1)
    kept = clipped(np.where(there, gains, np.nan))
    return np.nansum(kept * weights, axis=1) / total, total / sizes.sum(), kept


def clipped(gains: Array) -> Array:
    """Twin of `guard.robust.clipped_mean`, round after round: the gains that it averages."""
    kept, spread = np.empty_like(gains), np.zeros(gains.shape[2])
    median = np.nanmedian if np.isnan(gains).any() else np.median  # which is faster
    kept[0] = gains[0]
    for t in range(1, len(gains)):
        middle = median(gains[t], axis=0)
        deviation = median(np.abs(gains[t] - middle), axis=0)
        limit = robust._CLIP * np.maximum(deviation, spread)
        kept[t] = np.clip(gains[t], middle - limit, middle + limit)
        spread = deviation if t == 1 else robust._PAST * spread + (1 - robust._PAST) * deviation
    return kept


def repeat(values: NDArray[Any], times_each: int) -> NDArray[Any]:
    """Every `times_each`-th value, given again until the next one."""
    return values[(np.arange(len(values)) // times_each) * times_each]
