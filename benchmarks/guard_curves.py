"""Simulated runs on curves that people have: climbs, bumps that heal, sparse scores, other noise, lasting falls.

Each function makes many runs at once, arrays (rounds, runs), higher is better. `HELD_BACK` holds families that no
constant of the rule was chosen on. Which rule stops where is left to `guard_rules`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from guard_trajectories import Array, noise

Rng = np.random.Generator
Curve = Callable[[Array], Array]


@dataclass(frozen=True)
class Runs:
    """Runs of one kind. `clean`: held-out scores without noise. `begins`: the round from which a delay counts."""

    heldout: Array
    in_loop: Array | None = None
    clean: Array | None = None
    begins: int = 0
    weight: Array | None = None  # share of the items in each score
    gains: Array | None = None  # of each share
    metric: str = "loss"


def t_of(rounds: int) -> Array:
    return np.arange(1, rounds + 1, dtype=float)[:, None]


# -- lasting falls -----------------------------------------------------------------------------------------------------

# Curves from 0 towards 1, and their height in standard deviations of the noise.
CURVES: dict[str, tuple[Curve, float]] = {
    "plateau": (lambda t: 0 * t, 0),
    "RL climb, tau 12": (lambda t: 1 - np.exp(-t / 12), 30),
    "RL climb, tau 8": (lambda t: 1 - np.exp(-t / 8), 50),
    "sigmoid": (lambda t: 1 / (1 + np.exp(-(t - 15) / 3)), 30),
    "step": (lambda t: 1.0 * (t > 10), 20),
    "straight climb": (lambda t: t / 100, 30),
    "loss slope, tau 40": (lambda t: 1 - np.exp(-t / 40), 60),
    "loss slope, steep": (lambda t: 1 - np.exp(-t / 40), 300),
    "power law, steep": (lambda t: 1 - 1 / np.sqrt(t), 100),
}
OF_LOSSES = ("plateau", "loss slope, tau 40", "loss slope, steep", "power law, steep")
ONSETS = (8, 12, 20, 40, 80)
FALLS = ((5, 1), (5, 8), (15, 10), (40, 4))  # standard deviations, rounds that the fall takes
AFTER = 220  # rounds


def falling(
    rng: Rng, curve: tuple[Curve, float], onset: int, fall: tuple[int, int], phi: float, runs: int, reward: bool = False
) -> Runs:
    """A climb that stops at `onset` and falls for good, while training goes on to climb. Noise has sd 1."""
    (shape, height), (size, over), t = curve, fall, t_of(onset + AFTER)
    clean = height * shape(np.minimum(t, onset)) - size * np.clip((t - onset) / over, 0, 1)
    begins = int(np.argmax((clean[:, 0] < clean.max() - 3) & (t[:, 0] > onset)))
    heldout = clean + noise(rng, len(t), runs, phi, 1.0)
    in_loop = height * shape(t) + noise(rng, len(t), runs, phi, 0.5)
    return Runs(heldout, in_loop, clean, begins, metric="reward" if reward else "loss")


# -- bumps that heal ---------------------------------------------------------------------------------------------------

BASES: dict[str, Curve] = {"on a plateau": lambda t: 0 * t, "on a falling loss": lambda t: -0.6 * np.exp(-t / 40)}


def bump(rng: Rng, base: str, height: float, tau: float, rise: int, runs: int, sd: float = 0.005) -> Runs:
    """Round 60: a loss that rises by `height` nats within `rise` rounds and heals with time constant `tau`."""
    t = t_of(160)
    u = t - 60
    part = np.where(u >= rise, np.exp(-np.maximum(u - rise, 0) / tau), np.clip(u / max(rise, 1), 0, 1)) * (u >= 0)
    clean = BASES[base](t) - height * part
    return Runs(clean + noise(rng, 160, runs, 0.0, sd), clean + noise(rng, 160, runs, 0.0, 4 * sd), clean)


def restarts(rng: Rng, height: float, tau: float, every: int, runs: int, sd: float = 0.005) -> Runs:
    """A learning rate that restarts again and again: each time the loss rises by `height` and heals."""
    t = t_of(160)
    clean = -0.3 * np.exp(-t / 80) - height * np.exp(-(t % every) / tau) * (t >= every)
    return Runs(clean + noise(rng, 160, runs, 0.0, sd), clean + noise(rng, 160, runs, 0.0, 4 * sd), clean)


# -- noise that is not AR(1) -------------------------------------------------------------------------------------------


def student(rng: Rng, rounds: int, runs: int, phi: float, freedom: float) -> Array:
    found = rng.standard_t(freedom, (rounds, runs)) / np.sqrt(freedom / (freedom - 2))
    if phi:
        found[1:] *= np.sqrt(1 - phi * phi)
        for t in range(1, rounds):
            found[t] += phi * found[t - 1]
    return found


def bursts(rng: Rng, rounds: int, runs: int, phi: float, times: float, lasts: int) -> Array:
    """`lasts` of 100 rounds have noise of `times` the size."""
    begins = rng.integers(10, 100 - lasts, runs)
    inside = ((t_of(rounds) - begins) % 100 < lasts) & (t_of(rounds) >= begins)
    return noise(rng, rounds, runs, phi, 1.0) * np.where(inside, times, 1.0)


def _ar2(rng: Rng, rounds: int, runs: int) -> Array:
    found = rng.standard_normal((rounds + 50, runs))
    for t in range(2, rounds + 50):
        found[t] += 0.5 * found[t - 1] + 0.2 * found[t - 2]
    return found[50:]


_Odd = Callable[[Rng, int, float], Array]
ODD: dict[str, _Odd] = {
    "Student t(3)": lambda rng, runs, phi: student(rng, 600, runs, phi, 3),
    "grows x 10 over the run": lambda rng, runs, phi: noise(rng, 600, runs, phi, 1.0) * 10 ** (t_of(600) / 600),
    "x 4 from half on": lambda rng, runs, phi: noise(rng, 600, runs, phi, 1.0) * np.where(t_of(600) > 300, 4, 1),
    "a quarter from half on": lambda rng, runs, phi: (
        noise(rng, 600, runs, phi, 1.0) * np.where(t_of(600) > 300, 0.25, 1)
    ),
    "one outlier up in 100": lambda rng, runs, phi: (
        noise(rng, 600, runs, phi, 1.0) + 10 * (rng.random((600, runs)) < 0.01)
    ),
    "one outlier down in 100": lambda rng, runs, phi: (
        noise(rng, 600, runs, phi, 1.0) - 10 * (rng.random((600, runs)) < 0.01)
    ),
    "bursts x 5, 20 of 100": lambda rng, runs, phi: bursts(rng, 300, runs, phi, 5, 20),
    "lucky for 8 rounds of 100, 3 sd": lambda rng, runs, phi: (
        noise(rng, 600, runs, phi, 1.0) + 3 * ((t_of(600) % 100 > 40) & (t_of(600) % 100 <= 48))
    ),
    "AR(2) .5 .2": lambda rng, runs, phi: _ar2(rng, 300, runs),
    "sum of AR .8 and white": lambda rng, runs, phi: noise(rng, 300, runs, 0.8, 0.7) + noise(rng, 300, runs, 0.0, 0.7),
    "season of 25 rounds": lambda rng, runs, phi: (
        noise(rng, 600, runs, phi, 1.0) + np.sqrt(2) * np.sin(2 * np.pi * (t_of(600) / 25 + rng.random(runs)))
    ),
    "season of 50 rounds": lambda rng, runs, phi: (
        noise(rng, 600, runs, phi, 1.0) + np.sqrt(2) * np.sin(2 * np.pi * (t_of(600) / 50 + rng.random(runs)))
    ),
}
UNPROMISED = (
    "AR(2) .5 .2",
    "sum of AR .8 and white",
    "a quarter from half on",
    "lucky for 8 rounds of 100, 3 sd",
    "season of 25 rounds",
    "season of 50 rounds",
)


# -- scores of few items -----------------------------------------------------------------------------------------------


def sampled(rng: Rng, chance: Array | float, items: int, runs: int) -> Array:
    """Shares of right answers among sampled ones. `chance`: of each round."""
    return rng.binomial(items, np.broadcast_to(chance, (300, runs))) / items


def greedy(rng: Rng, items: int, runs: int, level: float = 0.3, phi: float = 0.8) -> Array:
    """Shares of right answers to fixed items, whose answers persist."""
    return np.mean([noise(rng, 300, runs, phi, 1.0) > level for _ in range(items)], axis=0)


SCORES: dict[str, Callable[[Rng, int], Array]] = {
    **{
        f"success {chance:g}, {items} items": lambda rng, runs, c=chance, n=items: sampled(rng, c, n, runs)
        for chance in (0.003, 0.01, 0.05, 0.3, 0.95, 0.99)
        for items in (8, 32, 256)
    },
    **{
        f"rises from .003, {items} items": lambda rng, runs, n=items: sampled(
            rng, 0.003 + 0.6 / (1 + np.exp(-(t_of(300) - 100) / 15)), n, runs
        )
        for items in (8, 32)
    },
    **{f"greedy, {items} items": lambda rng, runs, n=items: greedy(rng, n, runs) for items in (8, 32, 128)},
}


# -- training that leaves held-out behind ------------------------------------------------------------------------------


def _climb(t: Array, size: float, tau: float) -> Array:
    return size * (1 - np.exp(-t / tau))


# Held-out score, training metric, and which metric it is. The held-out score of none of them falls.
GAPS: dict[str, tuple[Curve, Curve, str]] = {
    "several epochs": (lambda t: _climb(t, 1.0, 80), lambda t: _climb(t, 1, 80) + 0.15 * (t // 60), "loss"),
    "easier data": (lambda t: 0.002 * t, lambda t: 0.002 * t + 0.5 * (t > 60), "loss"),
    "training races, loss": (lambda t: 0.0005 * t, lambda t: 0.01 * t, "loss"),
    "training races, reward": (lambda t: 0.3 + 0.0005 * t, lambda t: 0.3 + 0.0015 * t, "reward"),
    "saturation": (lambda t: _climb(t, 1.0, 40), lambda t: _climb(t, 1, 40) + 0.004 * t, "loss"),
    "benign gap of a reward": (lambda t: 0.5 + 0 * t, lambda t: 0.5 + _climb(t, 0.07, 60), "reward"),
}  # fmt: skip


def gap(rng: Rng, case: str, sd: float, runs: int) -> Runs:
    held, trained, metric = GAPS[case]
    t = t_of(400)
    return Runs(
        held(t) + noise(rng, 400, runs, 0.3, sd), trained(t) + noise(rng, 400, runs, 0.3, sd), held(t), metric=metric
    )


# -- held back ---------------------------------------------------------------------------------------------------------

HELD_BACK: dict[str, Callable[[Rng, int], Runs]] = {
    "plateau, Laplace noise": lambda rng, runs: Runs(rng.laplace(0, 1, (300, runs))),
    "plateau, t(4), AR .6": lambda rng, runs: Runs(student(rng, 300, runs, 0.6, 4)),
    "plateau, mean of 5 white rounds": lambda rng, runs: Runs(_filtered(rng, 300, runs, np.ones(5))),
    "plateau, ARMA .6 .4": lambda rng, runs: Runs(_filtered(rng, 300, runs, np.r_[1, 0.6 ** np.arange(40)])),
    "plateau, fractional noise .25": lambda rng, runs: Runs(_filtered(rng, 300, runs, _fractional(0.25, 300))),
    "plateau, clusters of noise": lambda rng, runs: Runs(_clusters(rng, 300, runs)),
    "plateau, noise that falls further than it rises": lambda rng, runs: Runs(
        (2 - rng.gamma(2.0, 1.0, (300, runs))) / np.sqrt(2)
    ),
    "plateau, noise x 3 for some 10 rounds of 50": lambda rng, runs: Runs(
        noise(rng, 300, runs, 0.3, 1.0) * np.where(_switched(rng, 300, runs, 0.025, 0.1), 3.0, 1.0)
    ),
    "steps up every 40 rounds": lambda rng, runs: Runs(4.0 * (t_of(300) // 40) + noise(rng, 300, runs, 0.4, 1.0)),
    "noise doubles every 100 rounds": lambda rng, runs: Runs(noise(rng, 300, runs, 0.4, 1.0) * 2 ** (t_of(300) / 100)),
    "logistic, tau 10, slow tail": lambda rng, runs: Runs(
        40 / (1 + np.exp(-(t_of(300) - 50) / 10)) + _climb(t_of(300), 5, 200) + noise(rng, 300, runs, 0.4, 1.0)
    ),
    "noise of a cosine schedule": lambda rng, runs: Runs(
        _climb(t_of(300), 60, 50) + noise(rng, 300, runs, 0.4, 1.0) * (0.1 + np.cos(np.pi * t_of(300) / 620) ** 2)
    ),
    "stable, then decay": lambda rng, runs: Runs(
        10 * np.log(t_of(300)) + 1.5 * np.maximum(t_of(300) - 240, 0) + noise(rng, 300, runs, 0.4, 1.0)
    ),
    "climbs between random knots": lambda rng, runs: Runs(
        _knots(rng, 300, runs, 8, 15.0) + noise(rng, 300, runs, 0.3, 1.0)
    ),
    "two climbs with a stall": lambda rng, runs: Runs(_two_climbs(rng, 300, runs) + noise(rng, 300, runs, 0.3, 1.0)),
    "four dips of 3 rounds by 3 sd": lambda rng, runs: Runs(
        2.0 * (t_of(300) // 60) - 3.0 * (t_of(300) % 60 < 3) * (t_of(300) >= 60) + noise(rng, 300, runs, 0.3, 1.0)
    ),
    "bump .15, tau 3, on a slow slope": lambda rng, runs: _other_bump(rng, 0.15, 3.0, runs),
    "bump .08, tau 6, on a slow slope": lambda rng, runs: _other_bump(rng, 0.08, 6.0, runs),
    "64 sampled items of unequal difficulty, rising": lambda rng, runs: Runs(_unequal_items(rng, 300, runs, 64)),
    **{
        f"plateau after {words}, AR {phi:g}": lambda rng, runs, c=curve, p=phi: Runs(
            c(t_of(300)) + noise(rng, 300, runs, p, 1.0)
        )
        for words, curve in (
            ("a climb of 20 sd, tau 3", lambda t: _climb(t, 20, 3)),
            ("a climb of 30 sd, tau 8", lambda t: _climb(t, 30, 8)),
            ("one step of 10 sd", lambda t: 10.0 * (t > 12)),
            ("a sigmoid of 12 sd around round 60", lambda t: 12 / (1 + np.exp(-(t - 60) / 6))),
        )
        for phi in (0.0, 0.5, 0.7)
    },
    "dip of 20 sd, half a cosine of 16 rounds": lambda rng, runs: _dip(rng, runs, 20, 0, 16),
    "dip of 20 sd that stays 4 rounds, then 8 to heal": lambda rng, runs: _dip(rng, runs, 20, 4, 8),
    "restarts every 60 rounds, dips of 10 sd, 16 to heal": lambda rng, runs: _dip(rng, runs, 10, 0, 16, every=60),
    "bursts x 20, 20 of 100": lambda rng, runs: Runs(bursts(rng, 300, runs, 0.3, 20, 20)),
    "64 fixed items that keep their answer 5 rounds": lambda rng, runs: Runs(
        np.mean([_switched(rng, 300, runs, 0.1, 0.2) for _ in range(64)], axis=0)
    ),
}
HELD_BACK_FALLS: dict[str, Callable[[Rng, int], Runs]] = {
    **{
        f"climb of {height} sd, tau {tau}, falls {size} sd after round {onset}, AR {phi:g}": (
            lambda rng, runs, t=tau, h=height, o=onset, f=(size, over), p=phi: falling(
                rng, (lambda u: 1 - np.exp(-u / t), h), o, f, p, runs
            )
        )
        for tau, height in ((5, 20), (20, 25), (100, 40))
        for onset, size, over, phi in ((15, 7, 3, 0.3), (30, 10, 5, 0.0), (60, 6, 12, 0.3))
    },
    **{
        f"{name}, falls {size} sd in {over} after round {onset}, AR {phi:g}": (
            lambda rng, runs, c=(curve, height), o=onset, f=(size, over), p=phi: falling(rng, c, o, f, p, runs)
        )
        for name, curve, height in (
            ("Gompertz", lambda t: np.exp(-4 * np.exp(-t / 9)), 35),
            ("logarithm", lambda t: np.log(t) / 4, 25),
            ("half cosine", lambda t: (1 - np.cos(np.pi * np.minimum(t, 60) / 60)) / 2, 45),
            ("straight, steep", lambda t: t / 100, 400),
        )
        for onset, size, over, phi in ((10, 6, 2, 0.4), (25, 5, 4, 0.0), (70, 8, 6, 0.4))
    },
    "plateau, noise of 5 white rounds, falls 6 sd": lambda rng, runs: _fallen(
        rng, runs, 25, lambda u: 6.0 * (u > 0), _filtered(rng, 245, runs, np.ones(5))
    ),
    "plateau, t(5), falls 6 sd": lambda rng, runs: _fallen(
        rng, runs, 25, lambda u: 6.0 * (u > 0), student(rng, 245, runs, 0.0, 5)
    ),
    "plateau, falls 8 sd and makes up for a third": lambda rng, runs: _fallen(
        rng, runs, 25, lambda u: 8 * (u > 0) - 8 / 3 * np.clip((u - 1) / 10, 0, 1), noise(rng, 245, runs, 0.3, 1.0)
    ),
    "plateau, falls by .3 sd a round for 40 rounds": lambda rng, runs: _fallen(
        rng, runs, 25, lambda u: 0.3 * np.clip(u, 0, 40), noise(rng, 245, runs, 0.3, 1.0)
    ),
}


def _filtered(rng: Rng, rounds: int, runs: int, weights: Array) -> Array:
    """Noise of sd 1: a moving sum of white noise."""
    white = rng.standard_normal((rounds + len(weights) - 1, runs))
    found: Array = sum(w * white[len(weights) - 1 - k : rounds + len(weights) - 1 - k] for k, w in enumerate(weights))
    return found / np.sqrt((weights**2).sum())


def _fractional(d: float, lags: int) -> Array:
    """Weights of fractionally integrated white noise (Hosking)."""
    return np.cumprod(np.r_[1.0, (np.arange(1, lags) - 1 + d) / np.arange(1, lags)])


def _clusters(rng: Rng, rounds: int, runs: int) -> Array:
    """GARCH(1,1) noise of sd 1: large changes follow large ones."""
    found, variance = rng.standard_normal((rounds, runs)), np.ones(runs)
    for t in range(rounds):
        found[t] *= np.sqrt(variance)
        variance = 0.05 + 0.15 * found[t] ** 2 + 0.8 * variance
    return found


def _switched(rng: Rng, rounds: int, runs: int, on: float, off: float) -> Array:
    """A state, 0 or 1, that changes with the given chances in each round."""
    drawn, state = rng.random((rounds, runs)), rng.random(runs) < on / (on + off)
    found = np.empty((rounds, runs))
    for t in range(rounds):
        state = np.where(state, drawn[t] >= off, drawn[t] < on)
        found[t] = state
    return found


def _knots(rng: Rng, rounds: int, runs: int, knots: int, height: float) -> Array:
    """Straight climbs between random rounds, each by a random part of `height`; a third of them are level."""
    places = np.sort(rng.integers(1, rounds, (knots, runs)), axis=0)
    rises = height * rng.random((knots + 1, runs)) * (rng.random((knots + 1, runs)) > 1 / 3)
    found = np.empty((rounds, runs))
    for run in range(runs):
        at = np.r_[0, places[:, run], rounds]
        found[:, run] = np.interp(np.arange(rounds), at, np.r_[0, np.cumsum(rises[:, run])])
    return found


def _two_climbs(rng: Rng, rounds: int, runs: int) -> Array:
    t, found = t_of(rounds), np.zeros((rounds, runs))
    for earliest, latest in ((10, 60), (120, 220)):
        middle, tau = rng.uniform(earliest, latest, runs), rng.uniform(1, 12, runs)
        found += rng.uniform(10, 100, runs) / (1 + np.exp(-(t - middle) / tau))
    return found


def _unequal_items(rng: Rng, rounds: int, runs: int, items: int) -> Array:
    level = rng.normal(0, 2, (items, 1, runs)) + 2 * (1 - np.exp(-t_of(rounds) / 60)) - 1
    found: Array = (rng.random((items, rounds, runs)) < 1 / (1 + np.exp(-level))).mean(axis=0)
    return found


def _fallen(rng: Rng, runs: int, onset: int, lost: Curve, around: Array) -> Runs:
    """A plateau that loses `lost` of the rounds since `onset`, while training does not change."""
    clean = -lost(t_of(len(around)) - onset) * np.ones((1, 1))
    begins = int(np.argmax(clean[:, 0] < -3))
    return Runs(clean + around, noise(rng, len(around), runs, 0.0, 0.5), clean, begins)


def _dip(rng: Rng, runs: int, height: float, stays: int, heals: int, every: int = 1000) -> Runs:
    """A plateau that falls by `height` at once, stays there, and heals along half a cosine; again after `every`."""
    since = (t_of(160) - 60) % every - stays
    lost = height * (1 + np.cos(np.pi * np.clip(since / heals, 0, 1))) / 2 * (t_of(160) >= 60)
    return Runs(noise(rng, 160, runs, 0.3, 1.0) - lost)


def _other_bump(rng: Rng, height: float, tau: float, runs: int) -> Runs:
    t = t_of(160)
    clean = -0.2 * np.exp(-t / 100) - height * np.exp(-np.maximum(t - 75, 0) / tau) * (t >= 75)
    return Runs(clean + noise(rng, 160, runs, 0.2, 0.005), None, clean)


def falls() -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Curve, onset and fall of every lasting fall."""
    for curve in CURVES:
        for onset in ONSETS:
            for fall in FALLS:
                yield curve, onset, fall
