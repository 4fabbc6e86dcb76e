"""`SequentialV2`: the rule "sequential-v2", by which runs that began before "sequential-v3" go on to be judged.

Frozen: its states and verdicts keep their bytes (golden digests), since commits of those runs are derived again by it.
It differs from `SequentialV3` in two channels: the autocorrelation of the noise comes from what is left of scores
without their line, also where a climb bends, and counts as .55 until then; and steps down are compared up to 20 rounds
after them, in any round of the run, with one threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from diloco_orchestrator.guard.channels.alarm import Alarm, Shown
from diloco_orchestrator.guard.channels.metrics import MetricChannels
from diloco_orchestrator.guard.channels.noise import KEPT, Noise, clipped
from diloco_orchestrator.guard.channels.remembered import Remembered, added
from diloco_orchestrator.guard.channels.step_down import BEFORE, Found, changed, compared, step_alarm
from diloco_orchestrator.guard.sequential import SequentialGuard
from diloco_orchestrator.guard.sequential_v3 import SteadyNoise, V3Channels

_SINCE = (5, 8, 12, 20)  # rounds since a step
_LIMIT = 1.2  # log-likelihood ratio that halts, in nats, over the setting `threshold`
_PRIOR = (12.0, 0.55)  # windows that the first guess of the autocorrelation counts as, and that guess
_LOST = 4.8  # times 1 / values: what a line takes from the correlation of what is left


@dataclass
class LineNoise(SteadyNoise):
    """`Noise` whose autocorrelation comes from what is left of the last 24 values without their straight line."""

    windows: list[float] = field(default_factory=lambda: [_PRIOR[0] * _PRIOR[1], _PRIOR[0]])

    def _learn_correlation(self, values: Sequence[float]) -> None:
        count, left = len(values), clipped(_without_line(values))
        square = added([each * each for each in left])
        self._forget()
        if self._knows(square, count):
            neighbours = added([one * other for one, other in pairwise(left)])
            self.windows = [self.windows[0] + neighbours / square + _LOST / count, self.windows[1] + 1.0]


def _without_line(values: Sequence[float]) -> list[float]:
    """Distances of values from their least-squares line."""
    count = len(values)
    mean = added(values) / count
    places = [index - (count - 1) / 2 for index in range(count)]
    slope = added([place * (value - mean) for place, value in zip(places, values, strict=True)])
    slope /= count * (count * count - 1) / 12
    return [(value - mean) - slope * place for place, value in zip(places, values, strict=True)]


@dataclass
class ShortStepDown(Remembered):
    """Compares the last 32 rounds with and without a step down. State: 1 number."""

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
        shown: Shown,
    ) -> list[Alarm]:
        """Judge the score of the base that round `model` made, as `StepDown.judge` does."""
        self.seen = min(self.seen + 1, KEPT)
        scores = changed(scores[-self.seen :])
        self.found = None if recovers else _best(scores, coarse, lost)
        if self.found is None or self.found.evidence <= _LIMIT * threshold:
            return []
        return [step_alarm(model, self.found, scores, _LIMIT * threshold, shown)]

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, value, threshold) of the log-likelihood ratio, as the verdict lists it."""
        return [("step down", self.found.evidence if self.found else 0.0, _LIMIT * threshold)]


def _best(scores: Sequence[float], coarse: float, lost: float) -> Found | None:
    """The step with the largest likelihood ratio; None if there are too few scores, or nothing steps down."""
    best: Found | None = None
    for since in _SINCE:
        before = min(BEFORE[1], len(scores) - since)
        if before < BEFORE[0]:
            break
        values = [*scores[-before - since : -since], *(score + lost for score in scores[-since:])]
        found = compared(values, before, coarse)
        if found is not None and found.evidence > (best.evidence if best else 0.0):
            best = found
    return best


@dataclass
class V2Channels(V3Channels):
    """The statistics of the guard rule "sequential-v2" about held-out score and training metric."""

    noise: Noise = field(default_factory=LineNoise)
    gap_noise: Noise = field(default_factory=LineNoise)
    step_down: ShortStepDown = field(default_factory=ShortStepDown)  # type: ignore[assignment]


class SequentialV2(SequentialGuard):
    """The guard rule "sequential-v2", by which runs are judged that began with it."""

    name: ClassVar[str] = "sequential-v2"
    channels: ClassVar[type[MetricChannels]] = V2Channels
