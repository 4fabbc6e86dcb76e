"""`SegmentChecker`: takes manifests from segments of the log, and checks that segments and single objects agree.

That a segment's commits are those of the log is checked by `RunLog` while it reads them.
"""

from collections.abc import Iterator

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.inspection.verify.findings import Differs
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.keys import SegmentKey
from diloco_orchestrator.protocol.records import Answer
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.segments import Manifests, is_line
from diloco_orchestrator.store.base import ObjectInfo


class SegmentChecker:
    """Reads the segments of one run, rounds in order, each once. One of them is in memory."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._segment: SegmentKey | None = None  # of commits, that holds the round
        self._manifests: Manifests | None = None
        self._sizes: dict[str, int] = {}  # of all objects of the segment's rounds
        self._listing: Iterator[ObjectInfo] | None = None  # of all objects of rounds, in key order; taken once
        self._ahead: ObjectInfo | None = None  # the first one that was not needed yet
        self._until = 0  # the last round for which a segment was looked for

    def manifest(self, round_: int, answer: Answer) -> bytes | None:
        """The bytes of the manifest that a commit names, or None if it has to be read by itself.

        Raises `Differs` if a segment cannot be read, or if the single manifest is missing or has another size.
        """
        self._move_to(round_)
        data = self._manifests.find(answer.manifest_sha256) if self._manifests else None
        if data is not None:
            self._check_single(keys.contribution(round_, answer.replica_id), len(data))
        return data

    def check_lacking(self, round_: int, data: bytes) -> None:
        """Raise `Differs` if the segment that holds a round lacks the manifest with these bytes."""
        ours = self._manifests
        if ours is not None and is_line(data) and data not in ours:
            raise Differs(str(ours.segment), f"lacks a manifest that the commit of round {round_} names")

    def is_deleted(self, round_: int, key: str) -> bool:
        """Whether an object of a round is known not to exist, so that it need not be asked for."""
        return self._segment is not None and round_ <= self._until and key not in self._sizes

    def check_commit(self, round_: int, size: int) -> None:
        """Raise `Differs` if the single commit of a round in a segment is missing or has another size."""
        self._move_to(round_)
        if self._segment is not None:
            self._check_single(keys.commit(round_), size)

    def _move_to(self, round_: int) -> None:
        if round_ <= self._until:
            return
        try:
            self._manifests = self._log.segments.manifests(round_)
        except RecordInvalid as error:
            raise Differs(keys.LOG, f"has a segment that cannot be read: {error}") from None
        self._segment = self._log.segments.holding(round_)
        self._until = self._segment.last if self._segment else round_
        self._sizes.clear()
        if self._segment is not None:
            self._list_singles(round_, self._until)

    def _list_singles(self, first: int, last: int) -> None:
        if self._listing is None:
            self._listing = self._log.store.list(keys.ROUNDS, start_after=keys.end_of_round(first - 1))
            self._ahead = next(self._listing, None)
        while self._ahead is not None and self._ahead.key < keys.end_of_round(last):
            self._sizes[self._ahead.key] = self._ahead.size
            self._ahead = next(self._listing, None)

    def _check_single(self, key: str, size: int) -> None:
        """The single object counts: readers of single rounds read it. A listing shows its size, not its digest."""
        found = self._sizes.get(key)
        if found != size:
            words = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise Differs(key, f"{words}, though {self._segment} was made of it")
