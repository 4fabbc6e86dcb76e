"""`Alarm`: what a channel says when it passes its threshold."""

from dataclasses import dataclass
from enum import StrEnum


class AlarmKind(StrEnum):
    """What an alarm says of the held-out score, and so what the vault set can say to it."""

    CERTAIN = "certain"  # nothing: the alarm is of other numbers
    FALL = "fall"  # that the score fell
    GAP = "gap"  # that the score does not improve while training gains


@dataclass(frozen=True)
class Alarm:
    """A channel that passed its threshold."""

    what: str  # which metric moved, since when, by how much
    rollback_to: int  # the last model while its statistic was zero
    what_to_do: str
    kind: AlarmKind = AlarmKind.CERTAIN
