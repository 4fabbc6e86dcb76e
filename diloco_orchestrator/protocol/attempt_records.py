"""Schemas of the JSON records about attempts, one attempt being one launched process of a replica.

The executor's records (intent, handle, cancel), the process's own (claim, heartbeat, exit) and, for an attempt that a
joined machine runs (`diloco join`), its offer, and who took, renewed, cancelled and ended it.
"""

import re
from typing import ClassVar

from pydantic import Field, JsonValue

from diloco_orchestrator.protocol.record_format import Record

BY_HAND = "by hand"  # in an intent, in place of the executor: the user starts the process, and there is no coordinator


class Intent(Record):
    """attempts/<attempt>/intent.json: announces an attempt's launch; only the coordinator that created it launches."""

    record: ClassVar[str] = "intent"
    later_fields: ClassVar[frozenset[str]] = frozenset({"placed"})
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    leg: int = Field(ge=1)
    executor: str  # its name; of an executor that has several places, the name of the attempt's place
    why: str
    placed: str | None = None  # why at that place; None: it was the only one
    claim_token: str = Field(default="", pattern="^([0-9a-f]{16})?$")  # in the key of its claim; see `keys.claim`


class Handle(Record):
    """attempts/<attempt>/handle.json: the executor's JSON by which any process polls or cancels the attempt."""

    record: ClassVar[str] = "handle"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    handle: dict[str, JsonValue]
    hourly_usd: float | None = None  # price of the machine; None if its executor does not know it


class Waiting(Record):
    """attempts/<attempt>/waiting.json, overwritten: the provider's reason why a launched attempt has not started.

    Empty once it has a machine. Valid until the attempt sends a heartbeat or ends. Credentials are redacted.
    """

    record: ClassVar[str] = "waiting"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    reason: str


class Claim(Record):
    """attempts/<attempt>/claim.<token>.json: created by the process that runs the attempt; a second process fails to.

    `<token>` is random and stored in the attempt's intent, the record that announces it, so nobody can create the claim
    before the intent exists.
    """

    record: ClassVar[str] = "claim"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    host: str
    pid: int
    versions: dict[str, str]
    threads: int
    hardware: dict[str, str] = Field(default_factory=dict)  # "cpu" and "gpu", by the names that the system gives them


VACATED = "vacated"  # how the reason of such a cancel record begins


class Cancel(Record):
    """attempts/<attempt>/cancel.json: a coordinator is about to cancel the attempt, so its end is no preemption."""

    record: ClassVar[str] = "cancel"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    reason: str

    @property
    def vacates(self) -> bool:
        """Whether the run was scaled down: the attempt publishes what it has trained and leaves by itself."""
        return self.reason.startswith(VACATED)


class Exit(Record):
    """attempts/<attempt>/exit.json: how an attempt ended (code, reason, error), written by its own process."""

    record: ClassVar[str] = "exit"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    code: int
    reason: str
    round: int = Field(ge=0)  # the last commit it had followed
    error: str | None = None  # traceback, credentials redacted


class Heartbeat(Record):
    """attempts/<attempt>/heartbeat.json, overwritten: the attempt counts as alive while `counter` keeps increasing."""

    record: ClassVar[str] = "heartbeat"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    counter: int
    phase: str  # "starting", "scoring", "training", "publishing", "waiting" or "snapshot"
    round: int = Field(ge=0)
    inner_step: int = Field(ge=0)  # within the round
    loss: float | None = None


# -- machines that join -----------------------------------------------------------------------------------------------
# Keys of the records about an offer hold the first digits of its digest, which nobody knows before the offer is there.


class Offer(Record):
    """Record join/attempts/<name>/offer.json: an attempt that a machine running `diloco join` may execute; secrets are
    encrypted.
    """

    record: ClassVar[str] = "offer"
    later_fields: ClassVar[frozenset[str]] = frozenset({"sealed"})
    run_id: str
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    command: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str]
    secret_names: tuple[str, ...] = ()  # variables that the machine must have
    code: str | None = None  # key of the code archive that the machine fetches; None: the command needs none
    timeout_s: float | None = Field(default=None, gt=0)
    sealed: dict[str, str] | None = None  # of a signed run: the attempt's keys for each machine, by its user's identity


class Invitation(Record):
    """Record join/invited/…: an identity (key pair), whose holder may run the replica; the same under join/revoked/…
    ends that.
    """

    record: ClassVar[str] = "invitation"
    epoch: int = Field(ge=1)  # of the run's keys, with which it ends
    replica_id: int = Field(ge=0)
    identity: str = Field(pattern="^[0-9a-f]{32}$")  # digest of `public`
    public: str  # to which the keys of the replica's attempts are sealed; as `diloco key --me` prints it
    not_after: float  # seconds since 1970, on the clock of whoever launches attempts and gives it no keys later


class Grant(Record):
    """Record join/granted/…: temporary credentials of the store for the machine of an invited replica, encrypted to the
    identity of its invitation.
    """

    record: ClassVar[str] = "grant"
    epoch: int = Field(ge=1)
    replica_id: int = Field(ge=0)
    identity: str = Field(pattern="^[0-9a-f]{32}$")
    number: int = Field(ge=1)  # in the order in which they were minted; the link holds the first ones as well
    sealed: str  # `join.link.Credentials` as JSON
    not_after: float  # seconds since 1970, at which the store ends them
    lasts_s: float = Field(gt=0)  # that the store was asked for, for these and those to come
    role: str | None = None  # that was assumed for them; None: a federation token


class Window(Record):
    """Record join/windows/…, overwritten: the requests to the store that the machine of an invited replica may send,
    signed for it by whoever supervises the run, and encrypted to the identity of its invitation.
    """

    record: ClassVar[str] = "window"
    epoch: int = Field(ge=1)
    replica_id: int = Field(ge=0)
    identity: str = Field(pattern="^[0-9a-f]{32}$")
    sealed: str  # `store.presigned.Requests`, compressed
    lasts_s: float = Field(gt=0)  # for which each is signed, and those to come will be


class Taken(Record):
    """join/attempts/<name>/<offer>.taken.json: a machine executes the offered attempt, or its offer is withdrawn."""

    record: ClassVar[str] = "taken"
    by: str  # the machine's random id; empty: the offer was withdrawn before a machine had taken it
    host: str = ""
    pid: int = 0  # of `diloco join`


class Lease(Record):
    """join/attempts/<name>/<offer>.lease.json, overwritten: the joined machine is alive while `counter` increases."""

    record: ClassVar[str] = "lease"
    counter: int = Field(ge=1)


class JoinCancel(Record):
    """join/attempts/<name>/<offer>.cancel.json: a request to the joined machine to end the attempt that it runs."""

    record: ClassVar[str] = "join_cancel"


class JoinEnd(Record):
    """join/attempts/<name>/<offer>.end.json: how the attempt ended, by its machine or by a coordinator for it."""

    record: ClassVar[str] = "join_end"
    state: str  # a value of `ReplicaState` that is an end
    reason: str
    code: int | None = None  # exit code; negative: killed by that signal; None: unknown
    message: str = ""


_LONGEST = 400  # characters of a reason


# Errors by which something outside the process fails: a hub, a bucket, a connection. The same call may work later. A
# training thread that is stuck may wait for such a thing too, in a line that many waits have in common.
_OUTSIDE = re.compile(
    r"OSError|EOFError|gaierror|Connect|Disconnect|Timeout|TimedOut|Unavailable|Network|Protocol|Http|HTTP|SSL|Pipe"
    r"|IncompleteRead|TooManyRequests|Throttl|^TrainingStuck$|^(requests|urllib3|httpx|httpcore|aiohttp|botocore|google|azure|grpc)\."
)


def fault_in(ended: Exit) -> str:
    """Type and line of the error that ended an attempt, such as "ValueError at train.py:31", from its traceback.

    Equal for two attempts that failed in the same way, whatever the messages say. Empty without a traceback, and where
    any error of the chain is one by which something outside the process fails.
    """
    text = ended.error or ""
    places = re.findall(r'^  File "(?:.*/)?(.+?)", line (\d+)', text, re.MULTILINE)
    kinds = re.findall(r"^([A-Za-z_][\w.]*)(?::|$)", text, re.MULTILINE)
    if not places or not kinds or any(_OUTSIDE.search(kind) for kind in kinds):
        return ""
    return f"{kinds[-1].rpartition('.')[2]} at {':'.join(places[-1])}"


def reason_of(ended: Exit) -> str:
    """The end of an attempt as one line: reason in its exit record, and last line of its traceback if any."""
    lines = [line for line in (ended.error or "").splitlines() if line and not line[0].isspace()]
    cause = re.sub(r"^(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_]\w*(?::|$))", "", lines[-1]) if lines else ""  # without its module
    if not cause or cause == ended.reason:
        return ended.reason
    kind = cause.partition(":")[0]  # which the reason has, too, also after the number of a rank
    names = ended.reason.endswith(kind)
    words = ended.reason.removesuffix(kind) + cause if names else f"{ended.reason}: {cause}"
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"
