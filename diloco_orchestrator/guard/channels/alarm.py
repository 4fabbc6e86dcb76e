"""`Alarm`: the report that a statistic of the guard has passed its threshold."""

from dataclasses import dataclass
from enum import StrEnum


class AlarmKind(StrEnum):
    """The claim of an alarm about the held-out score: none, that it fell, or that only the training metric gains.

    Scores on the confirmation set (further held-out items) can confirm or dismiss an alarm only of the last two kinds.
    """

    CERTAIN = "certain"  # nothing: the alarm is of other numbers
    FALL = "fall"  # that the score fell
    GAP = "gap"  # that the score does not improve while training gains


@dataclass(frozen=True)
class Alarm:
    """The report that a statistic of the guard passed its threshold: which metric moved, and what the user can do."""

    what: str  # which metric moved, since when, by how much
    rollback_to: int  # the last model while its statistic was zero
    what_to_do: str
    kind: AlarmKind = AlarmKind.CERTAIN
    excess: float | None = None  # GAP: how much larger it is than a gap that is no reason to halt; None: not known


@dataclass(frozen=True)
class Shown:
    """The way in which an alarm's text shows held-out scores: as the user reports them."""

    origin: float  # the run's first score, which channels subtract from all
    sign: float = 1.0  # -1: of losses, which are folded with the opposite sign

    def of(self, gain: float) -> float:
        """A score as reported. `gain`: the score as folded, minus the run's first."""
        return self.sign * (gain + self.origin) + 0.0  # no "-0"

    @property
    def worse(self) -> str:
        """The word for the side of a score on which worse scores lie."""
        return "below" if self.sign > 0 else "above"
