"""Which objects of a signed run are signed, under which names they are stored, and which attempt may sign which.

`protocol.signatures` has the formats.
"""

import re
from dataclasses import dataclass

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import Reduced
from diloco_orchestrator.protocol.kinds import Kind, Role, kind_at, most_bytes
from diloco_orchestrator.protocol.record_format import SCHEMA_VERSION, By, parse_json
from diloco_orchestrator.protocol.records import Commit, ReuploadRequest, Snapshot
from diloco_orchestrator.protocol.signatures import to_text

# -- names ------------------------------------------------------------------------------------------------------------

# Not named: run.json, which is found without a key; code, whose key is its digest; the files of snapshots, whose
# folders other libraries read, and whose digests are in a record that is named; trial objects.
_NAMED = (keys.LEGS, keys.STARTS, keys.REPLICAS, keys.ROUNDS, keys.LOG, keys.KEYS, "join/")
_NAMED_ALONE = {keys.START, keys.KL_RECORD, keys.KL_REFERENCE, keys.RETENTION}
_RECORD_OF_SNAPSHOT = re.compile(rf"{keys.SNAPSHOTS}[^/]+/{re.escape(keys.SNAPSHOT_RECORD)}(?:/.*)?", re.DOTALL)
_NAME = re.compile(r"(.+)/(?:([1-9][0-9]{0,8})\.)?([A-Za-z0-9_-]{86})", re.DOTALL)


def is_named(key: str) -> bool:
    """Whether a signed run stores the object with this key under a name that only holders of its keys can foretell.

    True as well for any object below that key in the folder.
    """
    if key.startswith(keys.SNAPSHOTS):
        return _RECORD_OF_SNAPSHOT.fullmatch(key) is not None
    return key.startswith(_NAMED) or key.partition("/")[0] in _NAMED_ALONE


def is_signed(key: str) -> bool:
    """Whether the object with this key ends with its author's signature in a signed run.

    True for records and segments. Bulk objects are pinned by digests in records, `log.txt` by nothing.
    """
    return is_named(key) and (kind_at(key) is not None or keys.parse_segment(key) is not None)


@dataclass(frozen=True)
class StoredName:
    """The name under which a signed run stores an object, in its parts. The signature may be false."""

    key: str
    take: int  # 0; above it where unsigned objects have the names before
    signature: str

    def __str__(self) -> str:
        return f"{self.key}/{f'{self.take}.' if self.take else ''}{self.signature}"


def stored_name(key: str, take: int, signature: bytes) -> str:
    """The name under which a signed run stores the object at `key`: made of key, `take` and `signature`.

    `take`: number of the name, from 0; above 0 where unsigned objects have the names before. `signature`: of
    `named_bytes`, by the key that signs names.
    """
    return str(StoredName(key, take, to_text(signature)))


def parse_stored(name: str) -> StoredName | None:
    """The parts of a stored object's name; None for another form. The signature is not checked."""
    found = _NAME.fullmatch(name)
    return None if found is None else StoredName(found[1], int(found[2] or 0), found[3])


def is_overwritten(key: str) -> bool:
    """Whether the object at `key` is overwritten by its author, as heartbeats and leases are, so that it has one name
    for good.
    """
    ends = f"/{keys.HEARTBEAT}", "/waiting.json", f".{keys.JOIN_LEASE}"
    return kind_at(key) is not None and (key.endswith(ends) or key.startswith(keys.WINDOWS))


# -- who may write what -----------------------------------------------------------------------------------------------


def _is_of_strangers(kind: Kind) -> bool:
    """Whether replicas of strangers write such records: about themselves, about their machines, and requests."""
    return kind.by_itself or Role.MACHINE in kind.writers or kind.record is ReuploadRequest


def why_not_by(who: tuple[int, int], key: str, body: bytes, *, is_invited: bool = False, rules: int = 1) -> str:
    """Reason why an attempt's signature on the object at `key` must be rejected; empty if it is valid.

    `who`: (replica id, attempt). `is_invited`: a stranger runs the replica (`RunConfig.invited`). The run's key may
    sign everything; an attempt's key what `protocol.kinds` lets attempts write, and, where the key or the record names
    its author, only in its own name. So an object that cannot be parsed is not accepted as a commit of an attempt.
    `rules`: version of the rules of signed runs: since the second neither is one of another round or schema.
    """
    kind = kind_at(key)
    if is_invited and (kind is None or not _is_of_strangers(kind)):
        return f"replica {who[0]} is a stranger's, which writes no {kind.record.__name__ if kind else 'segment'}"
    if kind is None:
        return ""  # a segment: readers compare it with the commits
    if Role.MACHINE in kind.writers:  # by the machine that runs the attempt, which has its keys
        about = keys.parse_joined(key)
        return "" if about == who else f"it is about attempt {about}, and its key that of {who}"
    if Role.ATTEMPT not in kind.writers and kind.record is not Snapshot:
        return f"attempts write no {kind.record.__name__}"
    try:
        parsed = parse_json(body)
    except ValueError:
        parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    # The fields of records that any replica may write. In a snapshot's the author is a number, in others text.
    if kind.record is Commit and rules > 1:
        (round_,) = keys.commit.parse(key) or (0,)
        for field, value in {"record": Commit.record, "schema_version": SCHEMA_VERSION, "round": round_}.items():
            if (found := fields.get(field)) != value or type(found) is not type(value):
                return f"its {field} is {str(found)[:40]!r}; a commit there has {value}"
        if len(body) > most_bytes(key):
            return "it is longer than a commit may be"
    named = {"replica_id": fields.get("rank"), "by": fields.get("by")}
    if kind.record is Snapshot:
        named = {"replica_id": fields.get("by")}
    if kind.by_itself:
        named |= {"replica_id": fields.get("replica_id"), "attempt": fields.get("attempt")}
    of_key = kind.named_in(key) if kind.by_itself or kind.record is Reduced else {}
    ours = {"replica_id": who[0], "attempt": who[1], "by": str(By(who))}
    for field, value in [*of_key.items(), *named.items()]:
        if value is None and field == "by" and kind.record is Commit:
            return "it names no author"
        if value is not None and value != ours[field]:
            return f"its {field} is {str(value)[:40]!r}, and its key that of attempt {who[1]} of replica {who[0]}"
    return ""
