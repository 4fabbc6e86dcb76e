"""`without_exit`: the claimed attempts that left no exit record, and what other records say of their ends.

That is no fault by itself, since a killed machine leaves none, and nothing pins exit records: one that was removed
together with its log is seen here only.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import JoinEnd
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.reader import Reader
from diloco_orchestrator.store.base import Store

R = TypeVar("R", bound=Record)

_LONGEST = 300  # characters of a record that are repeated


@dataclass
class AttemptFolders:
    """Attempts and legs as a listing of the run's folder shows them."""

    records: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # names, by replica and attempt
    join_ends: dict[tuple[int, int], str] = field(default_factory=dict)  # keys of the ends that joined machines wrote
    legs: dict[int, set[str]] = field(default_factory=dict)  # names of records, by leg

    def add(self, key: str) -> None:
        """Note the key if it is a record of an attempt, of a joined machine or of a leg."""
        if (attempt := keys.parse_attempt(key)) is not None:
            self.records.setdefault((attempt.replica_id, attempt.attempt), set()).add(attempt.name)
        elif (joined := keys.parse_join_record(key)) is not None:
            if joined.record == keys.JOIN_END and joined.who is not None:
                self.join_ends[joined.who] = key
        elif (leg := keys.parse_leg(key)) is not None:
            self.legs.setdefault(leg[0], set()).add(leg[1])

    def has_result(self, leg: int) -> bool:
        """Whether a leg has a result.json."""
        return "result.json" in self.legs.get(leg, ())


def without_exit(store: Store, found: AttemptFolders, newest_leg: int) -> list[str]:
    """A sentence about each claimed attempt that has no exit record, in order. Raises the store's errors.

    Each costs at most three requests: the next attempt's intent, its own cancel record and its machine's record.
    """
    newest: dict[int, int] = {}
    for replica_id, attempt in found.records:
        newest[replica_id] = max(attempt, newest.get(replica_id, 0))
    return [
        _sentence(
            store,
            found,
            replica_id,
            attempt,
            may_run=attempt == newest[replica_id] and not found.has_result(newest_leg),
        )
        for (replica_id, attempt), names in sorted(found.records.items())
        if keys.CLAIM in names and "exit.json" not in names
    ]


def _sentence(store: Store, found: AttemptFolders, replica_id: int, attempt: int, *, may_run: bool) -> str:
    names = found.records[replica_id, attempt]
    causes = ["it still runs"] if may_run else []
    if "log.txt" in names:
        causes += ["its machine was lost after it wrote log.txt", "exit.json was removed"]
    else:
        causes += ["its machine was lost", "exit.json and log.txt were removed"]
    either = ", ".join(causes[:-1]) + f", or {causes[-1]}"
    said = [f"; {words}" for words in _said(store, found, replica_id, attempt)]
    return f"replica {replica_id}, attempt {attempt}: no exit record: {either}{''.join(said)}"


def _said(store: Store, found: AttemptFolders, replica_id: int, attempt: int) -> Iterator[str]:
    """Statements of other records about an attempt's end, each with the record's name."""
    records = AttemptRecords(store)
    if "cancel.json" in found.records[replica_id, attempt]:
        key = keys.cancel(replica_id, attempt)
        yield _quoted(key, records.cancel(replica_id, attempt), lambda it: it.reason)
    if (ended := found.join_ends.get((replica_id, attempt))) is not None:
        yield _quoted(ended, _join_end(store, ended), lambda it: f"{it.state}, {it.message or it.reason}")
    following: Collection[str] = found.records.get((replica_id, attempt + 1), ())
    if keys.INTENT in following:
        key = keys.intent(replica_id, attempt + 1)
        yield _quoted(key, records.intent(replica_id, attempt + 1), lambda it: it.why)


def _quoted(key: str, record: R | None, words: Callable[[R], str]) -> str:
    return f"{key} cannot be read" if record is None else f"{key} says: {words(record)[:_LONGEST]}"


def _join_end(store: Store, key: str) -> JoinEnd | None:
    try:
        found = Reader(store).read(JoinEnd, key)
    except RecordInvalid:
        return None
    return None if found is None else found.record
