"""The guard's rule "sequential-v1" over many simulated runs at once: a twin of `guard.sequential_v1` on arrays.

Kept as the rule that the default one is compared with; golden digests, not this file, fix its bytes.
"""

from dataclasses import dataclass, field

import numpy as np
from guard_rules import Halts, NewLow, Rounds, collapsed
from guard_trajectories import Array
from numpy.typing import NDArray

from diloco_orchestrator.guard import sequential_v1 as v1
from diloco_orchestrator.guard.channels import early


class _NoiseV1:
    """Twin of `guard.sequential_v1.Noise`; counts are the same in all runs."""

    def __init__(self, runs: int) -> None:
        self.last: list[Array] = []
        self.count = self.block_count = self.before_count = 0
        zero = np.zeros(runs)
        self.squares, self.block, self.before = [zero, zero], [zero, zero], [zero, zero]
        self.low = self.high = zero
        self.steps = np.zeros(runs, int)

    def add(self, value: Array) -> None:
        last, floor = self.last, v1._FLOOR * (self.high - self.low)
        floor = floor * floor
        full = len(last) >= 2 * v1.LAG
        self.block_count += full
        for index, lag in enumerate((1, v1.LAG)):
            if len(last) < 2 * lag:
                continue
            difference = (value - last[-lag]) - (last[-lag] - last[-2 * lag])
            square = difference * difference / 6
            self.count += index == 0
            seen = self.count if index == 0 else self.count - 2 * (v1.LAG - 1)
            mean = self.squares[index]
            if seen > v1._SETTLED:
                square = np.minimum(square, v1._OUTLIER * np.maximum(mean, floor))
            self.squares[index] = mean + max(1 / seen, 1 / v1._LONG) * (square - mean)
            if full:
                if self.before_count:
                    most = v1._OUTLIER * np.maximum(self.before[index] / self.before_count, floor)
                    square = np.minimum(square, most)
                self.block[index] = self.block[index] + square
        if self.block_count == v1._BLOCK:
            self.before, self.before_count = self.block, self.block_count
            self.block, self.block_count = [0 * value, 0 * value], 0
        if last:
            self.steps = self.steps + (value != last[-1])
        self.low = np.minimum(self.low, value) if last else value
        self.high = np.maximum(self.high, value) if last else value
        self.last = [*last, value][-v1._LAST :]

    def sigma(self, value: Array) -> Array:
        sigma = _long_run(self.squares[0], self.squares[1], min(self.count, v1._LONG))
        if self.before_count:
            n = self.before_count + self.block_count
            near, far = ((self.before[i] + self.block[i]) / n for i in (0, 1))
            sigma = np.minimum(sigma, v1._RECENT * _long_run(near, far, n))
        if len(self.last) == v1._LAST:
            near, far = (_median_square(np.array(self.last), lag) / v1._MEDIAN for lag in (1, v1.LAG))
            sigma = np.minimum(sigma, v1._BENT * _long_run(near, far, v1._LAST - 2 * v1.LAG))
        spread = np.maximum(self.high, value) - np.minimum(self.low, value)
        floor: Array = np.where(self.steps < v1._STEPS, spread, v1._FLOOR * spread)
        return np.maximum(sigma, floor)


def _median_square(values: Array, lag: int) -> Array:
    """(rounds, runs) -> (runs,)."""
    difference = (values[2 * lag :] - values[lag:-lag]) - (values[lag:-lag] - values[: -2 * lag])
    found: Array = np.median(difference * difference / 6, axis=0)
    return found


def _long_run(near: Array, far: Array, n: int) -> Array:
    error = v1._SHY / np.sqrt(n)
    far = np.maximum(far, near)
    ratio = np.divide(near, far, out=np.ones_like(far), where=far > 0)
    rho = np.minimum(2 - np.sqrt(1 + 3 * ratio) + error, v1._RHO_MAX)
    found: Array = np.sqrt(far * (1 + rho) / (1 - rho)) * (1 + error)
    return found


@dataclass
class _LevelV1:
    """Twin of `guard.sequential_v1.BestLevel`."""

    runs: int
    sums: list[Array] = field(init=False)
    best: list[Array] = field(init=False)
    full: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        self.sums = [np.zeros(self.runs) for _ in v1.BLOCKS]
        self.best = [np.full(self.runs, -np.inf) for _ in v1.BLOCKS]

    def level(self, sigma: Array) -> Array:
        found = np.full(self.runs, -np.inf)
        for best, full, size in zip(self.best, self.full, v1.BLOCKS, strict=True):
            if full:
                width = np.sqrt(1.2 + 1.3 * (full.bit_length() - 1))
                found = np.maximum(found, best - width * sigma / np.sqrt(size))
        return found

    def add(self, count: int, value: Array) -> Array | None:
        filled = None
        for index, size in enumerate(v1.BLOCKS):
            self.sums[index] = self.sums[index] + value
            if count % size == 0:
                mean = self.sums[index] / size
                self.best[index] = np.maximum(self.best[index], mean)
                self.sums[index] = 0 * value
                self.full[index] += 1
                filled = mean if index == 0 else filled
        return filled


class _Breadth:
    """Twin of `guard.sequential_v1.Breadth`. `gains`: (rounds, shares, runs), NaN where a share is missing."""

    def __init__(self, gains: Array | None) -> None:
        self.gains = gains
        if gains is not None:
            self.usual = np.full(gains.shape[1:], np.nan)
            self.parts = [np.full(gains.shape[1:], np.nan) for _ in v1.CUSUMS]

    def begin_round(self, t: int) -> None:
        if self.gains is not None:
            self.now = self.gains[t] - np.nanmean(self.gains[t], axis=0)

    def broad(self, index: int, statistic: Array, sigma: Array, threshold: float) -> NDArray[np.bool_]:
        if self.gains is None:
            return np.ones(statistic.shape, bool)
        usual = np.where(np.isnan(self.usual), self.now, self.usual)
        parts = self.parts[index]
        more = np.where(np.isnan(self.now), parts, np.nan_to_num(parts) - (self.now - usual))
        self.parts[index] = np.where(statistic == 0, np.nan, more)
        known = (~np.isnan(self.parts[index])).sum(axis=0)
        few, ordered = known // v1._LIARS, np.sort(self.parts[index], axis=0)  # missing ones come last
        place = np.arange(len(ordered))[:, None]
        highest = np.where((place >= known - few) & (place < known), ordered, 0.0).sum(axis=0)
        rest = np.where((place >= few) & (place < known - few), ordered, 0.0).sum(axis=0)
        next_lowest = np.take_along_axis(ordered, np.minimum(few, len(ordered) - 1)[None], axis=0)[0]
        among = np.maximum(known - few, 1) * np.where(sigma > 0, sigma, 1.0)
        lowest = statistic - highest / among
        extremes = statistic + (rest + few * next_lowest) / among
        enough = (lowest > v1._WITHOUT_LOWEST * threshold) | (extremes > v1._WITHOUT_EXTREMES * threshold)
        found: NDArray[np.bool_] = enough | (few == 0) | ~(sigma > 0)
        return found

    def learn(self, count: int, calm: NDArray[np.bool_]) -> None:
        if self.gains is None:
            return
        nearer = self.usual + max(1 / count, 1 / v1._BREADTH_MEMORY) * (self.now - self.usual)
        known = np.where(calm & ~np.isnan(self.now), nearer, self.usual)
        self.usual = np.where(np.isnan(self.usual), self.now, known)


def sequential_v1(
    heldout: Array,
    in_loop: Array,
    weight: Array | None = None,
    gains: Array | None = None,
) -> tuple[Rounds, NDArray[np.int64]]:
    """Where `SequentialV1` halts, and by which of `CHANNELS`. `weight`: share of the items in each score."""
    guard = v1.SequentialV1()
    rounds, runs = heldout.shape
    zero = np.zeros(runs)
    halts = Halts(np.zeros(runs, int), np.zeros(runs, int))
    held_noise, gap_noise, best = _NoiseV1(runs), _NoiseV1(runs), _LevelV1(runs)
    falls, gap, first = [zero for _ in v1.CUSUMS], zero, zero
    held_level, trained_level, trained_sum = zero, zero, zero
    last_trained, largest, strikes = zero, zero, np.zeros(runs, int)
    quartet, best_quartet = zero, np.full(runs, -np.inf)
    shares, lows = _Breadth(gains), NewLow(heldout - heldout[0])
    for t in range(rounds):
        held, trained = heldout[t] - heldout[0], in_loop[t] - in_loop[0]
        w = 1.0 if weight is None else weight[t]
        shares.begin_round(t)
        if t >= v1.FROM:
            fell = (best_quartet - held > v1.TIMES * largest) & (largest > 0)
            strikes = np.where(fell, strikes + 1, 0)
            halts.at(t + 1, strikes >= v1.SUDDEN_ROUNDS, 1)
        if t >= v1.FIRST_JUDGED:
            late = t + 1 >= guard.min_steps
            sigma = held_noise.sigma(held)
            below = _clipped(best.level(sigma) - held, sigma)
            for index, (slack, share) in enumerate(v1.CUSUMS):
                falls[index] = np.maximum(0.0, falls[index] + w * (below - slack))
                broad = shares.broad(index, falls[index], sigma, share * guard.threshold)
                halts.at(t + 1, late & broad & (falls[index] > share * guard.threshold), 2)
            sigma = gap_noise.sigma(trained - held)
            allowed = np.maximum((guard.gap_sigmas or 0.0) * sigma, v1.OF_THE_HELD_GAIN * (best.best[0] - first))
            above = _clipped((trained - trained_level) - (held - held_level) - allowed, sigma)
            gap = np.maximum(0.0, gap + w * (above - v1.CUSUMS[0][0]))
            halts.at(t + 1, late & (gap > guard.threshold), 3)
        if t:
            moved = np.abs(held - held_noise.last[-1])
            faded = np.where(moved > 0, v1.FADES * largest, largest)
            change = np.maximum(moved, np.abs(trained - last_trained))
            largest = np.where(strikes > 0, largest, np.maximum(faded, change))
        if t < early.ROUNDS:
            halts.at(t + 1, collapsed(heldout[: t + 1] - heldout[0], in_loop[: t + 1] - in_loop[0]), 4)
        halts.at(t + 1, lows.halts(t, trained), 5)
        shares.learn(t + 1, falls[0] == 0)
        last_trained = trained
        quartet = quartet + held
        if (t + 1) % v1.QUARTET == 0:
            best_quartet, quartet = np.maximum(best_quartet, quartet / v1.QUARTET), zero
        held_noise.add(held)
        gap_noise.add(trained - held)
        trained_sum = trained_sum + trained
        mean = best.add(t + 1, held)
        if mean is not None:
            if best.full[0] == 1:
                first, improved = mean, np.ones(runs, bool)
            else:
                improved = mean - held_level > v1.IMPROVED * held_noise.sigma(held) * np.sqrt(2 / v1.BLOCKS[0])
            held_level = np.where(improved, mean, held_level)
            trained_level = np.where(improved, trained_sum / v1.BLOCKS[0], trained_level)
            gap, trained_sum = np.where(improved, 0.0, gap), zero
    return halts.rounds, halts.channels


def _clipped(value: Array, sigma: Array) -> Array:
    sigmas = np.divide(value, sigma, out=np.zeros_like(value), where=sigma > 0)
    return np.minimum(np.maximum(sigmas, -v1.CLIP), v1.CLIP)
