"""`HackingGap`: detects that the training metric improves while the held-out score does not."""

from dataclasses import dataclass, field
from typing import Any

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.drawdown import CUSUMS, clipped, in_sigmas
from diloco_orchestrator.guard.channels.remembered import Remembered

OF_THE_GAIN = 0.25  # of what held-out has gained: a gap this size is no reason to halt


@dataclass
class HackingGap(Remembered):
    """Cumulative sum of the sigmas by which training gained more than held-out since held-out improved last."""

    statistic: float = 0.0
    zero: int = 0  # the last model at which it was zero
    # Held-out level, training level and last model of the block in which held-out improved last.
    reference: list[Any] | None = None
    training: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum and count in the block that is being filled

    def begin(self, model: int) -> None:
        """Restart the statistic at zero from this model; the reference level stays."""
        self.statistic, self.zero = 0.0, model

    def judge(
        self, model: int, held: float, trained: float, sigma: float, allowed: float, weight: float, threshold: float
    ) -> list[Alarm]:
        """The alarms after the next model. `allowed`: the gap that causes no halt, in the metric's unit."""
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
        """Add the next value of the training metric."""
        self.training = [self.training[0] + trained, self.training[1] + 1]

    def end_block(self, model: int, held: float, least: float) -> None:
        """Finish a block of held-out scores with mean `held`; it becomes the reference if it improved by `least`."""
        total, count = self.training
        if count and (self.reference is None or held - self.reference[0] > least):
            self.reference, self.statistic = [held, total / count, model], 0.0
        self.training = [0.0, 0.0]
