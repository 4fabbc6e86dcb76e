"""The result of a verification, and helpers that report an invalid record as a disagreement."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from diloco_orchestrator.errors import (
    ObjectMissing,
    RecordInvalid,
    RecordTooNew,
    RecordTooOld,
    SpoolFailed,
    StoreError,
)
from diloco_orchestrator.protocol.kinds import kind_at
from diloco_orchestrator.protocol.record_format import Record, canonical_json, parse_json
from diloco_orchestrator.protocol.records import Begin, Commit, Run
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.reader import parsed, read_record
from diloco_orchestrator.store.base import Store

TOLERANCE = 1e-4  # of a mean score, relative where it is above 1: machines and batch sizes round differently
_NO_MEMORY = "can't allocate memory"  # in torch's RuntimeError
_OF_THE_LOG = (Run, Start, Begin, Commit)
T = TypeVar("T")
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Disagreement:
    """The first object of a run that differs from its recomputed content: its key, and the difference as text."""

    key: str
    words: str


@dataclass
class Verification:
    """The result of `verify`: what was checked, what could not be checked, and the first disagreement."""

    url: str
    checked: Counter[str] = field(default_factory=Counter)  # how many objects, or bytes, of each kind
    unchecked: list[str] = field(default_factory=list)  # sentences
    notes: list[str] = field(default_factory=list)  # claims that differ, and whatever else the rules have dealt with
    not_derived: str = ""  # which parts need torch, where it is not installed; empty if it is
    disagreement: Disagreement | None = None
    pinned: Counter[str] = field(default_factory=Counter)  # objects that the hash chain pins, by kind
    unpinned: Counter[str] = field(default_factory=Counter)  # those that it does not, by kind
    why_unpinned: dict[str, str] = field(default_factory=dict)  # by kind
    missing: list[str] = field(default_factory=list)  # objects that others imply, and which: "key: why"
    foreign: list[str] = field(default_factory=list)  # keys that no writer of ours makes
    unreadable: list[str] = field(default_factory=list)  # records that count for nothing: "key: why"
    signed_by: str = ""  # public key of a signed run, as run.json names it
    unsigned: list[str] = field(default_factory=list)  # objects that do not exist for a signed run: "name: why"
    without_exit: list[str] = field(
        default_factory=list
    )  # claimed attempts that left no exit record, and what is known
    bases: set[int] = field(default_factory=set)  # rounds whose base was derived or is in an intact snapshot

    @property
    def agrees(self) -> bool:
        """Whether nothing disagrees and nothing was left out for want of torch."""
        return self.disagreement is None and not self.not_derived

    def to_json(self) -> dict[str, Any]:
        found = self.disagreement
        return {
            "url": self.url,
            "agrees": self.agrees,
            "checked": dict(self.checked),
            "not_derived": self.not_derived,
            "unchecked": self.unchecked,
            "notes": self.notes,
            "pinned": dict(self.pinned),
            "unpinned": [
                {"kind": k, "count": n, "why": self.why_unpinned[k]} for k, n in sorted(self.unpinned.items())
            ],
            "missing": self.missing,
            "foreign": self.foreign,
            "unreadable": self.unreadable,
            "without_exit": self.without_exit,
            "signed_by": self.signed_by,
            "unsigned": self.unsigned,
            "bases": sorted(self.bases),
            "disagreement": None if found is None else {"key": found.key, "words": found.words},
        }


class Differs(Exception):
    """The object `key` differs from its recomputed content, which ends the verification. `words`: the difference."""

    def __init__(self, key: str, words: str) -> None:
        super().__init__(words)
        self.found = Disagreement(key, words)


def is_of_this_reader(error: Exception) -> bool:
    """Whether an error is of whoever reads, not of the run: of its line, its credentials, its disk or its memory.

    Whatever else than "there is no such object" a store answers says nothing about the object.
    """
    if isinstance(error, StoreError):
        return not isinstance(error, ObjectMissing)
    return isinstance(error, SpoolFailed | OSError | MemoryError) or _NO_MEMORY in str(error)


def equal(key: str, what: str, found: Any, expected: Any, source: str) -> None:
    """Raise `Differs` unless `found`, the value of `what` in the object `key`, is `expected`, which `source` gives."""
    if found != expected:
        raise Differs(key, f"{what} is {_short(found)}; {source} says {_short(expected)}")


def check_canonical(key: str, data: bytes) -> None:
    """Raise `Differs` if a record's bytes are not those that this package writes for its content."""
    try:
        canonical = canonical_json(parse_json(data)) == data
    except (ValueError, TypeError, AttributeError):
        return  # not JSON, which the parser reports
    if not canonical:
        raise Differs(key, "is not written as this package writes records: it was changed by hand")


def optional(key: str, read: Callable[[], T]) -> T:
    """The result of `read`, which reads the object `key`. Raises `Differs` if that is no valid record of its kind.

    Raises `RecordTooNew` or `RecordTooOld` if the run's configuration, its start, a leg (start or resume to stop) or a
    commit is of another version. Any other record of another version is treated as one that a stranger wrote.
    """
    try:
        return read()
    except (RecordInvalid, UnicodeDecodeError) as error:
        kind = kind_at(key)
        if isinstance(error, RecordTooNew | RecordTooOld) and kind is not None and kind.record in _OF_THE_LOG:
            raise
        raise Differs(key, str(error)) from None


def needed(key: str, read: Callable[[], T | None], why: str) -> T:
    """The result of `read`, which reads the object `key`. Raises `Differs` if that is invalid or missing.

    `why`: the reason why it must exist.
    """
    found = optional(key, read)
    if found is None:
        raise Differs(key, f"is missing, though {why}")
    return found


def parse(kind: type[R], key: str, data: bytes) -> R:
    """The record in `data`. Raises `Differs` if it cannot be parsed or is not in canonical form."""
    record = optional(key, lambda: parsed(kind, key, data).record)
    check_canonical(key, data)
    return record


def fetch(store: Store, key: str, why: str) -> bytes:
    """The bytes of an object. Raises `Differs` if it does not exist. `why`: completes "is missing, though …"."""
    try:
        return read_record(store, key)
    except ObjectMissing:
        raise Differs(key, f"is missing, though {why}") from None


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:12] if isinstance(value, str) and len(text) == 64 else text if len(text) < 200 else f"{text[:200]}…"
