"""`ConformanceReport`: the results of `check_replica`, one `Finding` for each check. Its text is a table."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from diloco_orchestrator.errors import Documented

Outcome = Literal["passed", "failed", "not applicable"]
_WIDTH = 118
_INDENT = 31


class ReplicaUnsound(Documented, AssertionError):
    """A training function failed one of the checks in its conformance report, which is the message."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of a training function, a row of the report. `remedy`: what to do if it failed."""

    name: str
    outcome: Outcome
    detail: str
    remedy: str = ""

    def lines(self) -> Iterator[str]:
        shown = self.outcome.upper() if self.outcome == "failed" else self.outcome
        begin = f"{shown:<15} {self.name:<14} "
        yield from textwrap.wrap(self.detail, _WIDTH, initial_indent=begin, subsequent_indent=" " * _INDENT)
        if self.remedy:
            begin = " " * _INDENT + "-> "
            yield from textwrap.wrap(self.remedy, _WIDTH, initial_indent=begin, subsequent_indent=" " * (_INDENT + 3))


@dataclass(frozen=True)
class ConformanceReport:
    """The results of all checks of one training function, each after those that it depends on."""

    entrypoint: str
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether no row failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """The names of the failed rows."""
        return [finding.name for finding in self.findings if finding.outcome == "failed"]

    def __getitem__(self, name: str) -> Finding:
        """The row of this name."""
        return next(finding for finding in self.findings if finding.name == name)

    def __str__(self) -> str:
        end = "a sound replica" if self.sound else f"not a sound replica: {', '.join(self.failed)}"
        return "\n".join(
            [*(line for finding in self.findings for line in finding.lines()), f"{self.entrypoint} is {end}"]
        )

    def to_json(self) -> dict[str, Any]:
        return {"entrypoint": self.entrypoint, "sound": self.sound, "rows": [asdict(each) for each in self.findings]}

    def raise_if_unsound(self) -> None:
        """Raise `ReplicaUnsound`, with the whole report as its message, if a check failed; else do nothing."""
        if not self.sound:
            raise ReplicaUnsound(f"\n{self}")
