"""Influence of each contribution on the base: plain rows, as JSON and CSV, made in `inspection.whatif.influence`."""

import csv
import io
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class InfluenceRow:
    """One contribution in one round, compared with the same round without it."""

    round: int
    replica_id: int
    shift: float | None  # ‖base without it - base‖ / ‖outer step‖; None if the step is zero
    cosine: float | None  # of its pseudo-gradient with the average of the others; None if it is alone, or one is zero
    heldout_change: float | None = None  # score of the base without it less that of the base; None: not scored


@dataclass(frozen=True)
class Influence:
    """The rows of all applied rounds whose payloads are left, by round and replica id."""

    rows: list[InfluenceRow] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # applied rounds whose payloads were deleted

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_csv(self) -> str:
        """One line per row below the names of the columns, six digits a figure; what does not exist is empty."""
        text = io.StringIO()
        written = csv.writer(text, lineterminator="\n")
        names = [each.name for each in fields(InfluenceRow)]
        written.writerow(names)
        for row in self.rows:
            values = (getattr(row, name) for name in names)
            written.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
        return text.getvalue()

    def gone_words(self) -> str:
        """Which rounds are left out, as a sentence; empty if none is."""
        if not self.gone:
            return ""
        first, last = self.gone[0], self.gone[-1]
        span = f"{first} to {last}" if last - first + 1 == len(self.gone) > 1 else ", ".join(map(str, self.gone))
        return f"Without {'round' if len(self.gone) == 1 else 'rounds'} {span}: payloads were deleted by retention."
