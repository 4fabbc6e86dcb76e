"""`Alarm`: the report that a statistic of the guard has passed its threshold."""

from dataclasses import dataclass
from enum import StrEnum


class AlarmKind(StrEnum):
    """The claim of an alarm about the held-out score, which decides whether the confirmation set can check it."""

    CERTAIN = "certain"  # nothing: the alarm is of other numbers
    FALL = "fall"  # that the score fell
    GAP = "gap"  # that the score does not improve while training gains


@dataclass(frozen=True)
class Alarm:
    """A statistic of the guard that has passed its threshold, and what to do about it."""

    what: str  # which metric moved, since when, by how much
    rollback_to: int  # the last model while its statistic was zero
    what_to_do: str
    kind: AlarmKind = AlarmKind.CERTAIN
    excess: float | None = None  # GAP: how much larger it is than a gap that is no reason to halt; None: not known
