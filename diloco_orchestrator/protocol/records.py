"""What the JSON objects of a run's folder hold: schemas, canonical bytes, strict parsing.

Knows no key and no store. Every record is one line of JSON with sorted keys that starts a reader off with its name
and schema version. `write_id` is different in every write, so that a create whose reply was lost can be settled by
reading back. Wall-clock times (`at`) are for people and are never compared.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import RecordInvalid, RecordTooNew

SCHEMA_VERSION = 1

Sha256 = str  # 64 lowercase hex digits


def sha256_hex(data: bytes | memoryview) -> Sha256:
    return hashlib.sha256(data).hexdigest()


def canonical_json(body: dict[str, Any]) -> bytes:
    """Sorted keys, no spaces, UTF-8, a newline at the end."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


class Part(BaseModel):
    """A part of a record: frozen, finite, nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Record(Part):
    """A whole object in the bucket."""

    record: ClassVar[str]

    write_id: str
    at: float  # seconds since 1970 on the writer's clock

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json({"record": self.record, "schema_version": SCHEMA_VERSION, **self.model_dump(mode="json")})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Parse an object found at `where`. Raises `RecordInvalid`, or `RecordTooNew` for a later schema."""
        body = _json_object(data, where)
        name, version = body.pop("record", None), body.pop("schema_version", None)
        if name != cls.record:
            raise RecordInvalid(f"{where} holds a record named {name!r}, not {cls.record!r}: was it put there by hand?")
        if not isinstance(version, int) or version < 1:
            raise RecordInvalid(f"{where} has schema version {version!r}; versions are whole numbers from 1.")
        if version > SCHEMA_VERSION:
            raise RecordTooNew(
                f"{where} has schema version {version}; this package reads up to {SCHEMA_VERSION}. "
                "Upgrade diloco-orchestrator to the version that started the run."
            )
        try:
            return cls.model_validate_json(json.dumps(body))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RecordInvalid(
                f"{where}: field {field!r} of this {cls.record} record is wrong: {first['msg']}."
            ) from None


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise RecordInvalid(f"{where} is not JSON ({error}): it was changed after it was written.") from None
    if not isinstance(body, dict):
        raise RecordInvalid(f"{where} holds a JSON {type(body).__name__}, not an object.")
    return body


# -- the run and its legs ---------------------------------------------------------------------------------------------


class Run(Record):
    """run.json: the frozen configuration. Holds no parameters, because the launcher has no model."""

    record: ClassVar[str] = "run"
    run_id: str
    config: RunConfig
    package_version: str
    code_sha256: Sha256 | None = None  # of the archive that replicas on other machines fetch
    executor: dict[str, JsonValue] | None = None  # by name and options, to make it again; None for a user's own
    secret_names: tuple[str, ...] = ()  # of what a launcher has to hand over; their values are in no record


class ParameterInfo(Part):
    """One trainable parameter as the workload's model declares it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", …


class Start(Record):
    """start.json: what is trained and the digest of the first base."""

    record: ClassVar[str] = "start"
    run_sha256: Sha256
    parameters: tuple[ParameterInfo, ...]  # in name order
    fragments: tuple[tuple[str, ...], ...]  # parameter names, in the order in which they are synchronised
    base_digest: Sha256


class Begin(Record):
    """How a leg began."""

    record: ClassVar[str] = "begin"
    leg: int = Field(ge=1)
    after_round: int = Field(ge=0)  # the last commit before the leg
    from_round: int = Field(ge=0)  # the base after this round is the leg's first; has a snapshot
    from_outer_step: int = Field(ge=0)  # outer steps that are in that base
    outer_steps: int = Field(ge=1)  # of this leg
    guard: dict[str, JsonValue] | None = None  # folded state that the leg starts with
    by: str
    why: str
    previous: Sha256  # of the last commit before the leg; of run.json for leg 1


class Halt(Record):
    """A request to stop a leg after the open round."""

    record: ClassVar[str] = "halt"
    leg: int = Field(ge=1)
    by: str
    reason: str


class Result(Record):
    """How a leg ended."""

    record: ClassVar[str] = "result"
    leg: int = Field(ge=1)
    status: Literal["completed", "halted", "failed"]
    round: int = Field(ge=0)  # the last commit
    outer_steps: int = Field(ge=0)  # of the whole run
    reason: str
    verdict: dict[str, JsonValue] | None = None  # set when the guard fired
    commit_sha256: Sha256 = ""  # of the last commit, which no later one pins; empty if no replica ever began


# -- attempts ---------------------------------------------------------------------------------------------------------


class Intent(Record):
    """A coordinator's wish to launch an attempt; whoever creates it may launch."""

    record: ClassVar[str] = "intent"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    leg: int = Field(ge=1)
    executor: str
    why: str


class Handle(Record):
    """How to reach the launched process: the executor's own JSON, without secrets."""

    record: ClassVar[str] = "handle"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    handle: dict[str, JsonValue]
    hourly_usd: float | None = None  # what the machine costs, as far as its executor knows


class Claim(Record):
    """A process says: this attempt is me."""

    record: ClassVar[str] = "claim"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    host: str
    pid: int
    versions: dict[str, str]
    threads: int


class Cancel(Record):
    """An attempt is about to be cancelled, so its death is no preemption."""

    record: ClassVar[str] = "cancel"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    reason: str


class Exit(Record):
    """How an attempt ended, told by itself."""

    record: ClassVar[str] = "exit"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    code: int
    reason: str
    round: int = Field(ge=0)  # the last commit it had followed
    error: str | None = None  # traceback, credentials redacted


class Heartbeat(Record):
    """A sign of life; overwritten. Alive means: `counter` moves."""

    record: ClassVar[str] = "heartbeat"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    counter: int
    phase: str  # "starting", "scoring", "training", "waiting", "snapshot"
    round: int = Field(ge=0)
    inner_step: int = Field(ge=0)  # within the round
    loss: float | None = None


# -- contributions ----------------------------------------------------------------------------------------------------


class Shard(Part):
    """One payload object."""

    sha256: Sha256
    size: int  # bytes


class Payload(Part):
    """Encoded pseudo-gradient of one fragment: its parameters, flat, in name order, cut into shards."""

    codec: str
    numel: int
    shard_numel: int  # elements per shard; the last one may be shorter
    shards: tuple[Shard, ...]


class Score(Part):
    """Held-out score of the base on one share; higher is better."""

    share: int = Field(ge=0)
    sum: float | None  # over items; None: not finite
    count: int = Field(ge=1)


class Metric(Part):
    """A mean that can be merged: sum and count."""

    sum: float | None  # None: not finite
    count: int = Field(ge=0)


class Origin(Part):
    """Work that a contribution holds: of which round, and how many inner steps."""

    round: int = Field(ge=1)
    steps: int = Field(ge=0)


class Progress(Part):
    """What a restarted attempt needs to go on after this contribution."""

    cursor: dict[str, JsonValue]  # position in the data
    rng: dict[str, JsonValue]
    inner_steps: int = Field(ge=0)  # of this replica, over the whole run
    tokens: int = Field(ge=0)


class Contribution(Record):
    """A manifest: what a replica answers in a round."""

    record: ClassVar[str] = "contribution"
    round: int = Field(ge=1)
    leg: int = Field(ge=1)
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    kind: Literal["delta", "abstention", "scores"]  # scores: the closing round
    reason: str = ""  # of an abstention
    base_digest: Sha256
    fragment: int = Field(default=0, ge=0)
    payload: Payload | None = None
    state: Shard | None = None  # the author's own state after this contribution, where it was saved
    weight: float = Field(default=1.0, gt=0)
    origins: tuple[Origin, ...] = ()  # its own work and what it carries
    dropped: tuple[Origin, ...] = ()  # earlier work of the author that will never count, by its own word
    metric: str = "loss"  # what `in_loop` and `scores` measure, before the sign that makes higher better
    in_loop: Metric | None = None
    scores: tuple[Score, ...] = ()
    heldout_items: int = Field(default=0, ge=0)  # in all shares together
    metrics: dict[str, Metric] = Field(default_factory=dict)
    progress: Progress | None = None
    train_s: float = Field(default=0.0, ge=0)  # from the round's opening to this manifest, on the author's clock


# -- commits ----------------------------------------------------------------------------------------------------------


class Answer(Part):
    """One replica's answer to a round, as the writer of the commit saw it."""

    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=0)  # 0 where the manifest cannot be read
    kind: Literal["delta", "abstention", "scores", "wrong_base", "unverifiable"]
    averaged: bool
    weight: float
    origins: tuple[Origin, ...] = ()
    manifest_sha256: Sha256


class Commit(Record):
    """The end of a round. `previous` makes the log a hash chain."""

    record: ClassVar[str] = "commit"
    round: int = Field(ge=1)
    leg: int = Field(ge=1)
    fragment: int = Field(ge=0)
    outer_step: int = Field(ge=0)  # rounds applied in the whole run, this one included
    answers: tuple[Answer, ...]  # in replica_id order
    begin_sha256: Sha256
    base_digest: Sha256  # parameters and outer momenta after the round
    roster: tuple[int, ...]  # of the next round
    guard: dict[str, JsonValue] | None = None  # folded state
    verdict: dict[str, JsonValue] | None = None
    applied: bool
    empty_rounds: int = Field(ge=0)  # rounds in a row that named nobody
    stop: Literal["none", "completed", "halted", "failed"]
    by: str  # "replica 2, attempt 1" or "coordinator"
    reason: str
    previous: Sha256


# -- snapshots --------------------------------------------------------------------------------------------------------


class FileInfo(Part):
    """One file of a snapshot."""

    sha256: Sha256
    size: int


class Snapshot(Record):
    """snapshot.json, written last: the snapshot is complete."""

    record: ClassVar[str] = "snapshot"
    round: int = Field(ge=0)
    base_digest: Sha256
    files: dict[str, FileInfo]


# -- all-reduce used alone --------------------------------------------------------------------------------------------


class AllReducePart(Record):
    """One rank's part of a stand-alone all-reduce."""

    record: ClassVar[str] = "allreduce"
    round_id: int = Field(ge=0)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    shape: tuple[int, ...]
    dtype: str
    payload: Payload


class Stamp:
    """Gives each record of one process its `write_id` and `at`."""

    def __init__(self, token: str, wall_time: Callable[[], float]) -> None:
        self._token = token
        self._wall_time = wall_time
        self._count = 0

    def __call__(self) -> "StampFields":
        self._count += 1
        return {"write_id": f"{self._token}-{self._count}", "at": self._wall_time()}


class StampFields(TypedDict):
    """Keyword arguments of every record."""

    write_id: str
    at: float
