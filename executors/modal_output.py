"""Output of a Modal Sandbox as lines: pieces are joined, and repeated ones dropped. Makes no calls."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from diloco_orchestrator.executors.modal_api import Entry


class OutputLines:
    """Joins output entries of successive fetches to lines. A fetch may repeat entries of the fetch before it."""

    def __init__(self) -> None:
        self._shown: Counter[Entry] = Counter()
        self._rest: dict[str, str] = {}  # incomplete last line, by source: stdout and stderr have their own
        self.newest: datetime | None = None  # time of the newest entry so far

    def add(self, entries: Sequence[Entry]) -> list[str]:
        """The lines that these entries complete, without entries that were added before."""
        complete: list[str] = []
        for entry in self._without_shown(entries):
            *lines, self._rest[entry.source] = (self._rest.get(entry.source, "") + entry.text).split("\n")
            complete += lines
        if entries:
            self._shown, self.newest = Counter(entries), max(entry.timestamp for entry in entries)
        return complete

    def rest(self) -> list[str]:
        """The incomplete last lines of stdout and stderr, at the end of the output."""
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
