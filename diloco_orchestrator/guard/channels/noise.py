"""`Noise`: how far a series lies from its level by chance, measured while the series climbs, bends, repeats or falls.

Two measures, because a curve spoils each of them differently:

- *Size*, from second differences of neighbouring values. They cancel level and slope, a bend adds little to them, and a
  step or a kink adds two large ones, which are clipped, and left out of the first 32.
  Where the last rounds bend far more than that, as in a burst of noise, they count.
- *Autocorrelation*, from what is left of the last 24 values without their straight line, or without their cubic where
  they climb and a cubic explains far more than noise would: the bend of a climb looks like a strong autocorrelation.
  Values that lie far further from it than their second differences explain are left out: they say nothing of noise.

Means over many rounds of AR(1) noise vary as if one round had sd * sqrt((1 + rho) / (1 - rho)): the long-run standard
deviation, `sigma`. Constants were chosen on simulated AR(1) noise (`benchmarks/guard.py`): sigma is within 25 % of the
true one after 100 rounds for rho from 0 to .7. Only `+ - * /`, comparisons and `math.sqrt` are used, which IEEE 754
rounds correctly, so that every machine gets the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from statistics import median
from typing import ClassVar

from diloco_orchestrator.guard.channels.remembered import Remembered, added

KEPT = 32  # values; early collapse and best level read them too
LINE = 24  # values of a line: a climb of 12 rounds still looks straight, and noise of AR(1) .7 still looks like noise
FIRST_LINE = 8
_MEMORY = 32  # rounds that the size remembers: noise that grows tenfold over a run is followed
_CLIP = 5.0  # times the size, of one second difference: outliers count little, and bursts are still followed
_SETTLED = 4  # second differences before they are clipped
# The largest tenth of the first 32 second differences is left out (one at least, from six on): a curve bends most in
# its first rounds, and a fall there would count as noise. `_TRIM` makes up for it, as a factor, for normal noise.
_TRIMMED, _TRIM = 6, 2.15
_MEAN_ABS = 0.79788  # of a standard normal number
_MEDIAN = 0.845  # of the absolute value of a normal number, as a share of its mean
_OUTLIER = 3 * 1.4826  # times the median size, of what is left of one value without its line
_PAST = 0.99  # weight of the past in the autocorrelation: it is learnt from some 100 rounds
_PRIOR = (12.0, 0.6)  # windows that the first guess of it counts as: unknown noise is taken for correlated noise
_LOST = 4.8  # times 1 / values: what a line takes from the correlation of what is left
# A climb that bends: by how much each of a cubic's two further terms lowers the sum of squares, in variances of what is
# left by it, and the rise along the line, in standard deviations of that. A plateau of AR(1) .7 noise goes so far now
# and then, and hardly while it falls. `_OF_CUBIC`: factor and shift that make the correlation of what a cubic leaves of
# noise, plus `_LOST_CUBIC` / values, that of what a line leaves.
_CUBIC_FROM, _CURVED, _CLIMBS = 12, 4.0, 6.0
_LOST_CUBIC, _OF_CUBIC = 4.0, (1.25, 0.12)
_STRETCH = (1.35, -0.16)  # the same, found by simulation: .13 / .35 / .5 / .64 for AR(1) 0 / .3 / .5 / .7
_RHO_MAX = 0.8
_BENT = (
    1.0  # times the size of second differences: a window that is further from its line than this is bent; .7 is AR .7
)
_YOUNG = 4.0  # sigma is larger by this over the number of values: few values claim no precision


@dataclass
class Noise(Remembered):
    """Size and autocorrelation of the noise of one series, measured value by value. Stored state: 45 numbers."""

    # Second differences of the last values, and how many times larger than usual their median must be to count.
    BURST: ClassVar[tuple[int, float]] = (8, 1.4)

    last: list[float] = field(default_factory=list)  # 32 values, oldest first
    count: int = 0  # values
    changed: list[float] = field(default_factory=list)  # the last two that differ from the one before them
    step: float | None = None  # smallest change between two rounds
    bends: int = 0  # second differences of values that changed
    bend: float = 0.0  # their mean size
    first: float = 0.0  # sum of the first 32 of them, clipped
    largest: list[float] = field(default_factory=list)  # of these, 3 at most, the largest last
    windows: list[float] = field(default_factory=lambda: [_PRIOR[0] * _PRIOR[1], _PRIOR[0]])  # sum, number

    def add(self, value: float) -> None:
        """Add the next value of the series to the measurement."""
        change = abs(value - self.last[-1]) if self.last else 0.0
        if change and (self.step is None or change < self.step):
            self.step = change
        if change or not self.last:  # one value given again says nothing of the size
            if len(self.changed) == 2:
                self._learn_size(abs((value - self.changed[1]) - (self.changed[1] - self.changed[0])))
            self.changed = [*self.changed, value][-2:]
        self.last, self.count = [*self.last, value][-KEPT:], self.count + 1
        if self.count >= FIRST_LINE:
            self._learn_correlation(self.last[-LINE:])

    def _learn_size(self, bend: float) -> None:
        if self.bends >= _SETTLED and self.bend > 0:
            bend = min(bend, _CLIP * self.bend)
        self.bends += 1
        if self.bends > _MEMORY:
            self.bend += (bend - self.bend) / _MEMORY
            return
        dropped = _dropped(self.bends)
        self.first += bend
        self.largest = sorted([*self.largest, bend])[-_dropped(_MEMORY) :]
        left = max(self.first - added(self.largest[len(self.largest) - dropped :]), 0.0)
        self.bend = left / (self.bends - dropped) * (1 + _TRIM * dropped / self.bends)

    def _learn_correlation(self, values: Sequence[float]) -> None:
        count = len(values)
        left, curved = _without_curve(values)
        left = clipped(left)
        square = added([each * each for each in left])
        self._forget()
        if self._knows(square, count):
            found = added([one * other for one, other in pairwise(left)]) / square
            factor, shift = _OF_CUBIC
            found = factor * (found + _LOST_CUBIC / count) + shift if curved else found + _LOST / count
            self.windows = [self.windows[0] + found, self.windows[1] + 1.0]

    def _forget(self) -> None:
        self.windows = [_PAST * each for each in self.windows]

    def _knows(self, square: float, count: int) -> bool:
        """Whether what is left of a window, with this sum of squares, is noise of the size measured, or less."""
        return square > 0 and square <= (count - 2) * (_BENT * self.bend / _MEAN_ABS) ** 2

    @property
    def rho(self) -> float:
        """The autocorrelation of the noise from one round to the next, as of AR(1) noise."""
        factor, shift = _STRETCH
        return min(max(factor * (self.windows[0] / self.windows[1]) + shift, 0.0), _RHO_MAX)

    def present(self) -> float:
        """The mean size of second differences: as measured or, up to `_CLIP` times of that, as the last ones say."""
        number, times = self.BURST
        if len(self.last) < number + 2:
            return self.bend
        changes = [now - last for last, now in pairwise(self.last[-number - 2 :])]
        bends = [abs(now - last) for last, now in pairwise(changes)]
        return max(self.bend, min(median(bends) / _MEDIAN / times, _CLIP * self.bend))

    def sigma(self, bend: float = 0.0) -> float:
        """The long-run standard deviation of the series; 0.0 if not known. At least half of the smallest change.

        `bend`: mean size of second differences in an earlier round, which counts if it is larger than now.
        """
        if not self.count:
            return 0.0
        # Second differences of AR(1) noise have a variance of 2 (1 - rho) (3 - rho) times that of the noise.
        rho, bend = self.rho, max(bend, self.present())
        scale = math.sqrt((1 + rho) / (2 * (3 - rho))) / (1 - rho) * (1 + _YOUNG / self.count)
        return max(bend / _MEAN_ABS * scale, (self.step or 0.0) / 2)


def _dropped(bends: int) -> int:
    """Number of second differences left out as outliers, of the first `bends`."""
    return (bends + 5) // 10 if bends >= _TRIMMED else 0


def clipped(left: Sequence[float]) -> list[float]:
    """The values of `left`, in order, each moved towards 0 as far as it is an outlier.

    An outlier is `_OUTLIER` times as far from 0 as the median.
    """
    sizes = sorted(abs(each) for each in left)
    limit = _OUTLIER * (sizes[(len(left) - 1) // 2] + sizes[len(left) // 2]) / 2
    return [min(max(each, -limit), limit) for each in left]


def _without_curve(values: Sequence[float]) -> tuple[list[float], bool]:
    """Distances of values from their least-squares line, or from their cubic if they climb and bend; True for that."""
    count, (level, slope, *bends) = len(values), _polynomials(len(values))
    rise = _part(values, slope)
    line = _without(_without(values, level, _part(values, level)), slope, rise)
    if count < _CUBIC_FROM:
        return line, False
    cubic = line
    for bend in bends:
        cubic = _without(cubic, bend, _part(cubic, bend))
    rest = added([each * each for each in cubic])
    explained, spread = added([each * each for each in line]) - rest, rest / (count - 4)
    curved = explained > 2 * _CURVED * spread and rise * (slope[-1] - slope[0]) > _CLIMBS * math.sqrt(spread)
    return (cubic, True) if curved else (line, False)


@cache
def _polynomials(count: int) -> tuple[tuple[float, ...], ...]:
    """Orthonormal polynomials of degree 0 to 3 at `count` places (Gram and Schmidt)."""
    found: list[tuple[float, ...]] = []
    for degree in range(4):
        left = [1.0 for _ in range(count)]
        for _ in range(degree):
            left = [each * (index - (count - 1) / 2) for index, each in enumerate(left)]
        for other in found:
            left = _without(left, other, _part(left, other))
        length = math.sqrt(added([each * each for each in left]))
        found.append(tuple(each / length for each in left))
    return tuple(found)


def _part(values: Sequence[float], column: Sequence[float]) -> float:
    return added([value * each for value, each in zip(values, column, strict=True)])


def _without(values: Sequence[float], column: Sequence[float], part: float) -> list[float]:
    return [value - part * each for value, each in zip(values, column, strict=True)]
