"""`KLChannel`: judges the drift from the run's start: its level against a budget, and a rise that outruns its past."""

import math
from collections.abc import Sequence
from typing import Any, Self

_WINDOW = 4  # rounds in a mean
_AT_ONCE = 5.0  # times the budget: halts in any round
_FASTER = 4.0  # times the average rise since the start
_SIGMAS = 5.0
_AHEAD = 2.0  # windows


class KLChannel:
    """Drift in nats per token, round after round. State: 12 numbers."""

    def __init__(self) -> None:
        self._last: list[float] = []  # 8 values, oldest first
        self._count = 0
        self._square = 0.0  # mean square of second differences, in units of one value's variance
        self._clean: int | None = None  # the last model whose window was within half of the budget

    def judge(self, kl: float, model: int, budget: float, warm_up: int) -> str:
        """Learn the drift of a model; returns what is wrong with it, empty if nothing is."""
        if len(self._last) >= 2:
            bend = (kl - self._last[-1]) - (self._last[-1] - self._last[-2])
            self._square += (bend * bend / 6 - self._square) / (self._count - 1)
        self._last = [*self._last, kl][-2 * _WINDOW :]
        self._count += 1
        level = _mean(self._last[-_WINDOW:])
        if level <= budget / 2:
            self._clean = model
        if kl > _AT_ONCE * budget:
            return f"kl_to_init {kl:.3g} is above {_AT_ONCE:g} times its budget of {budget:g} nats per token"
        if self._count < max(warm_up, 2 * _WINDOW):
            return ""
        if level > budget:
            return f"kl_to_init {level:.3g} (mean of {_WINDOW} rounds) is above its budget of {budget:g} nats per token"
        past = _mean(self._last[:_WINDOW])
        rise, usual = level - past, _WINDOW * past / (self._count - _WINDOW)
        noise = math.sqrt(2 * self._square / _WINDOW)
        if rise > _FASTER * usual and rise > _SIGMAS * noise and level + _AHEAD * rise > budget:
            times = f"{rise / usual:.0f} times" if usual > 0 else "far more than"
            return (
                f"kl_to_init rises {times} its usual rate and would pass its budget of {budget:g} nats per token "
                f"within {_AHEAD * _WINDOW:.0f} rounds"
            )
        return ""

    @property
    def level(self) -> float | None:
        """The mean drift of the last rounds in nats per token; None before the first."""
        return _mean(self._last[-_WINDOW:]) if self._last else None

    @property
    def clean(self) -> int | None:
        """The last model whose drift was within half of the budget; None if there was none."""
        return self._clean

    def state(self) -> list[Any]:
        return [self._last, self._count, self._square, self._clean]

    @classmethod
    def restore(cls, state: Sequence[Any]) -> Self:
        channel = cls()
        last, channel._count, channel._square, channel._clean = state
        channel._last = list(last)
        return channel


def _mean(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:  # `sum` rounds differently from Python 3.12 on
        total += value
    return total / len(values)
