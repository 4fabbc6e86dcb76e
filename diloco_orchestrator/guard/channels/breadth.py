"""`Breadth`: whether a fall of the held-out score is visible on most of its shares, or on a few that may be
misreported.

A share that is reported too low from some round on pulls the mean down, however little per round. So each share's part
of a fall is summed beside the statistic, and the statistic counts only as far as it remains without the quarter of the
shares that fell most.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_orchestrator.guard.channels.remembered import Remembered, added

_MEMORY = 32  # rounds over which a share's usual distance from the mean is known
_LIARS = 4  # one share of so many may be wrong
# Shares of the threshold that must remain without the shares that fell most. The first is enough for honest shares. By
# simulation it makes shares that rise on purpose hide a slow fall for more than twice as long; so with them counted
# as the next lowest, a larger rest is enough as well.
_WITHOUT_LOWEST = 0.85
_WITHOUT_EXTREMES = 2.2


@dataclass
class Breadth(Remembered):
    """Each share's part in each of two statistics. State: 1 number per share, and 1 per share and statistic."""

    count: int = 0  # rounds learnt
    usual: dict[str, float] = field(default_factory=dict)  # by share: distance from the mean, in the metric's unit
    parts: list[dict[str, float]] = field(default_factory=lambda: [{}, {}])  # by share: fell more than the mean
    now: dict[str, float] = field(default_factory=dict, init=False)  # this round's distances from the mean

    def begin_round(self, gains: Mapping[str, float]) -> None:
        """Set the round's gain of each scored share; empty if unknown."""
        mean = added([gains[share] for share in sorted(gains)]) / len(gains) if gains else 0.0
        self.now = {share: gains[share] - mean for share in sorted(gains)}

    def add(self, index: int, *, zero: bool) -> None:
        """Add the round to the parts in statistic `index`. `zero`: the statistic is zero now, so parts restart."""
        parts = self.parts[index]
        if zero:
            parts.clear()
            return
        for share, distance in self.now.items():
            parts[share] = parts.get(share, 0.0) - (distance - self.usual.get(share, distance))

    def dismiss(self) -> None:
        """Restart all parts at zero."""
        self.parts = [{} for _ in self.parts]

    def is_broad(self, index: int, statistic: float, sigma: float, threshold: float) -> bool:
        """Whether a statistic stays above `threshold` without the quarter of the shares that carries most of it."""
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
        """The quarter of the shares that carries most of a statistic."""
        parts = self.parts[index]
        return sorted(int(share) for share in sorted(parts, key=lambda s: -parts[s])[: len(parts) // _LIARS])

    def learn(self, *, calm: bool) -> None:
        """Update each share's usual distance from the mean. `calm`: no statistic indicates a falling score."""
        self.count += 1
        weight = max(1 / self.count, 1 / _MEMORY)
        for share, distance in self.now.items():
            usual = self.usual.get(share)
            if usual is None:
                self.usual[share] = distance
            elif calm:
                self.usual[share] = usual + weight * (distance - usual)
