"""`MetricChannels`: the statistics of `SequentialGuard` over held-out score and training metric.

Five: a sustained drawdown of the held-out score, the Hacking Gap, a sudden fall, an early collapse, and a new low. All
are in units of the metrics' own variation, so they do not depend on the metrics' unit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from diloco_orchestrator.guard.channels.alarm import Alarm
from diloco_orchestrator.guard.channels.breadth import Breadth
from diloco_orchestrator.guard.channels.drawdown import BLOCKS, BestLevel, Drawdown
from diloco_orchestrator.guard.channels.early import ROUNDS, EarlyCollapse, NewLow
from diloco_orchestrator.guard.channels.hacking_gap import OF_THE_GAIN, HackingGap
from diloco_orchestrator.guard.channels.noise import Noise
from diloco_orchestrator.guard.channels.remembered import Remembered
from diloco_orchestrator.guard.channels.sudden import ROUNDS as SUDDEN_ROUNDS
from diloco_orchestrator.guard.channels.sudden import SuddenFall

FIRST_JUDGED = 18  # rounds after which noise is known well enough for statistics to add up
IMPROVED = 3.5  # standard errors by which a block of held-out scores must beat the reference to become it


@dataclass
class MetricChannels:
    """The statistics so far. Values are kept relative to the first ones, so a constant shift changes nothing."""

    count: int = 0  # models judged
    origin: list[float | None] = field(default_factory=lambda: [None, None])  # first held-out score, training metric
    noise: Noise = field(default_factory=Noise)  # of the held-out score
    gap_noise: Noise = field(default_factory=Noise)  # of the training metric minus it
    best: BestLevel = field(default_factory=BestLevel)
    falls: Drawdown = field(default_factory=Drawdown)
    gap: HackingGap = field(default_factory=HackingGap)
    sudden: SuddenFall = field(default_factory=SuddenFall)
    early: EarlyCollapse = field(default_factory=EarlyCollapse)
    new_low: NewLow = field(default_factory=NewLow)
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
        """Add the next model; returns (alarms that may fire in any round, alarms that may fire after warm-up).

        `weight`: share of the held-out items that were scored. `threshold`: of the slow drawdown statistic.
        `tolerance`: gap in sigmas that causes no halt. `gains`: of each share, empty if unknown.
        """
        if self.count == 0:
            self.falls.begin(model)
            self.gap.begin(model)
        held = self._since_the_first(0, heldout)
        trained = None if in_loop is None else self._since_the_first(1, in_loop)
        self.breadth.begin_round(gains)
        at_once, slow = self.sudden.judge(model, held, self.noise.last), []
        if self.count >= FIRST_JUDGED:
            sigma = self.noise.sigma(held)
            below = self.best.level(sigma) - held
            slow = self.falls.judge(model, below, sigma, weight, threshold, self.breadth)
            if trained is not None:
                sigma = self.gap_noise.sigma(trained - held)
                allowed = max(tolerance * sigma, OF_THE_GAIN * self.best.gain())
                slow += self.gap.judge(model, held, trained, sigma, allowed, weight, threshold)
        self._learn(model, held, trained)
        at_once += self.early.alarms(self.noise.last)
        return at_once + self.new_low.alarms(self.noise.last, trained or 0.0), slow

    def dismiss(self, model: int) -> None:
        """Restart the statistics at zero from this model, because an alarm was not confirmed; noise and levels stay."""
        self.falls.begin(model)
        self.breadth.dismiss()
        self.gap.begin(model)
        self.sudden.begin(model)
        self.early.stop()
        self.new_low = NewLow()

    def _since_the_first(self, which: int, value: float) -> float:
        first = self.origin[which]
        if first is None:
            first = self.origin[which] = value
        return value - first

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
        """(name, value, threshold) of each statistic."""
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
        """The long-run standard deviation of the held-out score; 0.0 before the first score."""
        return self.noise.sigma(self.noise.last[-1]) if self.noise.last else 0.0

    def gained_apart(self, heldout: float, in_loop: float) -> float:
        """Gain of the training metric minus gain of the held-out score since the first model."""
        held, trained = self.origin
        return 0.0 if held is None or trained is None else (in_loop - trained) - (heldout - held)

    def state(self) -> dict[str, Any]:
        """The fields by name, as JSON. It shares its lists with this object."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: part.state() if isinstance(part, Remembered) else part for name, part in parts.items()}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """The statistics in `state`, whose lists they will change."""
        made = cls()
        for each in fields(cls):
            part, kept = getattr(made, each.name), state[each.name]
            setattr(made, each.name, part.restore(kept) if isinstance(part, Remembered) else kept)
        return made
