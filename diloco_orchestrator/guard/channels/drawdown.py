"""`Drawdown`: a held-out score that stays below its best level, whatever the training metric does; `BestLevel`."""

import math
from dataclasses import dataclass, field

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.breadth import Breadth
from diloco_orchestrator.guard.channels.remembered import Remembered

BLOCKS = (8, 64)  # rounds: short blocks follow a rise, long ones know a plateau more exactly
# Slack in sigmas per round, and threshold as a share of the setting: slow drifts, fast falls (Page's CUSUM).
CUSUMS = ((0.25, 1.0), (0.6, 0.6))
CLIP = 3.5  # sigmas at most that one round can add: no single round halts
ADVICE = "look for reward hacking or divergence there, or lower the learning rate"
_NAMES = ("slow fall", "fast fall")


@dataclass
class BestLevel(Remembered):
    """The best level that a noisy series has reached with confidence, from means of full blocks. State: 10 numbers."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    best: list[float | None] = field(default_factory=lambda: [None, None])
    full: list[int] = field(default_factory=lambda: [0, 0])  # blocks so far
    count: int = 0
    first: float | None = None  # mean of the first short block

    def add(self, value: float) -> float | None:
        """Add the next value; returns the mean of the short block that it completes, else None."""
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
        """A lower confidence bound of the best level; 0.0 before the first full block.

        The bound widens with the number of blocks, because the best of more blocks is further above the mean by chance.
        """
        bounds = [
            best - math.sqrt(1.2 + 1.3 * (full.bit_length() - 1)) * sigma / math.sqrt(size)
            for best, full, size in zip(self.best, self.full, BLOCKS, strict=True)
            if best is not None
        ]
        return max(bounds, default=0.0)

    def gain(self) -> float:
        """The best short block's mean minus the first one's."""
        best = self.best[0]
        return 0.0 if best is None or self.first is None else best - self.first


@dataclass
class Drawdown(Remembered):
    """Two cumulative sums of how many sigmas the score is below its best level."""

    falls: list[float] = field(default_factory=lambda: [0.0, 0.0])
    zero: list[int] = field(default_factory=lambda: [0, 0])  # the last models at which they were zero
    narrow: str = field(default="", init=False)  # a fall that does not count in this round: only few shares fell

    def begin(self, model: int) -> None:
        """Restart both statistics at zero. `model`: round of the model from which they count."""
        self.falls, self.zero = [0.0, 0.0], [model, model]

    def judge(
        self, model: int, below: float, sigma: float, weight: float, threshold: float, breadth: Breadth
    ) -> list[Alarm]:
        """The alarms after the next model, whose score is `below` the best level (in the metric's unit)."""
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
        """(name, value, threshold) of both statistics."""
        rows = zip(_NAMES, self.falls, CUSUMS, strict=True)
        return [(name, fall, share * threshold) for name, fall, (_, share) in rows]


def in_sigmas(value: float, sigma: float) -> float:
    """`value` in units of `sigma`; 0.0 if the noise is not known."""
    return value / sigma if sigma > 0 else 0.0


def clipped(sigmas: float) -> float:
    """A round's contribution to a cumulative sum, clipped, before the slack is subtracted."""
    return min(max(sigmas, -CLIP), CLIP)
