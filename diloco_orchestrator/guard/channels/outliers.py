"""`FallingShares`: which shares of the held-out set differ from the others, so that they cause no halt and hide none.

A share that is reported too low from some round on lowers the mean, however little it is off in each round. A quarter
of the shares may be wrong: where that many or fewer drift down from their usual distance to the mean of all, a fall
counts without what they lost. Another quarter at most, that drift up or vary far more than the others, are left out of
the mean, which would hide a fall.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

from diloco_orchestrator.guard.channels.remembered import Remembered, added

_MEMORY = 128  # rounds in which a share's usual distance from the mean is learnt: slow drifts are none
_SETTLED = 20  # rounds before a share's mean counts as its best
_NEW = 0.1  # weight of a round in a share's drift, and in the spread
_LIARS = 4  # one share of so many may be wrong
# Spreads of one round by which a share must have drifted for a fall to count without it: few, because that costs honest
# fleets little (a slow hack is halted 3 rounds later), and lies of two replicas of eight then halt less than once in
# 1000 rounds. Under AR(1) .5 noise the drift of an honest share varies by .55 of them.
_DRIFTED = 0.9
# A share that is named has drifted this many of its own mean distances, and fallen that many below its best: chosen on
# simulated fleets, whose honest shares hardly ever do under AR(1) .5 noise.
NAMED, _WORSE = 1.7, 5.0
# Spreads of one round by which a share must have drifted up, or be away from its usual distance in the mean of some 10
# rounds without its drift, to be left out: an honest share by .8 of them.
_RISEN, _WILD = 1.2, 1.3


@dataclass
class FallingShares(Remembered):
    """The drift of each held-out share's score from its usual distance to the mean of all shares.

    Stored state: 6 numbers per share, and 2.
    """

    LEAVES_OUT: ClassVar[bool] = True  # whether shares can be left out of the mean

    count: int = 0  # rounds learnt
    spread: float = 0.0  # median distance of a share from its usual one in a round
    usual: dict[str, float] = field(default_factory=dict)  # by share: distance from the mean of all
    drift: dict[str, float] = field(
        default_factory=dict
    )  # by share: mean of what it is above that, over some 10 rounds
    away: dict[str, float] = field(default_factory=dict)  # by share: mean of its size
    best: dict[str, float] = field(default_factory=dict)  # by share: its largest gain, as a mean of some 10 rounds
    size: dict[str, float] = field(default_factory=dict)  # by share: mean distance from its usual one in a round
    now: dict[str, float] = field(default_factory=dict)  # by share: its gain in the mean of some 10 rounds

    def judge(self, gains: Mapping[str, float]) -> tuple[list[int], float, float]:
        """Add a round's score gains since the start, by share of the held-out set.

        Returns the shares, at most a quarter, that have moved far down from their usual distance to the mean of all and
        are far below their own best; by how much those that have moved down at all lower the mean; and what is to be
        added to the mean for those that are left out of it. Without `gains`: ([], 0.0, 0.0).
        """
        shares = sorted(gains)
        if not shares:
            return [], 0.0, 0.0
        mean = added([gains[share] for share in shares]) / len(shares)
        above = {share: (gains[share] - mean) - self.usual.get(share, gains[share] - mean) for share in shares}
        self.count += 1
        self.spread += max(1 / self.count, _NEW) * (median([abs(above[share]) for share in shares]) - self.spread)
        for share in shares:
            self.drift[share] = (1 - _NEW) * self.drift.get(share, 0.0) + _NEW * above[share]
            away = self.away.get(share, 0.0)
            self.away[share] = away + max(1 / self.count, _NEW) * (abs(above[share]) - away)
            now = self.now.get(share, gains[share])
            self.now[share] = now + max(1 / self.count, _NEW) * (gains[share] - now)
            if self.count >= _SETTLED:
                self.best[share] = max(self.best.get(share, self.now[share]), self.now[share])
        left_out = self._left_out(shares)
        lowest = sorted(shares, key=lambda share: (self.drift[share], share))[: len(shares) // _LIARS]
        fallen = [share for share in lowest if self.drift[share] < -_DRIFTED * self.spread and share not in left_out]
        for share in shares:
            if share not in fallen and share not in left_out:  # a fall must not become usual
                known = self.usual.get(share, gains[share] - mean)
                weight, size = max(1 / self.count, 1 / _MEMORY), self.size.get(share, 0.0)
                self.usual[share] = known + weight * above[share]
                self.size[share] = size + weight * (abs(above[share]) - size)
        lost = added([max(0.0, -above[share]) for share in fallen])
        named = sorted(int(share) for share in fallen if self._is_worse(share))
        moved = -added([above[share] for share in left_out]) / (len(shares) - len(left_out)) if left_out else 0.0
        return named, lost / (len(shares) - len(fallen)), moved

    def _is_worse(self, share: str) -> bool:
        """Whether a share has fallen far for its own noise, and below its own best: one that gains less has not."""
        noise = max(self.size.get(share, 0.0), median(self.size.values()))
        best = self.best.get(share, self.now[share])
        return self.drift[share] < -NAMED * noise and self.now[share] < best - _WORSE * noise

    def _left_out(self, shares: Sequence[str]) -> list[str]:
        """The shares, at most a quarter, that have drifted up or vary far more than the others, the furthest first."""
        if not self.LEAVES_OUT or not self.spread > 0:
            return []
        far = {}
        for share in shares:
            drift, away = self.drift[share], self.away[share]
            far[share] = max(drift / (_RISEN * self.spread), (away - abs(drift)) / (_WILD * self.spread))
        furthest = sorted(shares, key=lambda share: (-far[share], share))[: len(shares) // _LIARS]
        return [share for share in furthest if far[share] > 1]
