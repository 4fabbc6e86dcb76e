"""`Breadth`: whether a fall of the held-out score is seen on most of its shares, or on a few whose word may be a lie.

A share that is reported too low from some round on adds up to a fall of the mean, however little it is off in each
round. So each share's part of a fall is added up beside the statistic, and a statistic counts only as far as it remains
without the quarter of the shares that fell most.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

_MEMORY = 32  # rounds over which a share's usual distance from the mean is known
_LIARS = 4  # one share of so many may be wrong
# Shares of the threshold that must remain without the shares that fell most. The first is enough for honest shares. By
# simulation it makes shares that rise on purpose hide a slow fall for more than twice as long; so with them counted
# as the next lowest, a larger rest is enough as well.
_WITHOUT_LOWEST = 0.85
_WITHOUT_EXTREMES = 2.2


class Breadth:
    """Each share's part in each of some statistics. State: 1 number per share, and 1 per share and statistic."""

    def __init__(self, statistics: int) -> None:
        self._count = 0  # rounds learnt
        self._usual: dict[str, float] = {}  # by share: distance from the mean of shares, in the metric's unit
        self._parts: list[dict[str, float]] = [{} for _ in range(statistics)]  # by share: fell more than the mean
        self._now: dict[str, float] = {}  # this round's distances from the mean

    def begin_round(self, gains: Mapping[str, float]) -> None:
        """Take a round's gain of each share that was scored; none if they are not known."""
        total = 0.0
        for share in sorted(gains):
            total += gains[share]
        mean = total / len(gains) if gains else 0.0
        self._now = {share: gains[share] - mean for share in sorted(gains)}

    def add(self, index: int, *, zero: bool) -> None:
        """Add the round to the parts in a statistic; `zero`: the statistic is zero after it, so that parts restart."""
        parts = self._parts[index]
        if zero:
            parts.clear()
            return
        for share, distance in self._now.items():
            parts[share] = parts.get(share, 0.0) - (distance - self._usual.get(share, distance))

    def dismiss(self) -> None:
        """Start all parts anew."""
        self._parts = [{} for _ in self._parts]

    def is_broad(self, index: int, statistic: float, sigma: float, threshold: float) -> bool:
        """Whether enough of a statistic above `threshold` remains without the shares that carry most of it."""
        parts = sorted(self._parts[index].values())
        few = len(parts) // _LIARS
        if not few or not sigma > 0:
            return True
        rest = parts[few:-few]
        among = (len(parts) - few) * sigma
        lowest = statistic - _added(parts[-few:]) / among
        extremes = statistic + (_added(rest) + few * rest[0]) / among
        return lowest > _WITHOUT_LOWEST * threshold or extremes > _WITHOUT_EXTREMES * threshold

    def most(self, index: int) -> list[int]:
        """The quarter of the shares that carries most of a statistic."""
        parts = self._parts[index]
        return sorted(int(share) for share in sorted(parts, key=lambda s: -parts[s])[: len(parts) // _LIARS])

    def learn(self, *, calm: bool) -> None:
        """Learn how far each share is from the mean. `calm`: no statistic says that the score falls."""
        self._count += 1
        weight = max(1 / self._count, 1 / _MEMORY)
        for share, distance in self._now.items():
            usual = self._usual.get(share)
            if usual is None:
                self._usual[share] = distance
            elif calm:
                self._usual[share] = usual + weight * (distance - usual)

    def state(self) -> list[Any]:
        return [self._count, self._usual, self._parts]

    @classmethod
    def restore(cls, state: Sequence[Any]) -> Self:
        breadth = cls(len(state[2]))
        breadth._count, breadth._usual = state[0], dict(state[1])
        breadth._parts = [dict(parts) for parts in state[2]]
        return breadth


def _added(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:  # `sum` rounds differently from Python 3.12 on
        total += value
    return total
