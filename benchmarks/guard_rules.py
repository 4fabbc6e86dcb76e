"""The guard's rules over many simulated runs at once: twins of the product's folds, on arrays (rounds, runs).

`check_twins` shows that they equal the product's own folds, run by run and round by round. Constants come from the
product.
"""

from dataclasses import dataclass, field

import numpy as np
from guard_trajectories import Array
from numpy.typing import NDArray

from diloco_orchestrator.guard import (
    Evidence,
    HeldOutGuard,
    SequentialGuard,
)
from diloco_orchestrator.guard.channels import breadth, drawdown, early, hacking_gap, metrics, noise, sudden

Rounds = NDArray[np.int64]  # the round of a halt by run, 0 if there was none
CHANNELS = ("", "sudden", "drawdown", "gap", "early collapse", "new low")


def heldout_guard(heldout: Array, in_loop: Array, patience: int = 3, gap: float = 0.10) -> Rounds:
    """Where `HeldOutGuard` with its other settings at their defaults fires."""
    guard = HeldOutGuard(decline_patience=patience, max_proxy_real_gap=gap)
    alpha, eps, warm_up = guard.ema_alpha, guard.rise_eps, guard.min_steps
    held, trained = heldout[0], in_loop[0]
    first_held, first_trained = held, trained
    streak, fired = np.zeros(heldout.shape[1], int), np.zeros(heldout.shape[1], int)
    for t in range(1, len(heldout)):
        held_before, trained_before = held, trained
        held = alpha * held + (1 - alpha) * heldout[t]
        trained = alpha * trained + (1 - alpha) * in_loop[t]
        declining, rising = held - held_before < -eps, trained - trained_before > eps
        streak = np.where(declining, streak + rising, 0)
        if t + 1 >= warm_up:
            fires = (streak >= patience) | ((trained - first_trained) - (held - first_held) > gap)
            fired = np.where((fired == 0) & fires, t + 1, fired)
    return fired


class _Noise:
    """Twin of `guard.channels.noise.Noise`; counts are the same in all runs."""

    def __init__(self, runs: int) -> None:
        self.last: list[Array] = []
        self.count = self.block_count = self.before_count = 0
        zero = np.zeros(runs)
        self.squares, self.block, self.before = [zero, zero], [zero, zero], [zero, zero]
        self.low = self.high = zero
        self.steps = np.zeros(runs, int)

    def add(self, value: Array) -> None:
        last, floor = self.last, noise._FLOOR * (self.high - self.low)
        floor = floor * floor
        full = len(last) >= 2 * noise.LAG
        self.block_count += full
        for index, lag in enumerate((1, noise.LAG)):
            if len(last) < 2 * lag:
                continue
            difference = (value - last[-lag]) - (last[-lag] - last[-2 * lag])
            square = difference * difference / 6
            self.count += index == 0
            seen = self.count if index == 0 else self.count - 2 * (noise.LAG - 1)
            mean = self.squares[index]
            if seen > noise._SETTLED:
                square = np.minimum(square, noise._OUTLIER * np.maximum(mean, floor))
            self.squares[index] = mean + max(1 / seen, 1 / noise._LONG) * (square - mean)
            if full:
                if self.before_count:
                    most = noise._OUTLIER * np.maximum(self.before[index] / self.before_count, floor)
                    square = np.minimum(square, most)
                self.block[index] = self.block[index] + square
        if self.block_count == noise._BLOCK:
            self.before, self.before_count = self.block, self.block_count
            self.block, self.block_count = [0 * value, 0 * value], 0
        if last:
            self.steps = self.steps + (value != last[-1])
        self.low = np.minimum(self.low, value) if last else value
        self.high = np.maximum(self.high, value) if last else value
        self.last = [*last, value][-noise._LAST :]

    def sigma(self, value: Array) -> Array:
        sigma = _long_run(self.squares[0], self.squares[1], min(self.count, noise._LONG))
        if self.before_count:
            n = self.before_count + self.block_count
            near, far = ((self.before[i] + self.block[i]) / n for i in (0, 1))
            sigma = np.minimum(sigma, noise._RECENT * _long_run(near, far, n))
        if len(self.last) == noise._LAST:
            near, far = (_median_square(np.array(self.last), lag) / noise._MEDIAN for lag in (1, noise.LAG))
            sigma = np.minimum(sigma, noise._BENT * _long_run(near, far, noise._LAST - 2 * noise.LAG))
        spread = np.maximum(self.high, value) - np.minimum(self.low, value)
        floor: Array = np.where(self.steps < noise._STEPS, spread, noise._FLOOR * spread)
        return np.maximum(sigma, floor)


def _median_square(values: Array, lag: int) -> Array:
    """(rounds, runs) -> (runs,)."""
    difference = (values[2 * lag :] - values[lag:-lag]) - (values[lag:-lag] - values[: -2 * lag])
    found: Array = np.median(difference * difference / 6, axis=0)
    return found


def _long_run(near: Array, far: Array, n: int) -> Array:
    error = noise._SHY / np.sqrt(n)
    far = np.maximum(far, near)
    ratio = np.divide(near, far, out=np.ones_like(far), where=far > 0)
    rho = np.minimum(2 - np.sqrt(1 + 3 * ratio) + error, noise._RHO_MAX)
    found: Array = np.sqrt(far * (1 + rho) / (1 - rho)) * (1 + error)
    return found


@dataclass
class _Halts:
    rounds: Rounds
    channels: NDArray[np.int64]

    def at(self, round_: int, where: NDArray[np.bool_], channel: int) -> None:
        new = (self.rounds == 0) & where
        self.rounds = np.where(new, round_, self.rounds)
        self.channels = np.where(new, channel, self.channels)


@dataclass
class _Level:
    """Twin of `guard.channels.drawdown.BestLevel`."""

    runs: int
    sums: list[Array] = field(init=False)
    best: list[Array] = field(init=False)
    full: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        self.sums = [np.zeros(self.runs) for _ in drawdown.BLOCKS]
        self.best = [np.full(self.runs, -np.inf) for _ in drawdown.BLOCKS]

    def level(self, sigma: Array) -> Array:
        found = np.full(self.runs, -np.inf)
        for best, full, size in zip(self.best, self.full, drawdown.BLOCKS, strict=True):
            if full:
                width = np.sqrt(1.2 + 1.3 * (full.bit_length() - 1))
                found = np.maximum(found, best - width * sigma / np.sqrt(size))
        return found

    def add(self, count: int, value: Array) -> Array | None:
        filled = None
        for index, size in enumerate(drawdown.BLOCKS):
            self.sums[index] = self.sums[index] + value
            if count % size == 0:
                mean = self.sums[index] / size
                self.best[index] = np.maximum(self.best[index], mean)
                self.sums[index] = 0 * value
                self.full[index] += 1
                filled = mean if index == 0 else filled
        return filled


class _Breadth:
    """Twin of `guard.channels.breadth.Breadth`. `gains`: (rounds, shares, runs), NaN where a share is missing."""

    def __init__(self, gains: Array | None) -> None:
        self.gains = gains
        if gains is not None:
            self.usual = np.full(gains.shape[1:], np.nan)
            self.parts = [np.full(gains.shape[1:], np.nan) for _ in drawdown.CUSUMS]

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
        few, ordered = known // breadth._LIARS, np.sort(self.parts[index], axis=0)  # missing ones come last
        place = np.arange(len(ordered))[:, None]
        highest = np.where((place >= known - few) & (place < known), ordered, 0.0).sum(axis=0)
        rest = np.where((place >= few) & (place < known - few), ordered, 0.0).sum(axis=0)
        next_lowest = np.take_along_axis(ordered, np.minimum(few, len(ordered) - 1)[None], axis=0)[0]
        among = np.maximum(known - few, 1) * np.where(sigma > 0, sigma, 1.0)
        lowest = statistic - highest / among
        extremes = statistic + (rest + few * next_lowest) / among
        enough = (lowest > breadth._WITHOUT_LOWEST * threshold) | (extremes > breadth._WITHOUT_EXTREMES * threshold)
        found: NDArray[np.bool_] = enough | (few == 0) | ~(sigma > 0)
        return found

    def learn(self, count: int, calm: NDArray[np.bool_]) -> None:
        if self.gains is None:
            return
        nearer = self.usual + max(1 / count, 1 / breadth._MEMORY) * (self.now - self.usual)
        known = np.where(calm & ~np.isnan(self.now), nearer, self.usual)
        self.usual = np.where(np.isnan(self.usual), self.now, known)


class _Groups:
    """Twin of the groups of `guard.channels.early`: the last rounds before each end, and all rounds since each."""

    def __init__(self, values: Array) -> None:
        runs, ends = values.shape[1], range(1, len(values) + 1)
        windows = [slice(max(0, end - early.BEFORE), end) for end in ends]
        moved = np.vstack([np.diff(values, axis=0) != 0, np.zeros((1, runs), int)])
        self.low = np.array([values[w].min(axis=0) for w in windows])
        self.range = np.array([np.ptp(values[w], axis=0) for w in windows])
        self.steps = np.array([moved[w][:-1].sum(axis=0) for w in windows])
        self.high_since = np.maximum.accumulate(values[::-1], axis=0)[::-1]
        self.range_since = self.high_since - np.minimum.accumulate(values[::-1], axis=0)[::-1]
        self.rise_since = np.maximum.accumulate((self.high_since - values)[::-1], axis=0)[::-1]
        self.steps_since = np.cumsum(moved[::-1], axis=0)[::-1]

    def distance(self, end: int, since: int) -> Array:
        found: Array = self.low[end - 1] - self.high_since[since]
        return found

    def width(self, end: int, since: int) -> Array:
        before = self.range[end - 1]
        found: Array = np.where(before > 0, np.maximum(before, self.rise_since[since]), self.range_since[since])
        return found


def _collapsed(held: Array, trained: Array) -> NDArray[np.bool_]:
    """Twin of `guard.channels.early.EarlyCollapse`: where it halts after the last of these rounds."""
    c, (rounds, runs) = early, held.shape
    one, other, found = _Groups(held), _Groups(-trained), np.zeros(runs, bool)
    for between in range(c.BETWEEN + 1):
        for end in range(1, rounds - between - c.GAINED[0] + 1):
            since, lasted = end + between, rounds - end - between
            distance = one.distance(end, since)
            if not (distance > 0).any():
                continue
            steps, width = one.steps[end - 1], one.width(end, since)
            varies = (steps + one.steps_since[since] >= c.STEPS) | ((steps >= 2) & (lasted >= c.CONSTANT))
            gain, usual = other.distance(end, since), other.width(end, since)
            gained = gain > usual
            enough = gained & (distance > c.OF_THE_GAIN * gain) & (distance > c.GAINED[1] * width)
            if lasted >= c.OTHERWISE[0]:
                enough |= ~gained & (distance > usual) & (distance > c.OTHERWISE[1] * width)
            found |= varies & enough & (distance > 0) & (width > 0)
    return found


class _NewLow:
    """Twin of `guard.channels.early.NewLow`. `held`: (rounds, runs), of the whole run."""

    def __init__(self, held: Array) -> None:
        self.held = held
        moved = np.abs(np.diff(held, axis=0, prepend=held[:1]))
        self.changes = np.cumsum(moved > 0, axis=0)
        self.step = np.minimum.accumulate(np.where(moved > 0, moved, np.inf), axis=0)
        self.low, self.high = np.minimum.accumulate(held, axis=0), np.maximum.accumulate(held, axis=0)

    def halts(self, t: int, gained: Array) -> NDArray[np.bool_]:
        """Where it halts after round index t."""
        c, first = early, t + 1 - early.SINCE
        if first < c.BEFORE:
            return np.zeros(self.held.shape[1], bool)
        before, since = max(c.BEFORE, first - c.LOW_BETWEEN) - 1, self.held[first : t + 1]
        highest, rise = since.max(axis=0), np.zeros(self.held.shape[1])
        for earlier, later in zip(since[: c.SINCE // 2], since[c.SINCE // 2 :], strict=True):
            rise = rise + (later - earlier)
        distance, width = self.low[before] - highest, np.maximum(highest - since.min(axis=0), self.step[t])
        # All rounds until the scores since; those that are below every score before are no higher than the others.
        lost = self.high[first - 1] - highest
        says = (2 * self.changes[before] >= before) & (rise <= width) & (lost > c.OF_THE_GAIN * gained)
        found: NDArray[np.bool_] = (distance > 0) & says & (distance > c.NEEDS * width)
        return found


def sequential(
    heldout: Array,
    in_loop: Array,
    weight: Array | None = None,
    gains: Array | None = None,
    guard: SequentialGuard | None = None,
) -> tuple[Rounds, NDArray[np.int64]]:
    """Where `SequentialGuard` halts, and by which of `CHANNELS`. `weight`: share of the items in each score."""
    guard = guard or SequentialGuard()
    rounds, runs = heldout.shape
    zero = np.zeros(runs)
    halts = _Halts(np.zeros(runs, int), np.zeros(runs, int))
    held_noise, gap_noise, best = _Noise(runs), _Noise(runs), _Level(runs)
    falls, gap, first = [zero for _ in drawdown.CUSUMS], zero, zero
    held_level, trained_level, trained_sum = zero, zero, zero
    last_trained, largest, strikes = zero, zero, np.zeros(runs, int)
    quartet, best_quartet = zero, np.full(runs, -np.inf)
    shares, lows = _Breadth(gains), _NewLow(heldout - heldout[0])
    for t in range(rounds):
        held, trained = heldout[t] - heldout[0], in_loop[t] - in_loop[0]
        w = 1.0 if weight is None else weight[t]
        shares.begin_round(t)
        if t >= sudden.FROM:
            fell = (best_quartet - held > sudden.TIMES * largest) & (largest > 0)
            strikes = np.where(fell, strikes + 1, 0)
            halts.at(t + 1, strikes >= sudden.ROUNDS, 1)
        if t >= metrics.FIRST_JUDGED:
            late = t + 1 >= guard.min_steps
            sigma = held_noise.sigma(held)
            below = _clipped(best.level(sigma) - held, sigma)
            for index, (slack, share) in enumerate(drawdown.CUSUMS):
                falls[index] = np.maximum(0.0, falls[index] + w * (below - slack))
                broad = shares.broad(index, falls[index], sigma, share * guard.threshold)
                halts.at(t + 1, late & broad & (falls[index] > share * guard.threshold), 2)
            sigma = gap_noise.sigma(trained - held)
            allowed = np.maximum(guard.gap_sigmas * sigma, hacking_gap.OF_THE_GAIN * (best.best[0] - first))
            above = _clipped((trained - trained_level) - (held - held_level) - allowed, sigma)
            gap = np.maximum(0.0, gap + w * (above - drawdown.CUSUMS[0][0]))
            halts.at(t + 1, late & (gap > guard.threshold), 3)
        if t:
            moved = np.abs(held - held_noise.last[-1])
            faded = np.where(moved > 0, sudden.FADES * largest, largest)
            change = np.maximum(moved, np.abs(trained - last_trained))
            largest = np.where(strikes > 0, largest, np.maximum(faded, change))
        if t < early.ROUNDS:
            halts.at(t + 1, _collapsed(heldout[: t + 1] - heldout[0], in_loop[: t + 1] - in_loop[0]), 4)
        halts.at(t + 1, lows.halts(t, trained), 5)
        shares.learn(t + 1, falls[0] == 0)
        last_trained = trained
        quartet = quartet + held
        if (t + 1) % sudden.QUARTET == 0:
            best_quartet, quartet = np.maximum(best_quartet, quartet / sudden.QUARTET), zero
        held_noise.add(held)
        gap_noise.add(trained - held)
        trained_sum = trained_sum + trained
        mean = best.add(t + 1, held)
        if mean is not None:
            if best.full[0] == 1:
                first, improved = mean, np.ones(runs, bool)
            else:
                improved = mean - held_level > metrics.IMPROVED * held_noise.sigma(held) * np.sqrt(
                    2 / drawdown.BLOCKS[0]
                )
            held_level = np.where(improved, mean, held_level)
            trained_level = np.where(improved, trained_sum / drawdown.BLOCKS[0], trained_level)
            gap, trained_sum = np.where(improved, 0.0, gap), zero
    return halts.rounds, halts.channels


def _clipped(value: Array, sigma: Array) -> Array:
    sigmas = np.divide(value, sigma, out=np.zeros_like(value), where=sigma > 0)
    return np.minimum(np.maximum(sigmas, -drawdown.CLIP), drawdown.CLIP)


# -- the product's own folds -------------------------------------------------------------------------------------------


def folded(heldout: Array, in_loop: Array, weight: Array | None = None, gains: Array | None = None) -> tuple[int, str]:
    """The round in which the product's `SequentialGuard` halts one run, 0 if it does not, and its reason."""
    guard, state = SequentialGuard(), None
    for t in range(len(heldout)):
        total = 10**9
        items = total if weight is None else round(float(weight[t]) * total)
        there = {} if gains is None else {str(i): float(g) for i, g in enumerate(gains[t]) if not np.isnan(g)}
        evidence = Evidence(
            round=t + 1,
            heldout=float(heldout[t]),
            in_loop=float(in_loop[t]),
            items=items,
            total_items=total,
            gains=there,
        )
        state, verdict = guard.fold(state, evidence)
        if verdict.fire:
            return t + 1, verdict.reason
    return 0, ""


def updated(heldout: Array, in_loop: Array, patience: int) -> int:
    """The round in which the product's `HeldOutGuard` fires, 0 if it does not."""
    guard = HeldOutGuard(decline_patience=patience)
    for t in range(len(heldout)):
        if guard.update(t + 1, float(in_loop[t]), float(heldout[t])).fire:
            return t + 1
    return 0


def check_twins(heldout: Array, in_loop: Array, weight: Array | None = None, gains: Array | None = None) -> int:
    """The number of runs in which every twin stops in the same round as the product; ends the program otherwise."""
    runs = heldout.shape[1]
    ours = sequential(heldout, in_loop, weight, gains)[0]
    for run in range(runs):
        w = None if weight is None else weight[:, run]
        g = None if gains is None else gains[:, :, run]
        real = folded(heldout[:, run], in_loop[:, run], w, g)[0]
        if real != ours[run]:
            raise SystemExit(f"SequentialGuard halts run {run} in round {real}, its twin in {ours[run]}.")
    for patience in (3, 6):
        fast = heldout_guard(heldout, in_loop, patience)
        for run in range(runs):
            real = updated(heldout[:, run], in_loop[:, run], patience)
            if real != fast[run]:
                raise SystemExit(f"HeldOutGuard halts run {run} in round {real}, its twin in {fast[run]}.")
    return runs
