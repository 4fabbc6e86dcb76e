"""`take_stock`: lists which objects of a run the hash chain pins, which it does not, and which are missing or foreign.

An object is pinned if the chain has its digest, or if its content was recomputed from what the chain has. Whoever can
write to the bucket can change or remove the others unnoticed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.inspection.verify.findings import Verification
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import JoinEnd
from diloco_orchestrator.protocol.kinds import kind_at
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.protocol.records import Snapshot
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.segments import ROUNDS, TAIL_ROUNDS
from diloco_orchestrator.snapshots.file_plan import why_no_file
from diloco_orchestrator.store.base import Store

_NAMED = 20  # foreign or missing objects that are listed one by one

IsOne = Callable[[str], object]  # a truth value: whether a key is of a kind


def _about_attempts(name: str) -> IsOne:
    return lambda key: (attempt := keys.parse_attempt(key)) is not None and attempt.name == name


# Which keys are of a kind whose objects need not be pinned, and why they are not; the first matching row decides.
_UNPINNED: Mapping[str, tuple[IsOne, str]] = {
    "intents": (_about_attempts(keys.INTENT), "written before the attempt did anything that the log names"),
    "handles": (_about_attempts(keys.HANDLE), "how to reach a process, for coordinators only"),
    "heartbeats": (_about_attempts(keys.HEARTBEAT), "overwritten while the attempt lives"),
    "providers' words": (keys.waiting.parse, "why an attempt has not started, for people; overwritten"),
    "cancels": (keys.cancel.parse, "a coordinator's request"),
    "exits": (_about_attempts(keys.EXIT), "how an attempt says that it ended, after its last contribution"),
    "attempt logs": (_about_attempts(keys.LOG_TEXT), "output, for people"),
    "claims": (_about_attempts(keys.CLAIM), "of attempts that no commit names"),
    "halt requests": (keys.halt.parse, "whoever may write can make one; the commit that obeys it says so"),
    "scale requests": (keys.scale.parse, "how many replicas somebody asked for; who took part is in the commits"),
    "replicas that are out": (
        keys.out.parse,
        "a coordinator's notice that it launches a replica no more, so that nobody waits for it",
    ),
    "joined machines": (
        lambda key: keys.parse_join_record(key) or keys.is_join_piece(key),
        "how attempts are handed to machines that join, and their output",
    ),
    "invitations": (
        keys.parse_invited,
        "whom a launcher lets run a replica, or no longer, and what it needs; attempts' keys follow from it",
    ),
    "other starts": (keys.start_take.parse, "beside start.json; the one that the log begins with is checked"),
    "what replicas began with": (
        lambda key: keys.began.parse(key) or keys.follows.parse(key) or key == keys.LINK,
        "which start counts follows from it, and the log from that start",
    ),
    "late manifests": (keys.contribution.parse, "came after their round's commit"),
    "payloads put again": (
        lambda key: (payload := keys.parse_payload(key)) is not None and payload.take > 1,
        "checked against the manifest where they were needed",
    ),
    "payloads and states": (
        lambda key: keys.parse_payload(key) or keys.parse_state(key),
        "of contributions that no commit names",
    ),
    "checks": (keys.checked.parse, "what replicas found in payloads; checked where a commit names them"),
    "reduced shards": (
        lambda key: keys.reduced.parse(key) or keys.parse_reduced_shard(key),
        "averages that any reader derives from payloads; nothing is derived from them",
    ),
    "unfounded commits": (keys.unfounded.parse, "that a coordinator found commits to name what is not there"),
    "wants": (keys.parse_want, "requests for a payload"),
    "replays": (keys.is_replay, "of an earlier version; nobody reads them"),
    "keys": (
        lambda key: keys.rotation.parse(key) or keys.colleague.parse(key),
        "certificates and rotations, which the run's key has signed",
    ),
    "retention": (
        lambda key: key == keys.RETENTION,
        "what somebody asked to delete, beyond the run's own settings",
    ),
    "trials of the store": (
        lambda key: key.startswith((keys.PROBE, keys.DOCTOR)),
        "written before anything rests on it, and left where they may not be deleted",
    ),
}
_WHY_NOT: Mapping[str, str] = {
    **{kind: why for kind, (_, why) in _UNPINNED.items()},
    "snapshot files": "compared with their record alone; whether they hold the base needs torch",
    "snapshot records": "when and by whom a snapshot was written; its files and base are checked",
    "unfinished snapshots": "files without a snapshot.json, which nobody loads",
}


@dataclass
class NamedByTheLog:
    """Objects that the commits of a run name, collected by `verify`."""

    attempts: dict[tuple[int, int], int] = field(default_factory=dict)  # by round and replica: of a readable manifest
    manifests: set[tuple[int, int]] = field(default_factory=set)  # (round, replica), also those that nobody can read
    code_sha256: str | None = None
    legs: int = 1  # that have begun
    snapshot_files: Mapping[str, set[str]] = field(default_factory=dict)  # by a version's folder: names in its record
    start: Start | None = None


def take_stock(store: Store, named: NamedByTheLog, done: Verification) -> None:
    """Sort every object of the run into `done.pinned`, `done.unpinned` and `done.foreign`; add missing ones.

    One LIST of the whole folder, a GET for each record that the chain does not pin, and for the intent of each claim,
    and up to three requests for each attempt without an exit record. Raises the store's errors.
    """
    claimed = {(replica_id, attempt) for (_, replica_id), attempt in named.attempts.items()}
    attempts = AttemptFolders()
    snapshots: dict[str, set[str]] = {}
    segments: list[keys.SegmentKey] = []
    records: dict[str, type[Record]] = {}
    of_attempts = AttemptRecords(store)
    for info in store.list(""):
        key = info.key
        if _is_foreign_claim(key, of_attempts):
            done.foreign.append(key)
            continue
        attempts.add(key)
        if (record := unpinned_record(key)) is not None:
            records[key] = record
        if (segment := keys.parse_segment(key)) is not None:
            segments.append(segment)
        elif (of_snapshot := keys.parse_snapshot_file(key)) is not None and not keys.is_replay(key):
            folder = keys.snapshot(of_snapshot[0], "", of_snapshot[1])
            snapshots.setdefault(folder, set()).add(key.removeprefix(folder))
            continue
        kind, is_pinned = _kind(key, named, claimed)
        if kind is None:
            done.foreign.append(key)
        else:
            (done.pinned if is_pinned else done.unpinned)[kind] += 1
    for folder, names in sorted(snapshots.items()):
        strangers = foreign_files(names, named.snapshot_files.get(folder), named.start)
        done.foreign += sorted(f"{folder}{name}" for name in strangers)
        if keys.SNAPSHOT_RECORD in names:
            (done.unpinned if done.not_derived else done.pinned)["snapshot files"] += len(names - strangers) - 1
            done.unpinned["snapshot records"] += 1
            if folder not in named.snapshot_files:  # of a version that nobody had to load
                records[f"{folder}{keys.SNAPSHOT_RECORD}"] = Snapshot
        else:
            done.unpinned["unfinished snapshots"] += len(names - strangers)
            done.missing.append(f"{folder}{keys.SNAPSHOT_RECORD}: {len(names)} files of the snapshot are there")
    done.missing += [*_missing_of_attempts(attempts.records, of_attempts), *_missing_segments(segments)]
    done.unreadable = [f"{key}: {why}" for key in sorted(records) if (why := _why_unreadable(store, key, records[key]))]
    done.without_exit = without_exit(store, attempts, named.legs)
    done.why_unpinned = {kind: _WHY_NOT[kind] for kind in sorted(done.unpinned)}


def _is_foreign_claim(key: str, records: AttemptRecords) -> bool:
    """Whether `key` is the key of a claim with another token than the attempt's intent names.

    False for a key of another object, and if the intent is missing or unreadable.
    """
    attempt = keys.parse_attempt(key)
    if attempt is None or attempt.name != keys.CLAIM:
        return False
    named = records.claim_key(attempt.replica_id, attempt.attempt)
    return named is not None and named != key


def foreign_files(names: set[str], in_record: set[str] | None, start: Start | None) -> set[str]:
    """Names of files in a snapshot version's folder that its record does not list.

    `names`: the folder's files. `in_record`: those that the record lists; None without a record. Then the files count
    that no snapshot of a run with the start record `start` has; none does if `start` is None.
    """
    if in_record is not None:
        return names - in_record
    return {name for name in names - {keys.SNAPSHOT_RECORD} if start is not None and why_no_file(name, start)}


def shortened(found: Iterable[str]) -> list[str]:
    """The first of many names, and the number of the others, as text."""
    listed = list(found)
    more = [f"and {len(listed) - _NAMED} more"] if len(listed) > _NAMED else []
    return listed[:_NAMED] + more


def _kind(key: str, named: NamedByTheLog, claimed: set[tuple[int, int]]) -> tuple[str | None, bool]:
    """The kind of an object, and whether commits pin its digest; None for an object that this package never writes."""
    if (pinned := _pinned_kind(key, named, claimed)) is not None:
        return pinned, True
    if (halt := keys.halt.parse(key)) is not None and not 1 <= halt[0] <= named.legs:
        return None, False
    return unpinned_kind(key), False


def unpinned_kind(key: str) -> str | None:
    """The kind of an object that need not be pinned; None for other keys, those that this package never writes too."""
    return next((kind for kind, (is_one, _) in _UNPINNED.items() if is_one(key)), None)


def _pinned_kind(key: str, named: NamedByTheLog, claimed: set[tuple[int, int]]) -> str | None:
    """The kind of an object whose digest commits pin; None for any other."""
    if key in (keys.RUN, keys.START) or keys.commit.parse(key):
        return "run, start and commits"
    if key in (keys.KL_RECORD, keys.KL_REFERENCE):
        return "drift reference"
    if keys.parse_segment(key) is not None:
        return "segments of the log"
    if named.code_sha256 is not None and key == keys.code(named.code_sha256):
        return "code archive"
    if (leg := keys.begin.parse(key) or keys.result.parse(key)) is not None:
        return "legs and results" if 1 <= leg[0] <= named.legs else None
    if (attempt := keys.parse_attempt(key)) is not None:
        is_named = attempt.name == keys.CLAIM and (attempt.replica_id, attempt.attempt) in claimed
        return "claims" if is_named else None
    if keys.contribution.parse(key) in named.manifests:
        return "manifests"
    owner: tuple[int, int, int] | None = keys.parse_state(key)  # replica, round, attempt
    if (payload := keys.parse_payload(key)) is not None and payload.take == 1:
        owner = payload.replica_id, payload.round, payload.attempt
    if owner is not None and named.attempts.get((owner[1], owner[0])) == owner[2]:
        return "payloads and states"
    return None


def unpinned_record(key: str) -> type[Record] | None:
    """The record class at a key of an attempt, joined machine, request to halt, start record or vote; else None."""
    kinds = (keys.parse_attempt, keys.parse_join_record, keys.halt.parse, keys.began.parse, keys.follows.parse)
    if not keys.is_start(key) and all(parse(key) is None for parse in kinds):
        return None
    kind = kind_at(key)
    return None if kind is None else kind.record


def _why_unreadable(store: Store, key: str, kind: type[Record]) -> str:
    """Reason why a record cannot be read; empty if it can, or is gone."""
    try:
        read(store, kind, key)
    except RecordInvalid as error:
        return str(error)
    return ""


def _missing_of_attempts(attempts: Mapping[tuple[int, int], set[str]], records: AttemptRecords) -> list[str]:
    """Keys of records of attempts that are missing although records written after them exist."""
    found = []
    newest: dict[int, int] = {}
    launched = any(keys.HANDLE in names for names in attempts.values())  # by a coordinator, not by hand
    for (replica_id, attempt), names in attempts.items():
        if keys.INTENT in names:
            newest[replica_id] = max(attempt, newest.get(replica_id, 0))
    for (replica_id, attempt), names in sorted(attempts.items()):
        there = ", ".join(sorted(names))
        if keys.INTENT not in names:
            found.append(f"{keys.intent(replica_id, attempt)}: {there} of the attempt counts for nothing without it")
        if keys.CLAIM not in names and names & {keys.HEARTBEAT, keys.EXIT, keys.LOG_TEXT}:
            claim = records.claim_key(replica_id, attempt) or keys.claim(replica_id, attempt, "")
            found.append(f"{claim}: {there} of the attempt is there")
        if launched and keys.CLAIM in names and keys.HANDLE not in names:
            why = "its claim is there; a coordinator that died before it noted its launch leaves none either"
            found.append(f"{keys.handle(replica_id, attempt)}: {why}")
        if keys.LOG_TEXT in names and not names & {keys.EXIT, "cancel.json"}:  # a coordinator keeps a hung one's output
            found.append(f"{keys.exit_record(replica_id, attempt)}: log.txt, which is written just before it, is there")
        if keys.EXIT in names:
            before = ((keys.LOG_TEXT, keys.log_text), (keys.HEARTBEAT, keys.heartbeat))
            found += [f"{key(replica_id, attempt)}: exit.json is there" for name, key in before if name not in names]
    for replica_id, last in sorted(newest.items()):
        gap = next((number for number in range(1, last) if (replica_id, number) not in attempts), None)
        if gap is not None:
            found.append(f"{keys.intent(replica_id, gap)}: attempt {last} of the replica is there, and does not count")
    return found


def _missing_segments(segments: list[keys.SegmentKey]) -> list[str]:
    """Missing segments, objects that join the commits of ten or a hundred rounds, though a later one exists."""
    commits = {(each.first, each.last) for each in segments if each.kind == "commits"}
    newest = max((last for _, last in commits), default=0)
    closed = newest // ROUNDS * ROUNDS
    found = []
    for first in range(1, newest + 1, TAIL_ROUNDS):
        span = (first, first + TAIL_ROUNDS - 1)
        long = (first // ROUNDS * ROUNDS + 1, (first // ROUNDS + 1) * ROUNDS)
        if span not in commits and long not in commits:
            wanted = long if first <= closed else span
            key = str(keys.SegmentKey(*wanted, "commits"))
            if key not in found:
                found.append(key)
    return [f"{key}: a later segment is there" for key in found]


# -- attempts without an exit record ----------------------------------------------------------------------------------


R = TypeVar("R", bound=Record)

_LONGEST = 300  # characters of a record that are repeated


@dataclass
class AttemptFolders:
    """The attempts and legs (start or resume to stop) of a run, as found in a listing of its folder."""

    records: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # names, by replica and attempt
    join_ends: dict[tuple[int, int], str] = field(default_factory=dict)  # keys of the ends that joined machines wrote
    legs: dict[int, set[str]] = field(default_factory=dict)  # names of records, by leg

    def add(self, key: str) -> None:
        """Add the record with this key, if it is about an attempt, a joined machine, or a start, resume or stop."""
        if (attempt := keys.parse_attempt(key)) is not None:
            self.records.setdefault((attempt.replica_id, attempt.attempt), set()).add(attempt.name)
        elif (joined := keys.parse_join_record(key)) is not None:
            if joined.record == keys.JOIN_END and joined.who is not None:
                self.join_ends[joined.who] = key
        elif (leg := keys.parse_leg(key)) is not None:
            self.legs.setdefault(leg[0], set()).add(leg[1])

    def has_result(self, leg: int) -> bool:
        """Whether a leg (start or resume to stop) has a result.json."""
        return "result.json" in self.legs.get(leg, ())


def without_exit(store: Store, found: AttemptFolders, newest_leg: int) -> list[str]:
    """A sentence about each claimed attempt without an exit record, in order. Raises the store's errors.

    At most three requests each: the record that announces the next attempt, its own cancel record and its machine's.
    `newest_leg`: number of the last leg (start or resume to stop): without a result, its newest attempts may still run.
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
        if keys.CLAIM in names and keys.EXIT not in names
    ]


def _sentence(store: Store, found: AttemptFolders, replica_id: int, attempt: int, *, may_run: bool) -> str:
    names = found.records[replica_id, attempt]
    causes = ["it still runs"] if may_run else []
    if keys.LOG_TEXT in names:
        causes += ["its machine was lost after log.txt was written", "exit.json was removed"]
    else:
        causes += ["its machine was lost", "exit.json and log.txt were removed"]
    either = ", ".join(causes[:-1]) + f", or {causes[-1]}"
    said = [f"; {words}" for words in _said(store, found, replica_id, attempt)]
    return f"replica {replica_id}, attempt {attempt}: no exit record: {either}{''.join(said)}"


def _said(store: Store, found: AttemptFolders, replica_id: int, attempt: int) -> Iterator[str]:
    """Sentences from other records about the end of an attempt without exit record, each with the record's name."""
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
        found = read(store, JoinEnd, key)
    except RecordInvalid:
        return None
    return None if found is None else found.record
