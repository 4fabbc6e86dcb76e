"""`StepDown`: a held-out score that stepped down, while size and autocorrelation of its noise are not known yet.

`Falls` measures in sigmas, and sigma takes some 30 straight rounds to know: until then a fall that is small beside the
climb before it looks like noise. But the rounds around a step say more than sigma does. The likelihood of the last
rounds is compared under two accounts, each with the noise, AR(1) of any size, that suits it best:

- *no step*: a level, or a climb that stopped up to six rounds before;
- *a step down*: a level or a climb until then, and a lower level since.

The longer a step has lasted, the better the noise is known from the rounds since, and the less evidence halts. After
`EARLY` rounds steps of more than 20 rounds are left to `Falls`, which knows the noise by then.

Constants were chosen on simulated AR(1) noise (`benchmarks/guard.py`). Only `+ - * /`, comparisons, `math.sqrt`,
`math.fsum` and `math.frexp` are used, so that every machine gets the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import mul

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind, Shown
from diloco_orchestrator.guard.channels.early import ADVICE
from diloco_orchestrator.guard.channels.remembered import Remembered, added

BEFORE = (6, 12)  # rounds before a step that are compared: more bend, fewer say little of where they lead
# Rounds since a step, and the log-likelihood ratio that then halts, in nats, at the default threshold. Found by
# simulation: each of them halts about as many plateaus of AR(1) .5 and .7 noise.
LIMITS = {5: 14.5, 8: 14.0, 12: 12.5, 20: 11.5, 32: 9.5, 48: 9.5}
EARLY, LATER = 96, 20  # rounds after which only steps of up to so many rounds are compared
# Second differences before the step, over those of so many rounds since or more: noise that was larger then, or an
# outlier, looks like a level that was higher.
NOISIER, FROM = 2.0, 12
# A bump that healed: the mean of so many last scores has made up for this share of the way from the lowest mean of so
# many since to the highest score before.
HEALED = (8, 4, 0.5)
STOPPED = 6  # rounds before the step in which a climb may have stopped
RHOS = (0.0, 0.35, 0.7)  # autocorrelations of the noise that are tried
_DEFAULT = 10.0
# Added to the variance of each value: this share of the squared smallest change between two rounds.
COARSE = 0.5
_EXACT = 1e-12  # of the sum of squares, that is added to what is left: rounding
_TERMS = 20  # of the series of a logarithm

_Row = tuple[float, ...]


@dataclass(frozen=True)
class Basis:
    """Orthonormal regressors of held-out scores over some rounds, for a step down after some of them.

    They are whitened for AR(1) noise with autocorrelation `rho`. All are orthogonal to the level (a constant); `climb`
    (a line up to the step) is orthogonal to the step too.
    """

    level: _Row
    stopped: tuple[_Row, ...]  # climbs that stop before the step, by the round in which they do
    step: _Row
    climb: _Row  # to the step
    step_of_climb: float  # the step's part in a climb that adds 1 to the coefficient of `climb`
    length: float  # the step's coefficient for a step of 1


@dataclass(frozen=True)
class Found:
    """The step down of the held-out score that is nearest to a halt, or beyond it."""

    since: int  # rounds since it
    size: float  # by which the level is lower
    evidence: float  # log-likelihood ratio to no step, in nats

    def share(self, threshold: float) -> float:
        """The evidence divided by that at which the run halts: from 1 on it halts. `threshold`: the guard's setting."""
        return self.evidence / (threshold / _DEFAULT * LIMITS[self.since])


@dataclass
class StepDown(Remembered):
    """Guard statistic: likelihood of the last held-out scores with a step down and without.

    Stored state: up to 60 scores in the first 96 rounds, then 32.
    """

    rounds: int = 0  # since the start, or since an alarm was dismissed
    last: list[float] = field(default_factory=list)  # scores, oldest first
    found: Found | None = field(default=None, init=False)  # in the last judged round

    def judge(
        self,
        model: int,
        scores: Sequence[float],
        coarse: float,
        lost: float,
        recovers: bool,
        threshold: float,
        shown: Shown,
    ) -> list[Alarm]:
        """A list of one alarm if the held-out score has stepped down by the base of round `model`, else empty.

        `scores`: held-out, of the last bases, that one the last, each minus the run's first score. `coarse`: smallest
        change between two rounds so far, or 0.0. `lost`: how much shares of the held-out set whose fall does
        not count lower the mean. `recovers`: whether the score is on its way back up, which halts nothing. `threshold`:
        the setting. `shown`: how the alarm's text shows scores.
        """
        self.rounds += 1
        longest = LATER if self.rounds > EARLY else max(LIMITS)
        self.last = [*self.last, scores[-1]][-BEFORE[1] - longest :]
        scores = changed(self.last)
        self.found = None if recovers else _nearest(scores, coarse, lost, longest)
        if self.found is None or self.found.share(threshold) <= 1.0:
            return []
        return [step_alarm(model, self.found, scores, threshold / _DEFAULT * LIMITS[self.found.since], shown)]

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, share of the evidence that halts, 1), as the guard's verdict lists it.

        `threshold`: the guard's setting.
        """
        return [("step down", self.found.share(threshold) if self.found else 0.0, 1.0)]


def step_alarm(model: int, found: Found, scores: Sequence[float], limit: float, shown: Shown) -> Alarm:
    """The alarm that the last of `scores` stepped down, by more evidence than `limit` nats.

    `model`: round of the newest base. `shown`: how the text shows scores.
    """
    mean = shown.of(added(scores[-found.since :]) / found.since)
    what = (
        f"step down: the last {found.since} held-out scores that differ, {mean:.4g} in the mean, lie {found.size:.3g} "
        f"{shown.worse} where the scores before lead. A step explains them better than noise does, by a log-likelihood "
        f"ratio of {found.evidence:.4g} (halts above {limit:.4g})"
    )
    return Alarm(what, model, ADVICE, AlarmKind.FALL)


def changed(scores: Sequence[float]) -> list[float]:
    """`scores` without those that equal the one before, which say nothing of how scores vary."""
    return [*scores[:1], *(now for last, now in pairwise(scores) if now != last)]


def _nearest(scores: Sequence[float], coarse: float, lost: float, longest: int) -> Found | None:
    """The step down of `scores` that is nearest to a halt; None if they are too few, or nothing steps down.

    `coarse`: smallest change between two rounds. `lost`: how much shares whose fall does not count lower the mean.
    `longest`: rounds since a step that are compared at most.
    """
    nearest: Found | None = None
    for since in LIMITS:
        for before in BEFORE:
            if since > longest or before + since > len(scores):
                continue
            values = [*scores[-before - since : -since], *(score + lost for score in scores[-since:])]
            if since >= FROM and _bend(values[:before]) > NOISIER * _bend(values[before:]):
                continue
            found = compared(values, before, coarse)
            if found is not None and _healed(values[:before], values[before:]):
                continue
            if found is not None and (nearest is None or found.share(_DEFAULT) > nearest.share(_DEFAULT)):
                nearest = found
    return nearest


def compared(values: Sequence[float], before: int, coarse: float) -> Found | None:
    """The likelihood of a step after the first `before` of `values`; None if the best fit does not go down.

    `coarse`: the smallest change of the score between two rounds, which noise cannot be below; 0.0: unknown.
    """
    count, scale = len(values), max(abs(value) for value in values)
    if not 0 < scale < math.inf:
        return None
    values, coarse = [value / scale for value in values], coarse / scale
    middle = added(values) / count
    level, step, size = math.inf, math.inf, 0.0  # deviance of each account with the noise that suits it best
    for rho, constant in _noises():
        basis = _basis(before, count - before, rho)
        left = _whitened([value - middle for value in values], rho)
        total = _dot(left, left)
        if not total > 0:
            return None
        least = _EXACT * total + count * COARSE * coarse * coarse * (1 - rho) * (1 - rho)
        of_level, down = _dot(basis.level, left), _dot(basis.step, left)
        stopped = max(0.0, *(_dot(column, left) for column in basis.stopped))
        climb = max(0.0, _dot(basis.climb, left))
        rest = total - of_level * of_level
        level = min(level, count * _log(max(rest - stopped * stopped, 0.0) + least) + constant)
        with_step = count * _log(max(rest - down * down - climb * climb, 0.0) + least) + constant
        if with_step < step:
            step, size = with_step, (basis.step_of_climb * climb - down) / basis.length
    return Found(count - before, size * scale, max(level - step, 0.0) / 2) if size > 0 else None


def _healed(before: Sequence[float], since: Sequence[float]) -> bool:
    rounds, few, share = HEALED
    last = since[-rounds:]
    lowest = min(added(since[end - few : end]) for end in range(few, len(since) + 1)) / few
    return added(last) / len(last) - lowest > share * (max(before) - lowest)


def _bend(values: Sequence[float]) -> float:
    """The mean size of second differences."""
    changes = [now - last for last, now in pairwise(values)]
    return added([abs(now - last) for last, now in pairwise(changes)]) / len(changes[1:])


@cache
def _noises() -> tuple[tuple[float, float], ...]:
    """Autocorrelations of the noise that are tried, each with what it adds to the deviance."""
    return tuple((rho, -_log(1 - rho * rho)) for rho in RHOS)


@cache
def _basis(before: int, since: int, rho: float) -> Basis:
    rounds = range(before + since)
    level, step = [1.0 for _ in rounds], [float(each >= before) for each in rounds]
    stops = [[float(min(each, last) - last) for each in rounds] for last in range(max(2, before - STOPPED), before)]
    one, down, climb = _orthonormal([level, step, stops[-1]], rho)
    stopped = tuple(_orthonormal([level, stop], rho)[1] for stop in stops)
    whole = _whitened(stops[-1], rho)
    part = _dot(down, whole) / _dot(climb, whole)
    return Basis(one, stopped, down, climb, part, _dot(down, _whitened(step, rho)))


def _whitened(column: Sequence[float], rho: float) -> list[float]:
    first = math.sqrt(1 - rho * rho) * column[0]
    return [first, *(now - rho * last for last, now in pairwise(column))]


def _orthonormal(columns: Sequence[Sequence[float]], rho: float) -> tuple[_Row, ...]:
    """Regressors whitened for AR(1) noise of autocorrelation `rho`, orthonormalised in order (Gram and Schmidt)."""
    found: list[_Row] = []
    for column in columns:
        left = _whitened(column, rho)
        for other in found:
            part = _dot(left, other)
            left = [one - part * two for one, two in zip(left, other, strict=True)]
        length = math.sqrt(_dot(left, left))
        found.append(tuple(each / length for each in left))
    return tuple(found)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(mul, one, other))  # rounded once, on every machine; of numbers that are far from overflow


def _log(value: float) -> float:
    """The natural logarithm of a positive number, the same bits on every machine, unlike `math.log`."""
    mantissa, exponent = math.frexp(value)
    part = (mantissa - 1) / (mantissa + 1)
    total, power = 0.0, part
    for term in range(_TERMS):
        total += power / (2 * term + 1)
        power *= part * part
    return exponent * 0.6931471805599453 + 2 * total
