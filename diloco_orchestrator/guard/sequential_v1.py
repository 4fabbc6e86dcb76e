"""`SequentialV1`: the guard rule "sequential-v1", by which runs that began before "sequential-v2" go on to be judged.

Frozen: its states and verdicts keep their bytes (golden digests), since commits of those runs are derived again by it.
It differs from `SequentialGuard` in how it measures noise, levels, falls and the Hacking Gap, and by a statistic of
sudden falls; early collapse, new low, KL drift and the breadth over shares are the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.early import ADVICE, ROUNDS, NewLow
from diloco_orchestrator.guard.channels.remembered import Remembered, RememberedTogether, added
from diloco_orchestrator.guard.sequential import SequentialGuard
from diloco_orchestrator.guard.sequential_v3 import CollapseFromFirst
from diloco_orchestrator.protocol.start_records import HeldoutSet

# -- noise

LAG = 8  # rounds; beyond the memory of AR(1) noise of .7
_LONG = 256  # rounds that the mean of squares remembers
_BLOCK = 24  # rounds; the recent noise is measured over one to two blocks
_LAST = 4 * LAG  # values that are kept; medians are over the differences within them
_OUTLIER = 9.0  # squared sigmas at which one difference stops counting more
_SETTLED = 8  # squares before outliers are recognised
_RECENT = 1.8  # a calm stretch must be quieter than 1/1.8 of the whole run to lower sigma: less is chance
_BENT = 2.2  # the same for medians over the last values, which vary more, but do not see how the run began
_MEDIAN = 0.4549  # median of the square of a standard normal number
_RHO_MAX = 0.9
_SHY = 0.3  # standard errors that sigma and rho are raised by, so that few rounds claim no precision
_FLOOR = 0.002  # of the series' range, under which differences are curvature or rounding and no noise
_STEPS = 8  # changes of value before a series that repeats its values shows how it varies


def _two() -> list[float]:
    return [0.0, 0.0]


@dataclass
class Noise(Remembered):
    """The noise of one series in the rule "sequential-v1", measured value by value. Stored state: 44 numbers."""

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
        """Add the next value of the series to the measurement."""
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
        """The long-run standard deviation of the series before `value`, which only counts in the series' range."""
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
    """The square of a second difference, in units of the variance of one value, if values are independent."""
    return difference * difference / 6


def _median_square(values: Sequence[float], lag: int) -> float:
    """The median of the squares of the second differences at a lag. `values`: an even number, more than 2 * lag."""
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


# -- drawdown

BLOCKS = (8, 64)  # rounds: short blocks follow a rise, long ones know a plateau more exactly
# Slack in sigmas per round, and threshold as a share of the setting: slow drifts, fast falls (Page's CUSUM).
CUSUMS = ((0.25, 1.0), (0.6, 0.6))
CLIP = 3.5  # sigmas at most that one round can add: no single round halts
_NAMES = ("slow fall", "fast fall")


@dataclass
class BestLevel(Remembered):
    """The best level that a noisy series has surely reached, from means over full blocks. Stored state: 10 numbers."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    best: list[float | None] = field(default_factory=lambda: [None, None])
    full: list[int] = field(default_factory=lambda: [0, 0])  # blocks so far
    count: int = 0
    first: float | None = None  # mean of the first short block

    def add(self, value: float) -> float | None:
        """Add the next value of the series; returns the mean of the block of 8 values that it completes, else None."""
        self.count += 1
        filled: float | None = None
        for index, size in enumerate(BLOCKS):
            self.sums[index] += value
            if self.count % size == 0:
                mean = self.sums[index] / size
                best = self.best[index]
                self.best[index] = mean if best is None else max(best, mean)
                self.sums[index] = 0.0
                self.full[index] += 1
                filled = mean if index == 0 else filled
        if self.first is None:
            self.first = filled
        return filled

    def level(self, sigma: float) -> float:
        """A lower confidence bound of the best level; 0.0 before the first full block of 8 values. `sigma`: the noise.

        The best of more blocks is further above the mean by chance, so the bound widens with their number.
        """
        bounds = [
            best - math.sqrt(1.2 + 1.3 * (full.bit_length() - 1)) * sigma / math.sqrt(size)
            for best, full, size in zip(self.best, self.full, BLOCKS, strict=True)
            if best is not None
        ]
        return max(bounds, default=0.0)

    def gain(self) -> float:
        """The highest mean of a block of 8 scores minus the mean of the first block; 0.0 before that is full."""
        best = self.best[0]
        return 0.0 if best is None or self.first is None else best - self.first


# Breadth: whether a fall is seen on most of the shares, or on a few whose word may be a lie.
_BREADTH_MEMORY = 32  # rounds over which a share's usual distance from the mean is known
_LIARS = 4  # one share of so many may be wrong
# Shares of the threshold that must remain without the shares that fell most. The first is enough for honest shares. By
# simulation it makes shares that rise on purpose hide a slow fall for more than twice as long; so with them counted
# as the next lowest, a larger rest is enough as well.
_WITHOUT_LOWEST = 0.85
_WITHOUT_EXTREMES = 2.2


@dataclass
class Breadth(Remembered):
    """Sums, for two statistics, of how much more each share of the held-out set (one replica's) fell than the mean.

    Stored state: 1 number per share, and 1 per share and statistic.
    """

    count: int = 0  # rounds learnt
    usual: dict[str, float] = field(default_factory=dict)  # by share: distance from the mean, in the metric's unit
    parts: list[dict[str, float]] = field(default_factory=lambda: [{}, {}])  # by share: fell more than the mean
    now: dict[str, float] = field(default_factory=dict, init=False)  # this round's distances from the mean

    def begin_round(self, gains: Mapping[str, float]) -> None:
        """Begin a round with the score gain of each scored share of the held-out set; `gains` is empty if unknown."""
        mean = added([gains[share] for share in sorted(gains)]) / len(gains) if gains else 0.0
        self.now = {share: gains[share] - mean for share in sorted(gains)}

    def add(self, index: int, *, zero: bool) -> None:
        """Add to each held-out share's part in statistic number `index` by how much the share fell more than the mean.

        `zero`: the statistic is zero now, so all parts are dropped instead.
        """
        parts = self.parts[index]
        if zero:
            parts.clear()
            return
        for share, distance in self.now.items():
            parts[share] = parts.get(share, 0.0) - (distance - self.usual.get(share, distance))

    def dismiss(self) -> None:
        self.parts = [{} for _ in self.parts]

    def is_broad(self, index: int, statistic: float, sigma: float, threshold: float) -> bool:
        """Whether a statistic stays above its limits without the quarter of the held-out shares that fell most."""
        parts = sorted(self.parts[index].values())
        few = len(parts) // _LIARS
        if not few or not sigma > 0:
            return True
        rest = parts[few:-few]
        among = (len(parts) - few) * sigma
        lowest = statistic - added(parts[-few:]) / among
        extremes = statistic + (added(rest) + few * rest[0]) / among
        return lowest > _WITHOUT_LOWEST * threshold or extremes > _WITHOUT_EXTREMES * threshold

    def most(self, index: int) -> list[int]:
        """The ids of the quarter of the held-out shares with the largest parts in statistic `index`; of three none."""
        parts = self.parts[index]
        return sorted(int(share) for share in sorted(parts, key=lambda s: -parts[s])[: len(parts) // _LIARS])

    def learn(self, *, calm: bool) -> None:
        """Update the usual distance of each held-out share's score gain from the mean of all.

        `calm`: no statistic indicates a falling score; otherwise only shares seen for the first time are added.
        """
        self.count += 1
        weight = max(1 / self.count, 1 / _BREADTH_MEMORY)
        for share, distance in self.now.items():
            usual = self.usual.get(share)
            if usual is None:
                self.usual[share] = distance
            elif calm:
                self.usual[share] = usual + weight * (distance - usual)


@dataclass
class Drawdown(Remembered):
    """Two statistics that add up, round by round, the sigmas by which the held-out score is below its best level.

    A sigma is the long-run standard deviation of the score. Stored state: 4 numbers.
    """

    falls: list[float] = field(default_factory=lambda: [0.0, 0.0])
    zero: list[int] = field(default_factory=lambda: [0, 0])  # the last models at which they were zero
    narrow: str = field(default="", init=False)  # a fall that does not count in this round: few shares carry it

    def begin(self, model: int) -> None:
        """Set both statistics to zero, so that they add up from the base of round `model` on."""
        self.falls, self.zero = [0.0, 0.0], [model, model]

    def judge(
        self, model: int, below: float, sigma: float, weight: float, threshold: float, breadth: Breadth
    ) -> list[Alarm]:
        """Add the score of the base of round `model` to both statistics; returns alarms for those above their limit.

        `below`: how far the score is below its best level, in the metric's unit; `sigma`: its noise. `weight`: fraction
        of the held-out items scored. `threshold`: the setting, of which each limit is a fixed share. A fall that only
        few shares show (`breadth`) gives no alarm but a warning.
        """
        below, alarms, self.narrow = in_sigmas(below, sigma), [], ""
        for index, (slack, share) in enumerate(CUSUMS):
            limit = share * threshold
            fall = self.falls[index] = max(0.0, self.falls[index] + weight * (clipped(below) - slack))
            breadth.add(index, zero=fall == 0.0)
            if fall == 0.0:
                self.zero[index] = model
            elif fall > limit and not breadth.is_broad(index, fall, sigma, limit):
                self.narrow = (
                    f"the held-out score falls since round {self.zero[index]} on a few shares alone "
                    f"({', '.join(map(str, breadth.most(index)))}), which does not halt: look at the replicas that "
                    "score them"
                )
            elif fall > limit:
                what = (
                    f"the held-out score is below its best level since round {self.zero[index]}, by {below:.1f} sigmas "
                    f"in the last round (statistic {fall:.1f} of {limit:g})"
                )
                alarms.append(Alarm(what, self.zero[index], ADVICE, AlarmKind.FALL))
        return alarms

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, value, threshold) of both statistics, as the guard's verdict lists them."""
        rows = zip(_NAMES, self.falls, CUSUMS, strict=True)
        return [(name, fall, share * threshold) for name, fall, (_, share) in rows]


def in_sigmas(value: float, sigma: float) -> float:
    """`value` in units of `sigma`; 0.0 if the noise is not known."""
    return value / sigma if sigma > 0 else 0.0


def clipped(sigmas: float) -> float:
    """The number of standard deviations that one round adds to a statistic, before its slack is subtracted.

    `sigmas`: standard deviations of the noise by which the score is off, limited to ±`CLIP`.
    """
    return min(max(sigmas, -CLIP), CLIP)


# -- Hacking Gap

OF_THE_HELD_GAIN = 0.25  # of what held-out has gained: a gap this size is no reason to halt


@dataclass
class HackingGap(Remembered):
    """A CUSUM of the gain of the training metric over that of the held-out score since this last improved.

    Each round adds, in standard deviations of the noise, by how much that gain is above the allowed gap.
    """

    statistic: float = 0.0
    zero: int = 0  # the last model at which it was zero
    # Held-out level, training level and last model of the block in which held-out improved last.
    reference: list[Any] | None = None
    training: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum and count in the block that is being filled

    def begin(self, model: int) -> None:
        """Set the statistic to zero at the base of round `model`; the reference (last best block of rounds) stays."""
        self.statistic, self.zero = 0.0, model

    def judge(
        self, model: int, held: float, trained: float, sigma: float, allowed: float, weight: float, threshold: float
    ) -> list[Alarm]:
        """Add the gap of the base of round `model` to the statistic; returns a list of one alarm if it is above
        `threshold`.

        `held`, `trained`: held-out score and training metric, less their first values. `sigma`: noise of the score.
        `allowed`: gap, in the metric's unit, that does not count. `weight`: fraction of the held-out items scored.
        Empty before the first reference.
        """
        if self.reference is None:
            return []
        held_level, trained_level, since = self.reference
        gap = (trained - trained_level) - (held - held_level)
        above = in_sigmas(gap - allowed, sigma)
        self.statistic = max(0.0, self.statistic + weight * (clipped(above) - CUSUMS[0][0]))
        if self.statistic == 0.0:
            self.zero = model
        if self.statistic <= threshold:
            return []
        what = (
            f"Hacking Gap: the training metric gained {in_sigmas(gap, sigma):.1f} sigmas on the held-out score, which "
            f"has not improved since round {since}; beyond what noise explains since round {self.zero} (statistic "
            f"{self.statistic:.1f} of {threshold:g})"
        )
        advice = "look for reward hacking or memorisation there; check the reward"
        return [Alarm(what, self.zero, advice, AlarmKind.GAP)]

    def learn(self, trained: float) -> None:
        """Add `trained`, the training metric of the next round, to the mean of the current block of rounds."""
        self.training = [self.training[0] + trained, self.training[1] + 1]

    def end_block(self, model: int, held: float, least: float) -> None:
        """End a block of rounds with mean held-out score `held`, which becomes the reference of gaps if it improved
        enough.

        Enough is more than `least` above the reference before. A new reference sets the statistic to zero.
        """
        total, count = self.training
        if count and (self.reference is None or held - self.reference[0] > least):
            self.reference, self.statistic = [held, total / count, model], 0.0
        self.training = [0.0, 0.0]


# -- sudden fall

TIMES = 8.0  # the largest recent change of either metric between two rounds
FADES = 0.9  # of the largest change with each new score: the first rounds of a run change most, and say little later
SUDDEN_ROUNDS = 2  # in a row
FROM = 6  # rounds before it is judged
QUARTET = 4  # rounds in the level that it is measured from


@dataclass
class SuddenFall(Remembered):
    """Statistic: the number of rounds in a row with a held-out score far below its best four-round mean."""

    largest: float = 0.0  # recent change of either metric between two rounds
    strikes: int = 0  # rounds in a row with a sudden fall
    last_trained: float | None = None
    quartet: list[Any] = field(default_factory=lambda: [0.0, 0, None, 0])  # sum, count, best mean, its last model
    at_best: int = 0  # the last model not below the best level by more than one usual change

    def begin(self, model: int) -> None:
        """Count rounds anew from the base of round `model`; the size of usual changes stays."""
        self.quartet, self.strikes, self.at_best = [0.0, 0, None, 0], 0, model

    def judge(self, model: int, held: float, last: Sequence[float]) -> list[Alarm]:
        """A list of one alarm in the second round in a row with a held-out score far below its best, else empty.

        `held`: score of the base of round `model`. `last`: the scores before it, oldest first, at most 32; too few give
        no alarm.
        """
        best, best_model = self.quartet[2], self.quartet[3]
        if best is None or best - held <= self.largest:
            self.at_best = model
        if len(last) < FROM or best is None:
            return []
        self.strikes = self.strikes + 1 if best - held > TIMES * self.largest > 0 else 0
        if self.strikes < SUDDEN_ROUNDS:
            return []
        times = f"{(best - held) / self.largest:.0f} times"
        what = f"the held-out score fell below its level of round {best_model} by {times} the largest recent change"
        # A change that was the largest once, and has faded, may have let a fallen model pass for one at the best level.
        ago = model - self.at_best
        fallen = 0 < ago <= len(last) and best - last[-ago] > TIMES * self.largest
        advice = "look for a loss spike or bad data there, or lower the learning rate"
        return [Alarm(what, best_model if fallen else self.at_best, advice, AlarmKind.FALL)]

    def learn(self, model: int, held: float, trained: float | None, last: Sequence[float]) -> None:
        """Add the scores of the base of round `model`. `last`: held-out scores before it, oldest first, at most 32."""
        if last and not self.strikes:  # a fall must not set the scale that it is judged by
            change = abs(held - last[-1])
            self.largest = max(FADES * self.largest if change else self.largest, change)
            if trained is not None and self.last_trained is not None:
                self.largest = max(self.largest, abs(trained - self.last_trained))
        self.last_trained = trained
        total, count, best, at = self.quartet
        total, count = total + held, count + 1
        if count == QUARTET:
            if best is None or total / count > best:
                best, at = total / count, model
            total, count = 0.0, 0
        self.quartet = [total, count, best, at]


# -- all of it

FIRST_JUDGED = 18  # rounds after which noise is known well enough for statistics to add up
IMPROVED = 3.5  # standard errors by which a block of held-out scores must beat the reference to become it


class _NewLow(NewLow):
    """`NewLow` of the rule "sequential-v1": scores between the groups that belong to neither are not compared."""

    def _joined(self, last: Sequence[float], place: int, lowest: float) -> tuple[int, float]:
        while place > 0 and last[place - 1] < lowest:
            place -= 1
        return place, lowest


@dataclass
class MetricChannels(RememberedTogether):
    """All statistics of the rule "sequential-v1". Values are relative to the first round's: adding a constant changes
    no verdict.
    """

    noise: Noise = field(default_factory=Noise)  # of the held-out score
    gap_noise: Noise = field(default_factory=Noise)  # of the training metric minus it
    best: BestLevel = field(default_factory=BestLevel)
    falls: Drawdown = field(default_factory=Drawdown)
    gap: HackingGap = field(default_factory=HackingGap)
    sudden: SuddenFall = field(default_factory=SuddenFall)
    early: CollapseFromFirst = field(default_factory=CollapseFromFirst)
    new_low: _NewLow = field(default_factory=_NewLow)
    breadth: Breadth = field(default_factory=Breadth)

    # -- one model -----------------------------------------------------------------------------------------------

    def judge(
        self,
        model: int,
        heldout: float,
        in_loop: float | None,
        weight: float,
        threshold: float,
        tolerance: float,
        gains: Mapping[str, float],
    ) -> tuple[list[Alarm], list[Alarm]]:
        """Judge the scores of the base of round `model`, and add them to every statistic.

        `weight`: fraction of the held-out items that were scored. `threshold`: value of the slow fall statistic above
        which it halts. `tolerance`: gap, in sigmas, of training metric to held-out score that does not halt. `gains`:
        by share of the held-out set, its score's gain since the start; empty if not known. Returns (alarms that may
        fire in any round, alarms that may fire after warm-up).
        """
        if self.count == 0:
            self.falls.begin(model)
            self.gap.begin(model)
        held = self.since_the_first(0, heldout)
        trained = None if in_loop is None else self.since_the_first(1, in_loop)
        self.breadth.begin_round(gains)
        at_once, slow = self.sudden.judge(model, held, self.noise.last), []
        if self.count >= FIRST_JUDGED:
            sigma = self.noise.sigma(held)
            below = self.best.level(sigma) - held
            slow = self.falls.judge(model, below, sigma, weight, threshold, self.breadth)
            if trained is not None:
                sigma = self.gap_noise.sigma(trained - held)
                allowed = max(tolerance * sigma, OF_THE_HELD_GAIN * self.best.gain())
                slow += self.gap.judge(model, held, trained, sigma, allowed, weight, threshold)
        self._learn(model, held, trained)
        at_once += self.early.alarms(self.noise.last)
        return at_once + self.new_low.alarms(self.noise.last, trained or 0.0), slow

    def dismiss(self, model: int) -> None:
        """Restart the statistics at the base of round `model` after a dismissed alarm; noise and levels stay."""
        self.falls.begin(model)
        self.breadth.dismiss()
        self.gap.begin(model)
        self.sudden.begin(model)
        self.early.stop()
        self.new_low = _NewLow()

    def _learn(self, model: int, held: float, trained: float | None) -> None:
        self.sudden.learn(model, held, trained, self.noise.last)
        self.count += 1
        self.early.learn(model, trained)
        if self.count > ROUNDS:
            self.early.stop()
        self.breadth.learn(calm=self.falls.falls[0] == 0.0)
        self.noise.add(held)
        self.new_low.learn(model, self.noise.last)
        if trained is not None:
            self.gap_noise.add(trained - held)
            self.gap.learn(trained)
        mean = self.best.add(held)
        if mean is not None:
            self.gap.end_block(model, mean, IMPROVED * self.noise.sigma(held) * math.sqrt(2 / BLOCKS[0]))

    # -- reading -------------------------------------------------------------------------------------------------

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, value, threshold) of each statistic, as the guard's verdict lists them."""
        early = self.early.fall(self.noise.last)
        low = self.new_low.fall(self.noise.last, self.sudden.last_trained or 0.0)
        return [
            *self.falls.statistics(threshold),
            ("Hacking Gap", self.gap.statistic, threshold),
            ("sudden fall", float(self.sudden.strikes), SUDDEN_ROUNDS),
            ("early collapse", early.share if early else 0.0, 1.0),
            ("new low", low.share if low else 0.0, 1.0),
        ]

    @property
    def sigma(self) -> float:
        """The long-run standard deviation of the held-out score. Before the first score: 0.0."""
        return self.noise.sigma(self.noise.last[-1]) if self.noise.last else 0.0

    def compare(self, trained: Mapping[int, float]) -> None:
        """Does nothing: only later guard rules compare replicas."""

    @property
    def warning(self) -> str:
        """A sentence about a fall that only few shares of the held-out set show, so that it does not count; or ""."""
        return self.falls.narrow

    @property
    def best_model(self) -> None:
        """None: in this rule the run resumes from the base that an alarm itself names."""

    def outlook(self, threshold: float) -> str:
        """Empty: only later guard rules say what they can judge by now."""
        return ""


class SequentialV1(SequentialGuard):
    """The guard rule "sequential-v1", by which runs are judged that began with it."""

    name: ClassVar[str] = "sequential-v1"
    vault_share: ClassVar[float] = 0.0
    channels = MetricChannels  # type: ignore[assignment]

    @classmethod
    def of(cls, config: GuardConfig, heldout: HeldoutSet) -> Self:
        return replace(super().of(config, heldout), gap_sigmas=config.gap_sigmas)
