"""The executor contract: launch attempts of replicas somewhere, watch them, collect how they ended.

Knows no vendor and nothing of a run's bucket. An executor reports only what its vendor says. What all executors share
(the low-level form, waiting, the exit line) is here; the process side of it is `executors.bootstrap`.
"""

import base64
import difflib
import hashlib
import io
import json
import re
import time
import uuid
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self

from executors import bootstrap
from executors.bootstrap import (
    ENV_ARGS,
    ENV_CODE,
    ENV_ENTRYPOINT,
    EXIT_LINE,
)

HANDLE_SCHEMA = 1
ENV_RANK = "REPLICA_RANK"
ENV_WORLD_SIZE = "REPLICA_WORLD_SIZE"

EXIT_PREEMPTED, EXIT_SUPERSEDED = 75, 76  # beside those that the bootstrap uses; any other is an error

_CODE_BYTES = 96 * 1024  # Linux takes 128 KiB in one environment variable
_LAUNCH_THREADS = 32
_TAIL_LINES = 30
_POLL_S = (0.02, 1.0)  # first and longest pause while collecting


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


class RemoteExecutor:
    """What executors of other machines share: the low-level form, collecting, names. They bring the rest.

    `env` of a request names everything that a replica finds in its environment beside what its image sets.
    """

    name: str
    shares_machine = False
    _clock: ExecutorClock

    @abstractmethod
    def plan(self, request: LaunchRequest) -> Mapping[str, Any]: ...

    @abstractmethod
    def launch(self, request: LaunchRequest) -> ReplicaHandle: ...

    @abstractmethod
    def poll(self, handle: ReplicaHandle) -> ReplicaStatus: ...

    @abstractmethod
    def cancel(self, handle: ReplicaHandle) -> None: ...

    @abstractmethod
    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]: ...

    @abstractmethod
    def find(self, run_id: str) -> list[ReplicaHandle]: ...

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
        """Call `entrypoint(**entrypoint_args)` in `n_replicas` machines, all launched at the same time.

        `entrypoint` must be importable in the image, or lie in the folder `code`, which then travels along.
        """
        check_options(options, ("run_id", "code", "env"))
        run = run_id or f"{self.name}-{uuid.uuid4().hex[:12]}"
        requests = low_level_requests(run, n_replicas, entrypoint, entrypoint_args, env or {}, code)
        return launch_all(self, requests)

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return [self.poll(handle) for handle in handles]

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None, check: bool = True
    ) -> list[ReplicaResult]:
        return collect_by_polling(self, handles, timeout, check, self._clock)

    def close(self) -> None:
        """Nothing is held that would need freeing; replicas run on."""


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


def check_resources(request: LaunchRequest, known: Iterable[str]) -> None:
    """Raise ValueError for a resource that the executor cannot give, naming the nearest."""
    known = sorted(known)
    for name in request.resources:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"unknown resource {name!r}: " + (f"did you mean {close[0]!r}?" if close else f"known: {known}")
            )


def run_label(run_id: str) -> str:
    """The run's id as every vendor takes it: at most 40 letters, digits and hyphens, different for different ids."""
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if slug == run_id and len(slug) <= 40:
        return slug
    return f"{slug[:27].strip('-')}-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}".lstrip("-")


def attempt_name(request: LaunchRequest) -> str:
    """The native name of an attempt, the key that makes launching idempotent. At most 63 characters, a DNS label."""
    return f"dl-{run_label(request.run_id)}-r{request.replica_id}-a{request.attempt}"


LABEL_RUN, LABEL_REPLICA, LABEL_ATTEMPT = "diloco-run", "diloco-replica", "diloco-attempt"


def attempt_labels(request: LaunchRequest) -> dict[str, str]:
    """Native labels or tags of an attempt: `find` selects by the first and reads the others. The user's come too."""
    return {
        **request.labels,
        LABEL_RUN: run_label(request.run_id),
        LABEL_REPLICA: str(request.replica_id),
        LABEL_ATTEMPT: str(request.attempt),
    }


def low_level_requests(
    run_id: str,
    n_replicas: int,
    entrypoint: str,
    entrypoint_args: Mapping[str, Any],
    env: Mapping[str, str],
    code: str | None = None,
) -> list[LaunchRequest]:
    """The requests of the low-level form: arguments travel as JSON in the environment, a small folder `code` too."""
    if n_replicas < 1:
        raise ValueError(f"n_replicas={n_replicas}: launch at least one.")
    check_entrypoint(entrypoint)
    try:
        args = json.dumps(dict(entrypoint_args))
    except (TypeError, ValueError) as error:
        raise ValueError(f"entrypoint_args are not JSON: {error}. Pass what JSON can hold.") from None
    shared = {**env, ENV_ENTRYPOINT: entrypoint, ENV_ARGS: args, ENV_WORLD_SIZE: str(n_replicas)}
    if code is not None:
        shared[ENV_CODE] = packed_folder(Path(code))
    program = Path(bootstrap.__file__).read_text()  # whole, because the image may not have this package
    return [
        LaunchRequest(
            run_id=run_id,
            replica_id=rank,
            attempt=1,
            command=["python", "-P", "-u", "-c", program],
            env={**shared, ENV_RANK: str(rank)},
        )
        for rank in range(n_replicas)
    ]


def packed_folder(folder: Path) -> str:
    """The Python files of a folder as base64 of a zip, small enough for an environment variable."""
    if not folder.is_dir():
        raise ValueError(f"code={str(folder)!r} is not a folder. Name the one that holds the entrypoint's package.")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.py")):
            archive.writestr(path.relative_to(folder).as_posix(), path.read_bytes())
    text = base64.b64encode(packed.getvalue()).decode()
    if len(text) > _CODE_BYTES:
        raise ValueError(
            f"the Python files of {folder} are {len(text)} bytes packed; {_CODE_BYTES} fit into an environment. "
            "Name a smaller folder, or put the code into the image."
        )
    return text


def launch_all(executor: ServerlessExecutor, requests: Sequence[LaunchRequest]) -> list[ReplicaHandle]:
    """Launch all at the same time, because vendors may take minutes each; `LaunchError` at the end if some failed."""
    launched, failed = [], {}
    with ThreadPoolExecutor(max_workers=min(len(requests), _LAUNCH_THREADS)) as threads:
        futures = [threads.submit(executor.launch, request) for request in requests]
    for request, future in zip(requests, futures, strict=True):
        error = future.exception()
        if error is None:
            launched.append(future.result())
        elif isinstance(error, (ExecutorError, OSError)):
            failed[request.replica_id] = str(error)
        else:
            raise error
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
