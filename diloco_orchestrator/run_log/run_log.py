"""`RunLog`: reads the immutable records of one run (run, start, legs, commits), each once, and checks the hash chain.

History is read through segments of the log (`run_log.segments`) once a run is long enough to have some. What a commit
must say is decided in `protocol.rounds`. New records are written by `run_log.append`; records of attempts
and contributions are read by `run_log.attempts` and `run_log.contributions`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

from diloco_orchestrator.errors import NoSuchRun, ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import leg_position
from diloco_orchestrator.protocol.records import (
    Begin,
    Commit,
    Halt,
    Record,
    Replay,
    Result,
    Run,
    Snapshot,
    Start,
    sha256_hex,
)
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.capped_reads import read_optional
from diloco_orchestrator.run_log.checked_segments import CheckedSegments
from diloco_orchestrator.run_log.entries import CommitEntry as CommitEntry
from diloco_orchestrator.run_log.entries import Entry as Entry
from diloco_orchestrator.run_log.entries import check_link as check_link
from diloco_orchestrator.run_log.leg_configs import LegConfigs
from diloco_orchestrator.run_log.segments import SegmentReader
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

_PATIENCE = 10  # single commits that a reader follows before it looks for segments of the log
_KEPT_COMMITS = 256  # single commits kept in memory: more than the rounds of a segment


class RunLog:
    """The records of the run in `store`.

    A record never changes, so it is fetched once; one that does not exist yet is fetched again at every call. Every
    method that reads raises `RecordInvalid` for an object that is not the record its key names, `RecordTooNew` for a
    record of a later schema, and the store's errors. Two threads may share a log: at worst both fetch the same record.

    The constructor reads run.json, unless `run_json` holds the bytes that the caller has just created there; it raises
    `NoSuchRun` if there is none. `on_read` is called with key and exact bytes of every record before it is parsed,
    `on_bad_segment` with the key of a segment that disagrees with the log and with how it does (by default that is
    logged); afterwards the single commits are read.
    """

    def __init__(
        self,
        store: Store,
        on_read: Callable[[str, bytes], None] | None = None,
        on_bad_segment: Callable[[str, str], None] | None = None,
        run_json: bytes | None = None,
    ) -> None:
        self.store = store
        self._on_read = on_read
        self._entries: dict[str, Entry[Record]] = {}
        self._commit_entries: dict[int, CommitEntry] = {}
        self._commits: list[Commit] = []
        self._position: Position | None = None
        self._newest: CommitEntry | None = None
        self._open_seen = 0  # the last round that had no commit yet when it was read
        self._snapshot_seen = 0  # the newest round with a snapshot: the log has at least as many commits
        run = self._read(Run, keys.RUN) if run_json is None else self.remember(Run, keys.RUN, run_json)
        if run is None:
            raise NoSuchRun(
                f"{store.url} holds no run ({keys.RUN} is missing). Check the address; a run is one folder."
            )
        self.run: Run = run.record
        self.run_sha256: str = run.sha256
        self.configs = LegConfigs(self.run.config, self.begin)
        self.segments = SegmentReader(store, self.run.config)
        self._history = CheckedSegments(self.segments, self.commit, on_read, on_bad_segment)

    # -- before the first commit ---------------------------------------------------------------------------------

    def start(self) -> Entry[Start] | None:
        """The record `start.json`, or None while no replica has created the first base."""
        return self._read(Start, keys.START)

    def begin(self, leg: int) -> Entry[Begin] | None:
        """The `Begin` record of a leg, or None if the leg has not begun."""
        return self._read(Begin, keys.begin(leg))

    def newest_leg(self) -> int:
        """The number of the newest leg; 0 before the first. One LIST request."""
        found = (keys.parse_begin(info.key) for info in self.store.list(keys.LEGS))
        return max((leg for leg in found if leg is not None), default=0)

    def newest_begin(self) -> Entry[Begin]:
        """The `Begin` record of the newest leg. Raises `NoSuchRun` if the launcher died before it created leg 1."""
        return self.begin_of(max(1, self.newest_leg()))

    def begins(self) -> list[Begin]:
        """The `Begin` records of all legs, the newest last. Raises `NoSuchRun` if one is missing."""
        return [self.begin_of(leg).record for leg in range(1, max(1, self.newest_leg()) + 1)]

    def begin_of(self, leg: int) -> Entry[Begin]:
        """The `Begin` record of a leg that has begun. Raises `NoSuchRun` if it is missing."""
        found = self.begin(leg)
        if found is None:
            raise _no_begin(self.store.url, leg)
        return found

    def halt(self, leg: int) -> Halt | None:
        """The request to halt a leg, or None if there is none."""
        found = self._read(Halt, keys.halt(leg))
        return None if found is None else found.record

    def result(self, leg: int) -> Result | None:
        """The result of a leg, or None while the leg goes on."""
        found = self._read(Result, keys.result(leg))
        return None if found is None else found.record

    # -- commits -------------------------------------------------------------------------------------------------

    def commit(self, round_: int) -> CommitEntry | None:
        """The commit of a round, or None while the round is open. Does not check its link to the commit before."""
        known = self._commit_entries.get(round_)
        if known is not None:
            return known
        data = self._fetch(keys.commit(round_))
        if data is None:
            self._open_seen = max(self._open_seen, round_)
            return None
        return self.remember_commit(round_, data)

    def remember_commit(self, round_: int, data: bytes) -> CommitEntry:
        """Keep the commit of a round, whose exact bytes are `data`, so that no later call fetches it.

        Raises `RecordInvalid` if `data` is not a commit of that round.
        """
        key = keys.commit(round_)
        commit = Commit.from_bytes(data, key)
        if commit.round != round_:
            raise RecordInvalid(f"{key} says it is round {commit.round}: it was copied there by hand.")
        if len(self._commit_entries) >= _KEPT_COMMITS:
            oldest, *_ = self._commit_entries  # copied at once: another thread may add one
            self._commit_entries.pop(oldest, None)
        found = self._commit_entries[round_] = CommitEntry.of(commit, sha256_hex(data), self.run.config)
        return found

    def after(self, position: Position) -> Iterator[CommitEntry]:
        """The commits after `position`, oldest first. Raises `RecordInvalid` where the hash chain is broken."""
        for entry in self.unlinked_after(position):
            check_link(entry, position)
            if self._newest is None or entry.commit.round > self._newest.commit.round:
                self._newest = entry
            yield entry
            position = entry.position

    def unlinked_after(self, position: Position) -> Iterator[CommitEntry]:
        """The commits after `position`, oldest first; the caller checks the links of single commits.

        Only a reader that has ten rounds before it, as far as it knows, looks for segments: one LIST request, then one
        GET for each. At most two segments are in memory.
        """
        singles, listed = 0, False
        while True:
            if singles >= _PATIENCE or self._snapshot_seen >= position.round + _PATIENCE:
                if not listed:
                    self.segments.refresh()
                    listed = True
                if entries := self._history.after(position):
                    yield from entries
                    position = entries[-1].position
                    continue
            entry = self.commit(position.round + 1)
            if entry is None:
                return
            yield entry
            position, singles = entry.position, singles + 1

    def commits(self) -> Sequence[Commit]:
        """All commits so far, oldest first; only new ones are fetched. Empty without a start.json.

        Raises `RecordInvalid` at the first that breaks the hash chain.
        """
        if self._position is None:
            start = self.start()
            if start is None:
                return ()
            self._position = Position.at_start(start.sha256)
        for entry in self.after(self._position):
            self._commits.append(entry.commit)
            self._position = entry.position
        return self._commits

    def each_commit(self) -> Iterator[Commit]:
        """All commits so far, oldest first, none kept in memory for the next call. Errors as of `commits`."""
        start = self.start()
        for entry in self.after(Position.at_start(start.sha256)) if start else ():
            yield entry.commit

    def position(self) -> Position | None:
        """The position after the last commit that `commits` returned; None before its first call or without a start."""
        return self._position

    def newest(self, begin: Begin) -> CommitEntry | None:
        """The newest commit, of the leg `begin` or a later one; before the leg's first, the last one before the leg.

        None before the run's first. Reads only the end of a long log, whose chain up to there is not checked.
        """
        if self.start() is None:
            return None
        position = self._newest.position if self._newest else self.leg_position(begin)
        singles = 0
        while (entry := self.commit(position.round + 1)) is not None:
            check_link(entry, position)
            singles += 1
            if singles == _PATIENCE:
                self.segments.refresh()
                entry = self.commit(max(self.segments.newest_round(), entry.commit.round)) or entry
            self._newest, position = entry, entry.position
        if self._newest is None and begin.after_round:
            self._newest = self.commit(begin.after_round)
        return self._newest

    def leg_position(self, begin: Begin) -> Position:
        """The position in the commit log at which a leg begins. start.json must exist."""
        return leg_position(begin, self._start().sha256)

    def _start(self) -> Entry[Start]:
        start = self.start()
        assert start is not None, "the caller has checked that start.json exists"
        return start

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        """The rounds with a complete snapshot, oldest first; 0 is the first base. One LIST request."""
        return sorted(self.snapshot_takes())

    def snapshot_takes(self) -> dict[int, list[int]]:
        """The complete takes of every snapshot, by round, the first take first. One LIST request."""
        takes = complete_takes(self.store)
        self._snapshot_seen = max([self._snapshot_seen, *takes])
        return takes

    def snapshots_ahead(self, round_: int, begin: Begin) -> list[int]:
        """The rounds of a leg's snapshots, confirmed or not, that are worth more than to follow commits from `round_`.

        Costs nothing to a reader that has seen the round open, one GET to one that is less than ten rounds behind, and
        a LIST to any other.
        """
        far = round_ + _PATIENCE
        if round_ <= self._open_seen or self.commit(far) is None:
            return []
        return [found for found in self.snapshots() if found >= far and found > begin.after_round]

    def snapshot(self, round_: int, take: int = 1) -> Snapshot:
        """The record of a complete snapshot. Raises `ObjectMissing` if there is none: retention may have deleted it."""
        found = self._read(Snapshot, keys.snapshot(round_, keys.SNAPSHOT_RECORD, take))
        if found is None:
            raise ObjectMissing(f"{self.store.url} has no complete snapshot {round_} any more. Use a later one.")
        return found.record

    def replays(self, round_: int) -> list[Replay]:
        """The replays of the base after a round. One LIST request, and one GET for each new one."""
        found = (self._read(Replay, info.key) for info in self.store.list(keys.replays(round_)))
        return [entry.record for entry in found if entry is not None]

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, kind: type[R], key: str) -> Entry[R] | None:
        known = self._entries.get(key)
        if known is not None:
            return cast(Entry[R], known)
        data = self._fetch(key)
        return None if data is None else self.remember(kind, key, data)

    def remember(self, kind: type[R], key: str, data: bytes) -> Entry[R]:
        """Keep a record, whose exact bytes are `data`, so that no later call fetches it: it was read or created."""
        entry = Entry(kind.from_bytes(data, key), sha256_hex(data))
        self._entries[key] = cast(Entry[Record], entry)
        return entry

    def _fetch(self, key: str) -> bytes | None:
        data = read_optional(self.store, key)
        if data is not None and self._on_read is not None:
            self._on_read(key, data)
        return data


def _no_begin(url: str, leg: int) -> NoSuchRun:
    return NoSuchRun(
        f"{url} holds a run whose leg {leg} has no {keys.begin(leg)}: its launcher died before the leg began, or the "
        "record was deleted. Launch the run again in a new folder."
    )


def complete_snapshots(store: Store) -> list[int]:
    """The rounds with a complete snapshot, oldest first; 0 is the first base. One LIST request."""
    return sorted(complete_takes(store))


def complete_takes(store: Store) -> dict[int, list[int]]:
    """The complete takes of every snapshot, by round, the first take first. One LIST request."""
    takes: dict[int, list[int]] = {}
    for info in store.list(keys.SNAPSHOTS):
        parsed = keys.parse_snapshot_record(info.key)
        if parsed is not None:
            takes.setdefault(parsed[0], []).append(parsed[1])
    return {round_: sorted(found) for round_, found in takes.items()}
