"""Records paired with the sha256 of their exact bytes, by which the commits form a hash chain."""

import logging
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import By, Record
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.protocol.void_commits import NOBODY, no_commit
from diloco_orchestrator.protocol.weights import averaging_nobody, why_void

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Entry(Generic[R]):
    """A record and the sha256 of its exact bytes."""

    record: R
    sha256: str


@dataclass(frozen=True)
class CommitEntry:
    """A commit with the sha256 of its bytes: as stored (`written`), and as readers use it (`commit`).

    The two differ for a void commit, which contradicts the log: readers use one that averages nobody.
    """

    commit: Commit  # as readers use it: `protocol.weights`, `protocol.void_commits`
    sha256: str
    written: Commit  # as its bytes are
    void: str = ""  # why it averages nobody although its bytes list contributions
    contradicts: str = ""  # how it contradicts the log before it, so that it stops nothing either
    unreadable: str = ""  # why its bytes are no commit of its round; `written` then stands for it
    unlinked: bool = False  # whether it names another record than the one before it

    @classmethod
    def of(cls, commit: Commit, sha256: str, config: RunConfig) -> Self:
        """The entry of a commit whose bytes have digest `sha256`. `config`: of the run, which fixes the weights."""
        void = why_void(commit, config)
        if not void:
            return cls(commit, sha256, commit)
        log.warning("round %d: its commit is void and averages nobody: %s", commit.round, void)
        return cls(averaging_nobody(commit, void), sha256, commit, void)

    @classmethod
    def of_no_commit(cls, round_: int, sha256: str, why: str, by: By = NOBODY) -> Self:
        """The entry for an object that does not parse as the commit of `round_`, its key.

        `why`: the parse error. `by`: the author whose key has signed it.
        """
        stands_for_it = no_commit(round_, why, by)
        return cls(stands_for_it, sha256, stands_for_it, unreadable=why)

    def voided(self, commit: Commit, why: str, unlinked: bool = False) -> Self:
        """This entry marked void, because its commit contradicts the log; readers use `commit`, which averages nobody,
        instead.

        `why`: the contradiction. `unlinked`: whether it is that the commit does not name the digest of the one before.
        """
        return replace(self, commit=commit, void=why, contradicts=why, unlinked=unlinked)

    def counted(self, commit: Commit) -> Self:
        """This entry with `commit` in place of its own, whose weights are wrong: a copy that averages no
        contribution.
        """
        return replace(self, commit=commit)

    @property
    def position(self) -> Position:
        """The position in the commit log after this commit."""
        return Position.after(self.commit, self.sha256)


def check_link(entry: CommitEntry, position: Position) -> None:
    """Raise `RecordInvalid` unless `entry` names the digest of the record before it, which `position` has."""
    if entry.commit.previous != position.sha256:
        raise changed(entry.commit.round, entry.commit.previous, position.sha256)


def changed(round_: int, previous: str, sha256: str) -> RecordInvalid:
    """The error for a changed record of the log: round `round_` names digest `previous`, the record has `sha256`."""
    before = f"the commit of round {round_ - 1}" if round_ > 1 else keys.START
    return RecordInvalid(
        f"{keys.commit(round_)} follows {previous[:12]}, but {before} has sha256 {sha256[:12]}: one of the two was "
        "changed after it was written."
    )
