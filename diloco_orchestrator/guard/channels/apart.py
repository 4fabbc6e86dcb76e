"""`Apart`: a guard statistic that finds one replica whose training metric is far from all others', round after round.

It warns and halts nothing. The mean over replicas hides such a replica: one of four that trains on garbage costs the
model a quarter of each step, and the held-out score goes on improving. Nothing here depends on noise: what counts is
that it is the same replica each time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_orchestrator.guard.channels.remembered import Remembered

_FEWEST = 4  # replicas: the range of fewer than three others says nothing
_TIMES = 4.0  # times the range of all others, by which it must lie outside
_ROUNDS = 8  # in a row


@dataclass
class Apart(Remembered):
    """The replica whose training metric lies far outside the range of all others', and for how many rounds in a row.

    Stored state: a list of three values, or None while no replica's does.
    """

    last: list[Any] | None = None  # replica, whether it is worse than all others, rounds in a row

    def judge(self, trained: Mapping[int, float]) -> str:
        """Add a round's training metrics by replica id, higher is better. Returns a warning about one replica, or "".

        It warns once the same replica has been far outside the range of all others, on the same side, for `_ROUNDS`
        rounds in a row.
        """
        found = _outside(trained)
        if found is None:
            self.last = None
            return ""
        replica, worse, distance, width = found
        before = self.last[2] if self.last is not None and self.last[:2] == [replica, worse] else 0
        self.last = [replica, worse, before + 1]
        if before + 1 < _ROUNDS:
            return ""
        return (
            f"the training metric of replica {replica} has been {'worse' if worse else 'better'} than all others' for "
            f"{before + 1} rounds, in the last one by {distance:.3g}, while the others differ by {width:.2g}; this "
            "does not halt: look at the replica's data and machine"
        )


def _outside(trained: Mapping[int, float]) -> tuple[int, bool, float, float] | None:
    """The replica whose training metric lies far outside the range of all others'; None if there is none.

    Returns (replica id, whether its metric is below the others', distance to the nearest other metric, range of the
    others). None too if fewer than `_FEWEST` replicas have a metric.
    """
    if len(trained) < _FEWEST:
        return None
    ordered = sorted(trained.items(), key=lambda each: (each[1], each[0]))
    (lowest, low), (_, second) = ordered[:2]
    (_, other), (highest, high) = ordered[-2:]
    below, above = (second - low) - _TIMES * (high - second), (high - other) - _TIMES * (other - low)
    if below > 0 and below >= above:
        return lowest, True, second - low, high - second
    return (highest, False, high - other, other - low) if above > 0 else None
