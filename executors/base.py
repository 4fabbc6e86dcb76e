"""The executor contract: launch attempts of replicas somewhere, watch them, collect how they ended.

Knows no vendor and nothing of a run's bucket. An executor reports only what its vendor says. What all executors share
(the low-level form, waiting, the exit line) is here; the process side of it is `executors.bootstrap`.
"""

import difflib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

HANDLE_SCHEMA = 1
EXIT_LINE = "DILOCO_EXIT "
ENV_ENTRYPOINT = "DILOCO_ENTRYPOINT"
ENV_ARGS = "DILOCO_ENTRYPOINT_ARGS"
ENV_RANK = "REPLICA_RANK"
ENV_WORLD_SIZE = "REPLICA_WORLD_SIZE"

# Exit codes of a replica; anything else is an error that may be retried.
EXIT_DONE, EXIT_ERROR, EXIT_PREEMPTED, EXIT_SUPERSEDED, EXIT_PERMANENT = 0, 1, 75, 76, 78

_TAIL_LINES = 30
_POLL_S = (0.02, 1.0)  # first and longest pause while collecting


class ExecutorError(Exception):
    """Base of what executors raise."""


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
    """Launches processes somewhere. Every method may be called by any process that has the handle."""

    name: str

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """What `launch` would send, secrets redacted. Sends nothing."""
        ...

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Start one attempt, or adopt it: the same (run, replica, attempt) never runs twice, whoever asks and however
        often. A caller that dies half-way leaves at most an attempt that `find` and a second `launch` see."""
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
        """One cheap call that never blocks; a transient error is UNKNOWN, never FAILED."""
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
        """Everything launched for a run, by the vendor's own names, tags or labels, ended or not."""
        ...

    def close(self) -> None:
        """Free what this object holds; never ends a replica."""
        ...


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


# -- shared by all executors ------------------------------------------------------------------------------------------

_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def check_entrypoint(entrypoint: str) -> None:
    """Raise ValueError unless it reads "package.module:function", offering the right form."""
    if _ENTRYPOINT.fullmatch(entrypoint):
        return
    module, _, function = entrypoint.rpartition(".")
    offer = f"{module}:{function}" if _ENTRYPOINT.fullmatch(f"{module}:{function}") else "package.module:function"
    raise ValueError(f"entrypoint {entrypoint!r} is not of the form 'package.module:function'. Write {offer!r}.")


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise TypeError for an option that the executor does not have, naming the nearest."""
    known = sorted(known)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
            raise TypeError(f"unknown option {name!r} of launch_replicas: {hint}")


def low_level_requests(
    run_id: str, n_replicas: int, entrypoint: str, entrypoint_args: Mapping[str, Any], env: Mapping[str, str]
) -> list[LaunchRequest]:
    """The requests of the low-level form: arguments travel as JSON in the environment."""
    if n_replicas < 1:
        raise ValueError(f"n_replicas={n_replicas}: launch at least one.")
    check_entrypoint(entrypoint)
    try:
        args = json.dumps(dict(entrypoint_args))
    except (TypeError, ValueError) as error:
        raise ValueError(f"entrypoint_args are not JSON: {error}. Pass what JSON can hold.") from None
    shared = {**env, ENV_ENTRYPOINT: entrypoint, ENV_ARGS: args, ENV_WORLD_SIZE: str(n_replicas)}
    return [
        LaunchRequest(
            run_id=run_id,
            replica_id=rank,
            attempt=1,
            command=["python", "-P", "-m", "executors.bootstrap"],
            env={**shared, ENV_RANK: str(rank)},
        )
        for rank in range(n_replicas)
    ]


def launch_all(executor: ServerlessExecutor, requests: Sequence[LaunchRequest]) -> list[ReplicaHandle]:
    """Launch one after the other; `LaunchError` at the end if some failed."""
    launched, failed = [], {}
    for request in requests:
        try:
            launched.append(executor.launch(request))
        except (ExecutorError, OSError) as error:
            failed[request.replica_id] = str(error)
    if failed:
        words = "; ".join(f"replica {replica_id}: {reason}" for replica_id, reason in failed.items())
        raise LaunchError(f"{len(failed)} of {len(requests)} replicas were not launched: {words}", launched, failed)
    return launched


def collect_by_polling(
    executor: ServerlessExecutor,
    handles: Sequence[ReplicaHandle],
    timeout: float | None,
    check: bool,
    clock: ExecutorClock,
) -> list[ReplicaResult]:
    """`collect` for any executor."""
    deadline = None if timeout is None else clock.now() + timeout
    pause = _POLL_S[0]
    while True:
        statuses = executor.poll_many(handles)
        running = [h.replica_id for h, s in zip(handles, statuses, strict=True) if not s.state.ended]
        if not running:
            break
        if deadline is not None and clock.now() >= deadline:
            raise CollectTimeout(f"replicas {running} still run after {timeout:g} s; nothing was cancelled.", running)
        clock.sleep(pause)
        pause = min(1.5 * pause, _POLL_S[1])
    results = [_result(executor, handle, status) for handle, status in zip(handles, statuses, strict=True)]
    failed = [r for r in results if r.status.state is not ReplicaState.SUCCEEDED]
    if check and failed:
        raise ReplicaFailed("\n\n".join(_failure_text(result) for result in failed), results)
    return results


def _result(executor: ServerlessExecutor, handle: ReplicaHandle, status: ReplicaStatus) -> ReplicaResult:
    lines = list(executor.logs(handle, tail=_TAIL_LINES))
    told = parse_exit_line(lines) or {}
    if status.state is ReplicaState.SUCCEEDED:
        return ReplicaResult(handle, status, value=told.get("value"))
    error = told.get("traceback") or told.get("error") or "\n".join(lines)
    return ReplicaResult(handle, status, error=str(error))


def _failure_text(result: ReplicaResult) -> str:
    status = result.status
    how = f"{status.state}" + (f" ({status.message})" if status.message else "")
    return f"replica {result.handle.replica_id}, attempt {result.handle.attempt}: {how}\n{result.error}".rstrip()


def parse_exit_line(lines: Iterable[str]) -> dict[str, Any] | None:
    """What the last `DILOCO_EXIT {json}` among these lines says, or None."""
    found = None
    for line in lines:
        if line.startswith(EXIT_LINE):
            try:
                found = json.loads(line[len(EXIT_LINE) :])
            except ValueError:
                continue
    return found if isinstance(found, dict) else None
