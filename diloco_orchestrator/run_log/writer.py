"""`Writer`: creates the records of a run in the name of one author. All records are written through it.

`protocol.kinds` has the table of who may write which kind.
"""

from typing import Self, TypeVar

from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.kinds import Role, kind_of
from diloco_orchestrator.protocol.record_format import By, Record
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.store.base import Store

R = TypeVar("R", bound=Record)


class Writer:
    """Writes records into `store` as `role`, or as one attempt of a replica (`of_attempt`).

    Every method raises `TypeError`, a bug of ours, for a record that this author may not write and for a key of another
    kind, and the store's errors. A create whose reply was lost is read back by the store.
    """

    def __init__(self, store: Store, role: Role, who: tuple[int, int] | None = None) -> None:
        self._store = store
        self._role = role
        self._who = who

    @classmethod
    def of_attempt(cls, store: Store, replica_id: int, attempt: int) -> Self:
        """The writer of the records that one attempt of a replica writes about itself."""
        return cls(store, Role.ATTEMPT, (replica_id, attempt))

    @classmethod
    def of(cls, store: Store, by: By) -> Self:
        """The writer of those records that `by`, the attempt or coordinator which a commit names, may write."""
        return cls(store, Role.COORDINATOR if by.who is None else Role.ATTEMPT, by.who)

    def create(self, record: R, at: str = "") -> Entry[R] | None:
        """Create a record; returns it with the digest of its bytes, None if an object has that key already.

        `at`: the key, for records whose fields do not name every part of it, such as a claim with its token.
        """
        key, data = self._key(record, at), record.to_bytes()
        return Entry(record, sha256_hex(data)) if self._store.create(key, data) else None

    def overwrite(self, record: Record, at: str = "") -> None:
        """Write a heartbeat or a lease over the one before. `at`: the key, where the record does not determine it."""
        self._store.put(self._key(record, at), record.to_bytes())

    def _key(self, record: Record, at: str) -> str:
        kind, name = kind_of(record), type(record).__name__
        if not {self._role, Role.ANYBODY} & set(kind.writers):
            raise TypeError(f"{self._role} writes no {name}; {' and '.join(kind.writers)} may, says protocol.kinds")
        if kind.by_itself and (whose := (getattr(record, "replica_id"), getattr(record, "attempt"))) != self._who:  # noqa: B009
            raise TypeError(f"{name} of replica and attempt {whose} is that attempt's to write, not of {self._who}")
        named = kind.key(record)
        key = at or named or ""
        if not kind.has(key) or named not in (None, key):
            raise TypeError(f"{key!r} is no key of this {name}: {named or kind.forms[0].text} is")
        return key
