"""`KLChannel`: compares the KL drift from the run's start with a budget, and detects an unusually fast rise of it."""

import math
from dataclasses import dataclass, field

from diloco_orchestrator.guard.channels.remembered import Remembered, added

_WINDOW = 4  # rounds in a mean
_AT_ONCE = 5.0  # times the budget: halts in any round
_FASTER = 4.0  # times the average rise since the start
_SIGMAS = 5.0
_AHEAD = 2.0  # windows


@dataclass
class KLChannel(Remembered):
    """Guard statistic of the model's KL divergence from the start in nats per token. Stored state: 12 numbers."""

    last: list[float] = field(default_factory=list)  # 8 values, oldest first
    count: int = 0
    square: float = 0.0  # mean square of second differences, in units of one value's variance
    clean: int | None = None  # the last model whose mean drift was within half of the budget; None if there was none

    def judge(self, kl: float, model: int, budget: float, warm_up: int) -> str:
        """Add `kl`, the KL divergence from the run's start of the base of round `model`; returns why it halts, or "".

        It halts if `kl` is above `_AT_ONCE` times `budget` (nats per token), or, after `warm_up` measurements (8 at
        least), if the mean of the last rounds is above `budget` or rises so fast that it soon will be.
        """
        if len(self.last) >= 2:
            bend = (kl - self.last[-1]) - (self.last[-1] - self.last[-2])
            self.square += (bend * bend / 6 - self.square) / (self.count - 1)
        self.last = [*self.last, kl][-2 * _WINDOW :]
        self.count += 1
        level = _mean(self.last[-_WINDOW:])
        if level <= budget / 2:
            self.clean = model
        if kl > _AT_ONCE * budget:
            return f"kl_to_init {kl:.3g} is above {_AT_ONCE:g} times its budget of {budget:g} nats per token"
        if self.count < max(warm_up, 2 * _WINDOW):
            return ""
        if level > budget:
            return f"kl_to_init {level:.3g} (mean of {_WINDOW} rounds) is above its budget of {budget:g} nats per token"
        past = _mean(self.last[:_WINDOW])
        rise, usual = level - past, _WINDOW * past / (self.count - _WINDOW)
        noise = math.sqrt(2 * self.square / _WINDOW)
        if rise > _FASTER * usual and rise > _SIGMAS * noise and level + _AHEAD * rise > budget:
            times = f"{rise / usual:.0f} times" if usual > 0 else "far more than"
            return (
                f"kl_to_init rises {times} its usual rate and would pass its budget of {budget:g} nats per token "
                f"within {_AHEAD * _WINDOW:.0f} rounds"
            )
        return ""

    @property
    def level(self) -> float | None:
        """The mean KL divergence of the last rounds from the run's start in nats per token; None before the first."""
        return _mean(self.last[-_WINDOW:]) if self.last else None


def _mean(values: list[float]) -> float:
    return added(values) / len(values)
