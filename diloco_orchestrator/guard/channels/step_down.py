"""`StepDown`: a held-out score that stepped down, while size and autocorrelation of its noise are not known yet.

`Falls` measures in sigmas, and sigma takes some 30 straight rounds to know: until then a fall that is small beside the
climb before it looks like noise. But the rounds around a step say more than sigma does. The likelihood of the last
rounds is compared under two accounts, each with the noise, AR(1) of any size, that suits it best:

- *no step*: a level, or a climb that stopped up to six rounds before;
- *a step down*: a level or a climb until then, and a lower level since.

Constants were chosen on simulated AR(1) noise (`benchmarks/guard.py`). Only `+ - * /`, comparisons, `math.sqrt`,
`math.fsum` and `math.frexp` are used, so that every machine gets the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import mul

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.early import ADVICE
from diloco_orchestrator.guard.channels.noise import KEPT
from diloco_orchestrator.guard.channels.remembered import Remembered, added

BEFORE = (6, 12)  # rounds before a step: at least, and at most; longer ones bend
SINCE = (5, 8, 12, 20)  # rounds since
STOPPED = 6  # rounds before the step in which a climb may have stopped
RHOS = (0.0, 0.35, 0.7)  # autocorrelations of the noise that are tried
LIMIT = 1.2  # log-likelihood ratio that halts, in nats, over the setting `threshold`
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
    """The step down of the held-out score that explains the last rounds best."""

    since: int  # rounds since it
    size: float  # by which the level is lower
    evidence: float  # log-likelihood ratio to no step, in nats


@dataclass
class StepDown(Remembered):
    """Guard statistic: likelihood of the last held-out scores with a step down and without. Stored state: 1 number."""

    seen: int = 0  # rounds since the start, or since an alarm was dismissed; 32 at most
    found: Found | None = field(default=None, init=False)  # in the last judged round

    def judge(
        self,
        model: int,
        scores: Sequence[float],
        coarse: float,
        lost: float,
        recovers: bool,
        threshold: float,
        origin: float,
    ) -> list[Alarm]:
        """A list of one alarm if the held-out score has stepped down by the base of round `model`, else empty.

        `scores`: held-out, of the last 32 bases or of all, this one included, oldest first, each minus the run's first
        score. `coarse`: smallest change between two rounds so far, or 0.0. `lost`: how much shares of the held-out set
        whose fall does not count lower the mean. `recovers`: whether the score is on its way back up, which halts
        nothing. `threshold`: the setting. `origin`: the run's first score, added again to scores in the alarm's text.
        """
        self.seen = min(self.seen + 1, KEPT)
        scores = _changed(scores[-self.seen :])
        self.found = None if recovers else _best(scores, coarse, lost)
        if self.found is None or self.found.evidence <= LIMIT * threshold:
            return []
        since, size = self.found.since, self.found.size
        mean = added(scores[-since:]) / since + origin
        what = (
            f"step down: the last {since} held-out scores that differ, {mean:.4g} in the mean, lie {size:.3g} below "
            f"where the scores before lead. A step explains them better than noise does, by a log-likelihood "
            f"ratio of {self.found.evidence:.4g} (halts above {LIMIT * threshold:.4g})"
        )
        return [Alarm(what, model, ADVICE, AlarmKind.FALL)]

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, value, threshold) of the log-likelihood ratio, as the guard's verdict lists it."""
        return [("step down", self.found.evidence if self.found else 0.0, LIMIT * threshold)]


def _changed(scores: Sequence[float]) -> list[float]:
    """`scores` without those that equal the one before, which say nothing of how scores vary."""
    return [*scores[:1], *(now for last, now in pairwise(scores) if now != last)]


def _best(scores: Sequence[float], coarse: float, lost: float) -> Found | None:
    """The step down of `scores` with the largest likelihood ratio; None if they are too few, or nothing steps down.

    `coarse`: smallest change between two rounds. `lost`: how much shares whose fall does not count lower the mean.
    """
    best: Found | None = None
    for since in SINCE:
        before = min(BEFORE[1], len(scores) - since)
        if before < BEFORE[0]:
            break
        values = [*scores[-before - since : -since], *(score + lost for score in scores[-since:])]
        found = _compared(values, before, coarse)
        if found is not None and found.evidence > (best.evidence if best else 0.0):
            best = found
    return best


def _compared(values: Sequence[float], before: int, coarse: float) -> Found | None:
    """The likelihood of a step after the first `before` of `values`; None if the best fit does not go down."""
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
    return Found(count - before, size * scale, (level - step) / 2) if size > 0 else None


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
