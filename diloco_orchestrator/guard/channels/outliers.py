"""`FallingShares`: which shares of the held-out set fall while the others do not, so that they alone cause no halt.

A share that is reported too low from some round on lowers the mean, however little it is off in each round. A quarter
of the shares may be wrong: where that many or fewer drift down from their usual distance to the mean of all, a fall
counts without what they lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from diloco_orchestrator.guard.channels.remembered import Remembered, added

_MEMORY = 128  # rounds in which a share's usual distance from the mean is learnt: slow drifts are none
_NEW = 0.1  # weight of a round in a share's drift, and in the spread
_LIARS = 4  # one share of so many may be wrong
# Spreads of one round by which a share must have drifted for a fall to count without it, and to be named. Under AR(1)
# .5 noise the drift of an honest share varies by .55 of them. The first is low because it costs honest fleets little (a
# slow hack is halted 3 rounds later), and lies of two replicas of eight then halt less than once in 1000 rounds.
_DRIFTED, _NAMED = 0.9, 1.7


@dataclass
class FallingShares(Remembered):
    """The drift of each held-out share's score from its usual distance to the mean of all shares.

    Stored state: 2 numbers per share, and 2.
    """

    count: int = 0  # rounds learnt
    spread: float = 0.0  # median distance of a share from its usual one in a round
    usual: dict[str, float] = field(default_factory=dict)  # by share: distance from the mean of all
    drift: dict[str, float] = field(
        default_factory=dict
    )  # by share: mean of what it is above that, over some 10 rounds

    def judge(self, gains: Mapping[str, float]) -> tuple[list[int], float]:
        """Add a round's score gains since the start, by share of the held-out set.

        Returns the shares, at most a quarter, that have moved far down from their usual distance to the mean of all,
        and by how much those that have moved down at all lower the mean. Without `gains`: ([], 0.0).
        """
        shares = sorted(gains)
        if not shares:
            return [], 0.0
        mean = added([gains[share] for share in shares]) / len(shares)
        above = {share: (gains[share] - mean) - self.usual.get(share, gains[share] - mean) for share in shares}
        self.count += 1
        self.spread += max(1 / self.count, _NEW) * (median([abs(above[share]) for share in shares]) - self.spread)
        for share in shares:
            self.drift[share] = (1 - _NEW) * self.drift.get(share, 0.0) + _NEW * above[share]
        lowest = sorted(shares, key=lambda share: (self.drift[share], share))[: len(shares) // _LIARS]
        fallen = [share for share in lowest if self.drift[share] < -_DRIFTED * self.spread]
        for share in shares:
            if share not in fallen:  # a fall must not become usual
                known = self.usual.get(share, gains[share] - mean)
                self.usual[share] = known + max(1 / self.count, 1 / _MEMORY) * above[share]
        lost = added([max(0.0, -above[share]) for share in fallen])
        named = sorted(int(share) for share in fallen if self.drift[share] < -_NAMED * self.spread)
        return named, lost / (len(shares) - len(fallen))
