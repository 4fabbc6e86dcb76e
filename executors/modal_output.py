"""Output of a Modal Sandbox as lines: pieces put together, and none given twice. Fetches nothing."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from diloco_orchestrator.executors.modal_api import Entry


class OutputLines:
    """Lines of successive fetches, each of which may repeat entries of the one before."""

    def __init__(self) -> None:
        self._shown: Counter[Entry] = Counter()
        self._rest: dict[str, str] = {}  # incomplete last line, by source: stdout and stderr have their own
        self.newest: datetime | None = None  # time of the newest entry so far

    def add(self, entries: Sequence[Entry]) -> list[str]:
        """Lines that are complete with these entries."""
        complete: list[str] = []
        for entry in self._without_shown(entries):
            *lines, self._rest[entry.source] = (self._rest.get(entry.source, "") + entry.text).split("\n")
            complete += lines
        if entries:
            self._shown, self.newest = Counter(entries), max(entry.timestamp for entry in entries)
        return complete

    def rest(self) -> list[str]:
        """Last lines without a newline at their end."""
        rest, self._rest = self._rest, {}
        return [line for line in rest.values() if line]

    def _without_shown(self, entries: Sequence[Entry]) -> list[Entry]:
        left, fresh = Counter(self._shown), []
        for entry in entries:
            if left[entry] > 0:
                left[entry] -= 1
            else:
                fresh.append(entry)
        return fresh
