"""The findings of an audit: one for each range that was drawn, and what they say together."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from diloco_orchestrator.inspection.audit.draw import TrainingRange, caught_probability, fraction_caught

_CONFIDENT = 0.95


class Outcome(StrEnum):
    """The comparison of a range with its re-run."""

    EQUAL = "equal"  # bit for bit
    WITHIN_BOUND = "within the bound"  # another hardware class, or training that is not deterministic
    DIFFERS = "DIFFERS"
    NOT_AUDITABLE = "not auditable"


@dataclass(frozen=True)
class RangeFinding:
    """The result of re-running one range."""

    range_: TrainingRange
    outcome: Outcome
    words: str  # what differs, or why it was not audited; empty for equal bits
    steps: int = 0  # inner steps of the round that were trained again
    follows: int = 0  # round whose saved state training began from; 0: from the start
    distance: float | None = None  # of the payload, relative; None if it was not measured
    bound: float | None = None  # the largest distance that counts as rounding; None where bits must be equal
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "range_"}
        return {"round": self.range_.round, "replica": self.range_.replica_id, **fields}


@dataclass
class Audit:
    """An audit: the ranges drawn, and the findings."""

    url: str
    head: str  # of the log that it drew from
    seed: int
    ranges: int  # from which it drew
    left_out: Mapping[str, int]  # responses in the log that moved no base, by why; none of them can be drawn
    findings: list[RangeFinding] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether no range differs."""
        return all(each.outcome is not Outcome.DIFFERS for each in self.findings)

    @property
    def audited(self) -> int:
        """Number of ranges that were compared."""
        return sum(each.outcome is not Outcome.NOT_AUDITABLE for each in self.findings)

    def words(self) -> str:
        """The findings in two or three sentences."""
        counts = {outcome: sum(each.outcome is outcome for each in self.findings) for outcome in Outcome}
        parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        lines = [f"{len(self.findings)} of {self.ranges} ranges drawn: {parts or 'none'}."]
        fewest = fraction_caught(self.ranges, self.audited, _CONFIDENT)
        if not self.agrees:
            lines.append(
                "What a replica published is not what the run's training function gives from the state that it named, "
                "or that state was removed or changed."
            )
        elif self.audited == self.ranges:
            lines.append("All of the run's training was repeated.")
        elif fewest is not None:
            half = max(1, self.ranges // 2)
            lines.append(
                f"Had {fewest} or more of them been dishonest ({100 * fewest / self.ranges:.0f} %), one would have "
                f"been among the {self.audited} audited with at least {100 * _CONFIDENT:.0f} % probability; with half "
                f"of them dishonest, {100 * caught_probability(self.ranges, half, self.audited):.1f} %."
            )
        if 0 < self.audited < len(self.findings):
            lines.append("Of those that could not be audited nothing is known; each has the reason in its line.")
        if self.left_out:
            listed = ", ".join(f"{count} {why}" for why, count in self.left_out.items())
            lines.append(f"Not drawn from, because no base contains them: {listed}.")
        return " ".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "head": self.head,
            "seed": self.seed,
            "segments": self.ranges,
            "left_out": dict(self.left_out),
            "agrees": self.agrees,
            "audited": self.audited,
            "caught": {
                f"{percent}%": caught_probability(self.ranges, -(-self.ranges * percent // 100), self.audited)
                for percent in (10, 25, 50)
            },
            "findings": [each.to_json() for each in self.findings],
        }
