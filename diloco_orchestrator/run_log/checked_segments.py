"""`CheckedSegments`: commits from segments of the log, once they are known to be those of the single objects' chain.

`RunLog` reads single commits where no segment is, or where one disagrees.
"""

import logging
from collections.abc import Callable

from diloco_orchestrator.errors import RecordInvalid, RecordTooNew
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.segments import SegmentReader

log = logging.getLogger(__name__)


class CheckedSegments:
    """Reads the commits of a whole segment at once.

    `read_commit`: the single commit of a round, or None. `on_read` is called with the key and the exact bytes of every
    commit. `on_bad_segment` is called with the key of a segment that disagrees with the log, and how; by default it is
    logged.
    """

    def __init__(
        self,
        segments: SegmentReader,
        read_commit: Callable[[int], CommitEntry | None],
        on_read: Callable[[str, bytes], None] | None,
        on_bad_segment: Callable[[str, str], None] | None,
    ) -> None:
        self._segments = segments
        self._read_commit = read_commit
        self._on_read = on_read
        self._on_bad_segment = on_bad_segment or _log_bad_segment

    def after(self, position: Position) -> list[CommitEntry]:
        """The commits after `position` in the segment that holds the next one; empty if no segment can be used."""
        while (segment := self._segments.holding(position.round + 1)) is not None:
            try:
                lines = self._segments.read(segment, position)
                self._check_last(lines[-1][0])
            except RecordTooNew:
                raise
            except RecordInvalid as error:
                self._segments.refuse(segment)
                self._on_bad_segment(str(segment), str(error))
                continue
            for entry, line in lines:
                if self._on_read is not None:
                    self._on_read(keys.commit(entry.commit.round), line)
            return [entry for entry, _ in lines]
        return []

    def _check_last(self, last: CommitEntry) -> None:
        """Raise `RecordInvalid` unless the commit after a segment's last one names it.

        The chain within a segment does not cover its last commit. At the log's end that is compared with the single
        commit.
        """
        round_ = last.commit.round
        if self._segments.previous_of(round_ + 1) == last.sha256:
            return
        following = self._read_commit(round_ + 1)
        if following is not None and following.unreadable:
            following = None
        single = self._read_commit(round_) if following is None else None
        expected = following.written.previous if following else single.sha256 if single else last.sha256
        if expected != last.sha256:
            raise RecordInvalid(f"its last commit, of round {round_}, is not the one in the log.")


def _log_bad_segment(key: str, words: str) -> None:
    log.warning("%s disagrees with the commits that it replaces, which are read instead: %s", key, words)
