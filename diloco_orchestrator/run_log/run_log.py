"""The commit log: commits by round, each chained to the one before, and the records that stand before the first.

Reads and verifies the chain; what a commit should say is decided in `protocol.rounds`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from diloco_orchestrator.errors import NoSuchRun, ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin, Commit, Run, Start, sha256_hex
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.store.base import Store


@dataclass(frozen=True)
class CommitEntry:
    """A commit and the digest of its exact bytes."""

    commit: Commit
    sha256: str

    @property
    def position(self) -> Position:
        return Position.after(self.commit, self.sha256)


def read_optional(store: Store, key: str) -> bytes | None:
    """The object's bytes, or None if there is none."""
    try:
        return store.get(key)
    except ObjectMissing:
        return None


def read_run(store: Store) -> tuple[Run, str]:
    """run.json and its digest. Raises `NoSuchRun`."""
    data = read_optional(store, keys.RUN)
    if data is None:
        raise NoSuchRun(f"{store.url} holds no run ({keys.RUN} is missing). Check the address; a run is one folder.")
    return Run.from_bytes(data, keys.RUN), sha256_hex(data)


def read_start(store: Store) -> tuple[Start, str] | None:
    """start.json and its digest, or None while no replica has brought a model yet."""
    data = read_optional(store, keys.START)
    return None if data is None else (Start.from_bytes(data, keys.START), sha256_hex(data))


def newest_leg(store: Store) -> int:
    """The leg that began last; 0 before the first."""
    found = (keys.parse_begin(info.key) for info in store.list(keys.LEGS))
    return max((leg for leg in found if leg is not None), default=0)


def read_begin(store: Store, leg: int | None = None) -> tuple[Begin, str]:
    """How a leg (by default the newest) began, and the digest of that record."""
    key = keys.begin(leg or max(1, newest_leg(store)))
    data = store.get(key)
    return Begin.from_bytes(data, key), sha256_hex(data)


def start_position(start_sha256: str) -> Position:
    """The log's end before the first commit."""
    return Position(round=0, outer_step=0, empty_rounds=0, stop="none", sha256=start_sha256)


def leg_position(begin: Begin, start_sha256: str) -> Position:
    """Where a leg starts: after the last commit of the one before, with its own base and no stop."""
    if begin.leg == 1:
        return start_position(start_sha256)
    return Position(begin.after_round, begin.from_outer_step, empty_rounds=0, stop="none", sha256=begin.previous)


def first_digest(log: "CommitLog", begin: Begin, start: Start) -> str:
    """Of the base that a leg begins with."""
    entry = log.read(begin.from_round) if begin.from_round else None
    return entry.commit.base_digest if entry else start.base_digest


class CommitLog:
    """The commits of one run."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, round_: int) -> CommitEntry | None:
        """The commit of a round, or None while the round is open."""
        key = keys.commit(round_)
        data = read_optional(self._store, key)
        if data is None:
            return None
        commit = Commit.from_bytes(data, key)
        if commit.round != round_:
            raise RecordInvalid(f"{key} says it is round {commit.round}: it was copied there by hand.")
        return CommitEntry(commit, sha256_hex(data))

    def append(self, commit: Commit) -> bool:
        """End a round. False means that it was ended already, perhaps with another commit: read it."""
        return self._store.create(keys.commit(commit.round), commit.to_bytes())

    def after(self, position: Position) -> Iterator[CommitEntry]:
        """The commits that follow `position`, oldest first, the chain checked link by link."""
        while (entry := self.read(position.round + 1)) is not None:
            check_link(entry, position)
            yield entry
            position = entry.position


def check_link(entry: CommitEntry, position: Position) -> None:
    """Raise `RecordInvalid` unless the commit follows what stands before it."""
    if entry.commit.previous != position.sha256:
        before = f"the commit of round {position.round}" if position.round else keys.START
        raise RecordInvalid(
            f"{keys.commit(entry.commit.round)} follows {entry.commit.previous[:12]}, but {before} has sha256 "
            f"{position.sha256[:12]}: one of the two was changed after it was written."
        )
