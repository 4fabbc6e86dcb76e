"""Records together with the digests of their exact bytes, which the hash chain of the log consists of."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, Record
from diloco_orchestrator.protocol.rounds import Position

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Entry(Generic[R]):
    """A record and the sha256 of its exact bytes."""

    record: R
    sha256: str


@dataclass(frozen=True)
class CommitEntry:
    """A commit and the sha256 of its exact bytes."""

    commit: Commit
    sha256: str

    @property
    def position(self) -> Position:
        """The position in the commit log after this commit."""
        return Position.after(self.commit, self.sha256)


def check_link(entry: CommitEntry, position: Position) -> None:
    """Raise `RecordInvalid` unless the commit's `previous` is `position.sha256`, the digest of the record before it."""
    if entry.commit.previous != position.sha256:
        before = f"the commit of round {position.round}" if position.round else keys.START
        raise RecordInvalid(
            f"{keys.commit(entry.commit.round)} follows {entry.commit.previous[:12]}, but {before} has sha256 "
            f"{position.sha256[:12]}: one of the two was changed after it was written."
        )
