"""Log segments: one object with the exact lines of the commits, or of the manifests they name, of many closed rounds.

A segment is a copy that makes history cheap to read; the single objects are authoritative. Its bytes are a function of
the log, so several writers write the same. `replica.rounds.snapshot_writer` decides who writes one and when; `RunLog`
reads through `CheckedSegments`.
"""

import logging
from collections.abc import Callable, Sequence

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, RecordTooNew
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.keys import SegmentKey
from diloco_orchestrator.protocol.records import Answer, Commit
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.entries import CommitEntry, check_link
from diloco_orchestrator.run_log.reader import read_record
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

ROUNDS = 100  # of a segment
MOST_MANIFESTS = 64 * 2**20  # bytes that a segment of manifests has; what joins them holds them in memory
TAIL_ROUNDS = 10  # of the segments, without manifests, of the rounds for which there is no long one yet


# -- content ----------------------------------------------------------------------------------------------------------


def missing_segments(existing: Sequence[SegmentKey], newest_round: int) -> list[SegmentKey]:
    """The segments (each joins many rounds' commits or manifests) missing of `newest_round` rounds, oldest first."""
    closed = newest_round // ROUNDS * ROUNDS
    wanted = [
        SegmentKey(first, first + ROUNDS - 1, kind)
        for first in range(1, closed, ROUNDS)
        for kind in ("manifests", "commits")
    ]
    for first in range(closed + 1, newest_round - TAIL_ROUNDS + 2, TAIL_ROUNDS):
        wanted.append(SegmentKey(first, first + TAIL_ROUNDS - 1, "commits"))
    return [segment for segment in wanted if segment not in existing]


def write_segments(
    store: Store, read_commit: Callable[[int], CommitEntry | None], newest_round: int, complete_until: int = 0
) -> None:
    """Write the missing segments, which join many rounds' commits or manifests, of a log with `newest_round` commits.

    Safe to race and to repeat. `complete_until`: segments up to this round are known to exist; 0: list them. Raises
    `RecordInvalid` or `ObjectMissing` if an object is not what the log names, and then writes no further segment.
    """
    existing = [] if complete_until else list_segments(store)
    for segment in missing_segments(existing, newest_round):
        if segment.last > complete_until:
            commits = [_closed(read_commit, round_) for round_ in range(segment.first, segment.last + 1)]
            if store.create(str(segment), segment_bytes(store, segment, commits)):
                log.info("rounds %d to %d are in %s", segment.first, segment.last, segment)


def _closed(read_commit: Callable[[int], CommitEntry | None], round_: int) -> CommitEntry:
    entry = read_commit(round_)
    if entry is None:
        raise RecordInvalid(f"{keys.commit(round_)} is gone; no segment is made of it.")
    return entry


def segment_bytes(store: Store, segment: SegmentKey, commits: Sequence[CommitEntry]) -> bytes:
    """The content of a segment that joins these commits or their manifests. One GET for each line not in memory.

    Manifests that are no records, which no round averages, are left out, and those that do not fit into what is left of
    64 MiB after those before. Raises `RecordInvalid` or `ObjectMissing` if an object is not what the log names.
    """
    if segment.kind == "commits":
        return b"".join(_commit_line(store, entry) for entry in commits)
    joined = bytearray()
    for entry in commits:
        for answer in entry.commit.answers:
            line = _manifest_line(store, entry.commit.round, answer)
            if len(joined) + len(line) <= MOST_MANIFESTS:
                joined += line
    return bytes(joined)


def _commit_line(store: Store, entry: CommitEntry) -> bytes:
    line, key = entry.written.to_bytes(), keys.commit(entry.commit.round)
    if entry.unreadable:
        raise RecordInvalid(f"{key} is no commit; no segment is made of it.")
    if sha256_hex(line) != entry.sha256:
        line = read_record(store, key)
    if sha256_hex(line) != entry.sha256 or not is_line(line):
        raise RecordInvalid(f"{key} was changed after it was written; no segment is made of it.")
    return line


def _manifest_line(store: Store, round_: int, answer: Answer) -> bytes:
    key = keys.contribution(round_, answer.replica_id)
    line = read_record(store, key)
    if sha256_hex(line) != answer.manifest_sha256:
        raise RecordInvalid(f"{key} is not the manifest that the commit names; no segment is made of it.")
    return line if is_line(line) else b""


def is_line(data: bytes) -> bool:
    """Whether an object's bytes can be a line of a segment, a file that joins many records; true for every record."""
    return data.endswith(b"\n") and data.count(b"\n") == 1


# -- reading ----------------------------------------------------------------------------------------------------------


class SegmentReader:
    """Lists and reads a run's segments (each joins many rounds' commits or manifests). Caches at most two."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store = store
        self._config = config
        self._listed: list[SegmentKey] = []
        self._refused: set[SegmentKey] = set()
        self._cache: dict[SegmentKey, list[bytes]] = {}

    def refresh(self) -> None:
        """List the run's segments, objects that each join many rounds' commits or manifests. One LIST request."""
        self._listed = list_segments(self._store)

    def holding(self, round_: int) -> SegmentKey | None:
        """The segment (many rounds' commits in one object) that has `round_` and reaches furthest; or None."""
        usable = (
            segment
            for segment in self._listed
            if segment.kind == "commits" and segment.first <= round_ <= segment.last and segment not in self._refused
        )
        return max(usable, key=lambda segment: segment.last, default=None)

    def newest_round(self) -> int:
        """The last round in a segment, an object with the commits of many rounds; 0 if there is none."""
        return max((segment.last for segment in self._listed if segment.kind == "commits"), default=0)

    def refuse(self, segment: SegmentKey) -> None:
        """Ignore this segment (many rounds' commits in one object) from now on: its single commits are read instead."""
        self._refused.add(segment)

    def read(self, segment: SegmentKey, position: Position) -> list[tuple[CommitEntry, bytes]]:
        """The commits after `position` in the log from `segment`, which holds the next one, with their exact bytes. One
        GET.

        Raises `RecordInvalid` if the segment, an object with the commits of many rounds, is not a hash chain of the
        commits of its rounds from `position` on.
        """
        found, before = list[tuple[CommitEntry, bytes]](), position
        lines = self._lines(segment)
        if len(lines) != segment.last - segment.first + 1:
            raise RecordInvalid(f"it holds {len(lines)} lines, not those of rounds {segment.first} to {segment.last}.")
        for round_, line in enumerate(lines, segment.first):
            if round_ < position.round:
                continue
            if round_ == position.round:
                if sha256_hex(line) != position.sha256:
                    raise RecordInvalid(f"its round {round_} is not the commit that was read before.")
                continue
            number = round_ - segment.first + 1
            entry = CommitEntry.of(_parsed(line, number), sha256_hex(line), self._config)
            check_link(entry, before)
            found.append((entry, line))
            before = entry.position
        return found

    def previous_of(self, round_: int) -> str | None:
        """The digest of the commit before round `round_`, from the segment (many rounds' commits) that begins with that
        round.

        None if there is no such segment or if it cannot be parsed.
        """
        segment = self.holding(round_)
        if segment is None or segment.first != round_:
            return None
        try:
            return _parsed(self._lines(segment)[0], 1).previous
        except (RecordInvalid, IndexError):
            return None

    def manifests(self, round_: int) -> "Manifests | None":
        """The segment that joins many rounds' manifests and holds those of `round_`; None if there is none."""
        held = (each for each in self._listed if each.kind == "manifests" and each.first <= round_ <= each.last)
        segment = next(held, None)
        return None if segment is None else Manifests(segment, self._fetch(segment))

    def _lines(self, segment: SegmentKey) -> list[bytes]:
        lines = self._cache.get(segment)
        if lines is None:
            for oldest in list(self._cache)[:-1]:
                self._cache.pop(oldest, None)  # by now another thread may have
            lines = self._cache[segment] = self._fetch(segment)
        return lines

    def _fetch(self, segment: SegmentKey) -> list[bytes]:
        try:
            *lines, rest = read_record(self._store, str(segment)).split(b"\n")
        except ObjectMissing:
            raise RecordInvalid("it is gone.") from None
        return [line + b"\n" for line in lines] + ([rest] if rest else [])


class Manifests:
    """The manifests in one segment, which joins those of many rounds."""

    def __init__(self, segment: SegmentKey, lines: Sequence[bytes]) -> None:
        self.segment = segment
        self._size = sum(map(len, lines))
        self._by_sha256 = {sha256_hex(line): line for line in lines}

    def lacks(self, line: bytes) -> bool:
        """Whether the segment lacks the line of a manifest though it has room for it; a full one may leave out some."""
        return sha256_hex(line) not in self._by_sha256 and self._size + len(line) <= MOST_MANIFESTS

    def find(self, sha256: str) -> bytes | None:
        """The exact bytes of the manifest with this digest; None if the segment, which joins many, lacks it."""
        return self._by_sha256.get(sha256)


def list_segments(store: Store) -> list[SegmentKey]:
    """The segments (each joins many rounds' commits or manifests) that exist, in key order. One LIST."""
    parsed = (keys.parse_segment(info.key) for info in store.list(keys.LOG))
    return [segment for segment in parsed if segment is not None]


def _parsed(line: bytes, number: int) -> Commit:
    return Commit.from_bytes(line, f"line {number}")


class CheckedSegments:
    """Reads commits a segment (of ten or a hundred rounds) at a time and checks them against the single commits.

    `read_commit`: returns the single commit of a round, or None. `on_read` is called with key and exact bytes of every
    commit; `on_bad_segment` with the key of a segment that disagrees with the log, and how (default: it is logged).
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
        """The commits after `position` from the segment (many commits in one object) with the next one; else empty."""
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
        """Raise `RecordInvalid` unless a segment's last commit is that of the log: the next commit names it.

        The hash chain within a segment, an object with many commits, does not cover its last commit. Without a next
        commit the single commit of the same round is compared.
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
