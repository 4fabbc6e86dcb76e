"""`Noise`: estimates the long-run standard deviation of a series that may have a trend.

Second differences cancel levels and constant slopes, so that neither a healthy rise nor a steady fall counts as noise.
At lag 1 and lag 8 they give variance and autocorrelation, and so the standard deviation per round of averages over many
rounds: for AR(1) noise, sd * sqrt((1 + rho) / (1 - rho)). The curved first descent of a run counts as noise in means
over the whole run; medians over the last 32 rounds forget it. Only `+ - * /`, comparisons and `math.sqrt`, which IEEE
754 rounds correctly, so that every machine gets the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from diloco_orchestrator.guard.channels.remembered import Remembered

LAG = 8  # rounds; beyond the memory of AR(1) noise of .7
_LONG = 256  # rounds that the mean of squares remembers
_BLOCK = 24  # rounds; the recent noise is measured over one to two blocks
_LAST = 4 * LAG  # values that are kept; medians are over the differences within them
_OUTLIER = 9.0  # squared sigmas at which one difference stops counting more
_SETTLED = 8  # squares before outliers are recognised
_RECENT = 1.8  # a calm stretch must be quieter than 1/1.8 of the whole run to lower sigma: less is chance
_BENT = 2.2  # the same for medians over the last values, which vary more, but forget how the run began
_MEDIAN = 0.4549  # median of the square of a standard normal number
_RHO_MAX = 0.9
_SHY = 0.3  # standard errors that sigma and rho are raised by, so that few rounds claim no precision
_FLOOR = 0.002  # of the series' range, under which differences are curvature or rounding and no noise
_STEPS = 8  # changes of value before a series that repeats its values shows how it varies


def _two() -> list[float]:
    return [0.0, 0.0]


@dataclass
class Noise(Remembered):
    """Noise estimate of one series whose values are added one by one. State: 44 numbers."""

    last: list[float] = field(default_factory=list)  # 32 values, oldest first
    count: int = 0  # of squares at lag 1
    block_count: int = 0
    before_count: int = 0
    steps: int = 0  # changes of value
    squares: list[float] = field(default_factory=_two)  # at lag 1 and 8: mean square, in units of one value's variance
    block: list[float] = field(default_factory=_two)  # sums of the block that is being filled
    before: list[float] = field(default_factory=_two)  # sums of the last full block
    low: float = 0.0
    high: float = 0.0

    def add(self, value: float) -> None:
        """Add the next value of the series."""
        last, floor = self.last, _FLOOR * (self.high - self.low)
        full = len(last) >= 2 * LAG
        self.block_count += full
        for index, lag in enumerate((1, LAG)):
            if len(last) < 2 * lag:
                continue
            difference = (value - last[-lag]) - (last[-lag] - last[-2 * lag])
            self._learn(index, _square(difference), floor * floor, full)
        if self.block_count == _BLOCK:
            self.before, self.before_count = self.block, self.block_count
            self.block, self.block_count = [0.0, 0.0], 0
        self.steps += bool(last) and value != last[-1]
        self.low, self.high = (min(self.low, value), max(self.high, value)) if last else (value, value)
        self.last = [*last, value][-_LAST:]

    def _learn(self, index: int, square: float, floor: float, full: bool) -> None:
        self.count += index == 0
        seen = self.count if index == 0 else self.count - 2 * (LAG - 1)
        mean = self.squares[index]
        if seen > _SETTLED:
            square = min(square, _OUTLIER * max(mean, floor))
        self.squares[index] = mean + max(1 / seen, 1 / _LONG) * (square - mean)
        if full:
            if self.before_count:
                square = min(square, _OUTLIER * max(self.before[index] / self.before_count, floor))
            self.block[index] += square

    def sigma(self, value: float) -> float:
        """The long-run standard deviation before `value`, which is not added but widens the series' range."""
        sigma = _long_run(self.squares[0], self.squares[1], min(self.count, _LONG))
        if self.before_count:
            n = self.before_count + self.block_count
            near, far = ((self.before[i] + self.block[i]) / n for i in (0, 1))
            sigma = min(sigma, _RECENT * _long_run(near, far, n))
        if len(self.last) == _LAST:
            near, far = (_median_square(self.last, lag) / _MEDIAN for lag in (1, LAG))
            sigma = min(sigma, _BENT * _long_run(near, far, _LAST - 2 * LAG))
        spread = max(self.high, value) - min(self.low, value)
        return max(sigma, spread if self.steps < _STEPS else _FLOOR * spread)

    def state(self) -> list[Any]:
        counts = [self.count, self.block_count, self.before_count, self.steps]
        return [self.last, counts, [*self.squares, *self.block, *self.before, self.low, self.high]]

    @classmethod
    def restore(cls, state: Any) -> Self:
        last, (count, block_count, before_count, steps), numbers = state
        squares, block, before, (low, high) = numbers[0:2], numbers[2:4], numbers[4:6], numbers[6:8]
        return cls(last, count, block_count, before_count, steps, squares, block, before, low, high)


def _square(difference: float) -> float:
    """The square of a second difference, scaled to the variance of one value if values are independent."""
    return difference * difference / 6


def _median_square(values: Sequence[float], lag: int) -> float:
    """The median square of the second differences at a lag. `values`: an even number, more than 2 * lag."""
    triples = zip(values[2 * lag :], values[lag:-lag], values, strict=False)
    sizes = sorted([abs((new - middle) - (middle - old)) for new, middle, old in triples])
    half = len(sizes) // 2
    return (_square(sizes[half - 1]) + _square(sizes[half])) / 2


def _long_run(near: float, far: float, n: int) -> float:
    """The long-run standard deviation, from mean squares of second differences at lag 1 and lag 8 over `n` rounds.

    For AR(1) noise near / far = (1 - rho)(3 - rho) / 3, which gives rho = 2 - sqrt(1 + 3 near / far).
    """
    if n < 1:
        return 0.0
    error = _SHY / math.sqrt(n)
    far = max(far, near)
    rho = min(2 - math.sqrt(1 + 3 * (near / far if far > 0 else 1.0)) + error, _RHO_MAX)
    return math.sqrt(far * (1 + rho) / (1 - rho)) * (1 + error)
