"""The executor contract: launch attempts of replicas somewhere, watch them, collect how they ended.

Knows no vendor and nothing of a run's bucket. An executor reports only what its vendor says.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

HANDLE_SCHEMA = 1
ENV_RANK = "REPLICA_RANK"
ENV_WORLD_SIZE = "REPLICA_WORLD_SIZE"
ENV_LEAVE_AFTER = "DILOCO_LEAVE_AFTER_S"  # a replica leaves by itself before its vendor ends it

# Exit codes of a replica; anything else is an error that may be retried.
EXIT_DONE, EXIT_ERROR, EXIT_PREEMPTED, EXIT_SUPERSEDED, EXIT_PERMANENT = 0, 1, 75, 76, 78


class ExecutorError(Exception):
    """Base of what executors raise."""


class MissingSdk(ExecutorError):
    """The vendor's SDK is not installed; the message says which extra brings it."""


class ExecutorDenied(ExecutorError):
    """The vendor refuses these credentials or this request for good. Trying again would end the same way."""


class NoCapacity(ExecutorError):
    """The vendor has no machine of this kind now. Trying later may do."""


class LaunchError(ExecutorError):
    """Some replicas could not be launched. `launched`: handles of those that were; `failed`: reason by replica."""

    def __init__(self, message: str, launched: "Sequence[ReplicaHandle]", failed: Mapping[int, str]) -> None:
        super().__init__(message)
        self.launched = list(launched)
        self.failed = dict(failed)


class ReplicaFailed(ExecutorError):
    """At least one replica ended without success; the text is its own error. `results` holds all of them."""

    def __init__(self, message: str, results: "Sequence[ReplicaResult]") -> None:
        super().__init__(message)
        self.results = list(results)


class CollectTimeout(ExecutorError, TimeoutError):
    """Replicas were still running when the time was up; nothing was cancelled. `running`: their ids."""

    def __init__(self, message: str, running: Sequence[int]) -> None:
        super().__init__(message)
        self.running = list(running)


class ReplicaState(StrEnum):
    """Where an attempt is. UNKNOWN: the vendor did not answer now; never a reason to act."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        return self not in (ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.UNKNOWN)


# What a process that ended by itself says of its attempt; any other code is FAILED, reason "exit".
BY_EXIT_CODE = {
    EXIT_DONE: (ReplicaState.SUCCEEDED, "exit"),
    EXIT_PREEMPTED: (ReplicaState.PREEMPTED, "exit"),
    EXIT_SUPERSEDED: (ReplicaState.FAILED, "superseded"),
    EXIT_PERMANENT: (ReplicaState.FAILED, "permanent"),
}


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt to launch. `secrets` reach the process by the provider's own mechanism and no record or log."""

    run_id: str
    replica_id: int
    attempt: int
    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    image: str | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplicaHandle:
    """How to reach a launched attempt: plain JSON without secrets, usable by any process."""

    executor: str
    run_id: str
    replica_id: int
    attempt: int
    native_id: str
    native: Mapping[str, Any] = field(default_factory=dict)  # per kind of executor

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": HANDLE_SCHEMA,
            "executor": self.executor,
            "run_id": self.run_id,
            "replica_id": self.replica_id,
            "attempt": self.attempt,
            "native_id": self.native_id,
            "native": dict(self.native),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Raises `ExecutorError` for a handle of another schema."""
        fields = dict(body)
        schema = fields.pop("schema", None)
        if schema != HANDLE_SCHEMA:
            raise ExecutorError(
                f"this handle has schema {schema!r}, this version reads {HANDLE_SCHEMA}. "
                "Use the version of diloco-orchestrator that wrote it."
            )
        try:
            return cls(**fields)
        except TypeError as error:
            raise ExecutorError(f"this handle is damaged: {error}.") from None


@dataclass(frozen=True)
class ReplicaStatus:
    """What the vendor says of an attempt."""

    state: ReplicaState
    reason: str = ""  # exit, permanent, superseded, oom, no_capacity, image, auth, deadline, lost, user
    exit_code: int | None = None  # negative: killed by that signal
    native_state: str = ""
    message: str = ""


@dataclass(frozen=True)
class ReplicaResult:
    """How an attempt of the low-level form ended. `value`: what the entrypoint returned, as JSON."""

    handle: ReplicaHandle
    status: ReplicaStatus
    value: Any = None
    error: str = ""


class ServerlessExecutor(Protocol):
    """Launches processes somewhere. Every method may be called by any process that has the handle.

    Methods raise `ExecutorDenied` for credentials that the vendor refuses, `ExecutorError` for what else goes wrong.
    """

    name: str
    shares_machine: bool  # replicas see this machine's disk and modules, so that no code has to travel

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """What `launch` would send, secrets redacted. Sends nothing."""
        ...

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Start one attempt, or adopt it: the same (run, replica, attempt) never runs twice, whoever asks and however
        often. A caller that dies half-way leaves at most an attempt that `find` and a second `launch` see.

        May block while the vendor looks for a machine; raises `NoCapacity` if there is none. Callable from several
        threads at once."""
        ...

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Mapping[str, Any],
        *,
        run_id: str | None = None,
        code: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[ReplicaHandle]:
        """The low-level form: call `entrypoint(**entrypoint_args)` in n processes, without coordinator or bucket.

        Raises `LaunchError` naming what was launched if only some could be."""
        ...

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """One cheap call that never blocks; a transient error is UNKNOWN, never FAILED. What the vendor has forgotten
        is CANCELLED if this object cancelled it, else PREEMPTED with reason "lost"."""
        ...

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """`poll` for a fleet, in order."""
        ...

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None, check: bool = True
    ) -> list[ReplicaResult]:
        """Wait for all to end. Raises `ReplicaFailed` if one did not succeed, unless `check=False`;
        `CollectTimeout` after `timeout` seconds, cancelling nothing. Safe to call again."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ask it to end; returns before it has. Safe to repeat; nothing happens to what is gone."""
        ...

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Output lines, while it runs and after; `follow` goes on until it ends."""
        ...

    def find(self, run_id: str) -> list[ReplicaHandle]:
        """What was launched for a run, by the vendor's own names, tags or labels: at least what has not ended."""
        ...

    def close(self) -> None:
        """Free what this object holds; never ends a replica."""
        ...


def plain_options(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """A constructor's arguments (its `locals()`) as a record may hold them, to make the same executor again: text,
    numbers and lists of them. None if others were given, without which it would not be the same. Credentials named
    `token` are the next process's own."""
    plain = (str, int, float, bool)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("self", "token", "clock") or name.startswith("_") or value is None or value in ((), [], {}):
            continue
        if isinstance(value, plain):
            found[name] = value
        elif isinstance(value, list | tuple) and all(isinstance(each, plain) for each in value):
            found[name] = list(value)
        else:
            return None
    return found


def launched_by(executor: "ServerlessExecutor", handle: ReplicaHandle) -> bool:
    """Whether a handle is one of this executor's, so that it may be asked about it."""
    part = getattr(executor, "part", None)  # of a mixed fleet
    return bool((part(handle.replica_id) if part else executor).name == handle.executor)


def hourly_usd(executor: ServerlessExecutor, request: LaunchRequest) -> float | None:
    """What the machine of this request costs an hour, where the executor knows: it may have a method of this name."""
    told = getattr(executor, "hourly_usd", None)
    return None if told is None else told(request)


class ExecutorClock(Protocol):
    """Time as executors need it."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemExecutorClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
