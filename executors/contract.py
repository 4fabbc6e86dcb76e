"""The executor interface: launch attempts of replicas on some machines, poll them, collect their results.

Independent of providers and of a run's bucket. An executor reports only what its provider reports.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from diloco_orchestrator.executors.error_sections import Documented
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.executors.process_contract import EXIT_DONE, EXIT_PERMANENT, EXIT_PREEMPTED, EXIT_SUPERSEDED

HANDLE_SCHEMA = 1


class ExecutorError(Documented):
    """Base of the errors that executors raise."""


class MissingSdk(ExecutorError):
    """The provider's SDK is not installed. The message names the extra that installs it."""


class ExecutorDenied(ExecutorError):
    """The provider refuses these credentials or this request for good: the same call would fail again."""


class NoCapacity(ExecutorError):
    """The provider has no machine of the requested type now. The same call may succeed later."""


class Unavailable(ExecutorError):
    """The provider is down, overloaded or cannot be reached: the same call may succeed later.

    `retry_after_s`: pause that the provider asks for; None if it says nothing.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LaunchError(ExecutorError):
    """Some replicas could not be launched. `launched`: handles of the others; `failed`: reason by replica id."""

    def __init__(self, message: str, launched: "Sequence[ReplicaHandle]", failed: Mapping[int, str]) -> None:
        super().__init__(message)
        self.launched = list(launched)
        self.failed = dict(failed)


class ReplicaFailed(ExecutorError):
    """At least one replica ended without success; the message holds its error. `results`: of all replicas."""

    def __init__(self, message: str, results: "Sequence[ReplicaResult]") -> None:
        super().__init__(message)
        self.results = list(results)


class CollectTimeout(ExecutorError, TimeoutError):
    """Replicas were still running when the timeout expired; none was cancelled. `running`: their ids."""

    def __init__(self, message: str, running: Sequence[int]) -> None:
        super().__init__(message)
        self.running = list(running)


class ReplicaState(StrEnum):
    """State of an attempt as its provider reports it. UNKNOWN: no report, on which callers must not act."""

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
        """Whether the attempt is over. False for UNKNOWN."""
        return self not in (ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.UNKNOWN)


# State and reason of an attempt whose process exited with this code. Any other code is FAILED, reason "exit".
BY_EXIT_CODE = {
    EXIT_DONE: (ReplicaState.SUCCEEDED, "exit"),
    EXIT_PREEMPTED: (ReplicaState.PREEMPTED, "exit"),
    EXIT_SUPERSEDED: (ReplicaState.FAILED, "superseded"),
    EXIT_PERMANENT: (ReplicaState.FAILED, "permanent"),
}


def check_ranks_per_machine(given: int | None) -> None:
    """Raise ValueError for an executor's option `ranks_per_machine` that is no number of ranks."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ValueError(f"ranks_per_machine={given!r} is no number of ranks. Write 8, or leave it out: one machine.")


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt to launch. (run_id, replica_id, attempt) is its identity: executors never start it twice."""

    run_id: str
    replica_id: int
    attempt: int
    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # sent by the provider's mechanism for secrets
    timeout_s: float | None = None  # None: the executor's own limit, if it has one
    images: Mapping[str, str] = field(default_factory=dict)  # digests ("sha256:…") of container images by name
    ranks: int = 1  # processes that the replica starts itself, each of which uses one GPU where there are GPUs
    ranks_before: int | None = None  # those of the replicas with lower ids; None: one each
    place: str = ""  # name of the place to launch it at, of an executor that has several (`Places`)

    def machines(self, most: int | None) -> int:
        """The number of machines of the replica, if each takes `most` ranks at the most; None: it has one machine.

        Raises ValueError unless all machines would have equally many ranks.
        """
        count = -(-self.ranks // most) if most else 1
        if self.ranks % count:
            raise ValueError(
                f"replica {self.replica_id} has {self.ranks} ranks, which {count} machines of at most {most} "
                "(ranks_per_machine) cannot share equally. Change one of the two numbers."
            )
        return count

    def gpus(self, given: int, option: str, machines: int = 1) -> int:
        """The number of GPUs to ask for on each machine: one for each rank there, or none where `given` is 0.

        `given`: of the executor's `option`, as the user wrote it. 1 stands for one a rank, so that one executor serves
        replicas of any size. Raises ValueError for another number than the ranks: a rank without a GPU of its own
        cannot train, and a GPU without a rank is paid for nothing.
        """
        ranks = self.ranks // machines
        if given not in (0, 1, ranks):
            where, all_ = " on each machine" * (machines > 1), given * machines
            raise ValueError(
                f"{option} asks for {given} GPUs, and replica {self.replica_id} has {ranks} "
                f"rank{'s' * (ranks > 1)}{where}, each of which trains on one. Set ranks_per_replica={all_} (--ranks), "
                "or ask for one GPU, which stands for one for each rank."
            )
        return ranks if given else 0

    def pinned(self, image: str) -> str:
        """The image to send for the executor's option `image`: with its digest from `images`, if it has one there.

        Then its tag is left out: container runtimes differ about references with both, and some refuse them
        (cri-o/cri-o#8603).
        """
        if image not in self.images:
            return image
        name, _, tag = image.rpartition(":")
        return f"{name if name and '/' not in tag else image}@{self.images[image]}"


@dataclass(frozen=True)
class ReplicaHandle:
    """The address of a launched attempt: plain JSON without secrets, valid in any process."""

    executor: str  # name of the executor that launched it
    run_id: str
    replica_id: int
    attempt: int
    native_id: str  # the provider's own name for it
    native: Mapping[str, Any] = field(default_factory=dict)  # JSON; its fields differ by executor

    def to_json(self) -> dict[str, Any]:
        return {"schema": HANDLE_SCHEMA, **vars(self), "native": dict(self.native)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The handle that `to_json` encoded. Raises `ExecutorError` for a handle of another schema."""
        fields = dict(body)
        schema = fields.pop("schema", None)
        if schema != HANDLE_SCHEMA:
            raise ExecutorError(
                f"this handle has schema {schema!r}, this version reads {HANDLE_SCHEMA}. "
                "Use the version of diloco-orchestrator that wrote it."
            )
        try:
            handle = cls(**fields)
        except TypeError as error:
            raise ExecutorError(f"this handle is damaged: {error}. Launch the attempt anew.") from None
        texts = (handle.executor, handle.run_id, handle.native_id)
        numbers = (handle.replica_id, handle.attempt)
        if not all(type(each) is str for each in texts) or not all(type(each) is int for each in numbers):
            raise ExecutorError("this handle is damaged: a field has another type. Launch the attempt anew.")
        if not isinstance(handle.native, dict):
            raise ExecutorError("this handle is damaged: its native part is no object. Launch the attempt anew.")
        return handle


@dataclass(frozen=True)
class ReplicaStatus:
    """The provider's report on an attempt: state, reason, exit code, the provider's own words, and its image."""

    state: ReplicaState
    reason: str = (
        ""  # exit, permanent, superseded, oom, disk, no_capacity, refused, image, start, auth, deadline, lost, user
    )
    exit_code: int | None = None  # negative: killed by that signal; None: unknown
    native_state: str = ""
    message: str = ""
    image: str = ""  # with its digest, of a running attempt, where the provider says it without a further call

    @property
    def has_machine(self) -> bool:
        """Whether the attempt has a machine, which costs money: it runs, or the machine cannot start it."""
        return self.state is ReplicaState.RUNNING or self.reason in ("image", "start")


@dataclass(frozen=True)
class ReplicaResult:
    """The end of an attempt that `launch_replicas` launched. `value`: the entrypoint's return value, as JSON."""

    handle: ReplicaHandle
    status: ReplicaStatus
    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class Identity:
    """The means by which replicas get credentials for a bucket other than their request's env and secrets."""

    variables: frozenset[str] = frozenset()  # names of environment variables that the executor itself sets
    source: str = ""  # what else may give credentials, such as "service account 'trainer'"; empty: nothing does
    needs: str = ""  # name of the variable without which `source` gives no credentials; empty: it needs none
    advice: str = ""  # how this executor gives its replicas an identity, as the end of a sentence; empty: it cannot


class ServerlessExecutor(ABC):
    """Launches processes on some machines. Any process that has a handle may call any method with it.

    Methods raise `ExecutorDenied` for credentials that the provider refuses, `ExecutorError` for other failures. A
    subclass writes the abstract methods (`RemoteExecutor` has most of them), and overrides of the others what its
    provider can offer.
    """

    name: str
    shares_machine: bool  # replicas see this machine's disk and modules, so that no code has to travel

    @abstractmethod
    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The request that `launch` would send, as JSON, secrets redacted. Sends nothing.

        Raises ValueError for invalid options or requests.
        """

    @abstractmethod
    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Start one attempt, or adopt it if it exists: no process, and no number of calls, starts it a second time.

        May block until the provider finds a machine; raises `NoCapacity` if there is none. Several threads may call at
        once. A caller that dies halfway leaves at most an attempt that `find` and the next `launch` see.
        """

    @abstractmethod
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
        """Call `entrypoint(**entrypoint_args)` in `n_replicas` processes, without a run; returns their handles.

        `run_id`: by default a new one. `code`: a small folder with the entrypoint's package. Raises `LaunchError`,
        which holds the other handles, if only some could be launched.
        """

    @abstractmethod
    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The attempt's status, by one cheap call that never blocks. A transient error gives UNKNOWN, never FAILED.

        An attempt that the provider no longer knows is CANCELLED if this object cancelled it, else PREEMPTED with
        reason "lost".
        """

    @abstractmethod
    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The status of each attempt, in the order of `handles`, by as few calls as the provider allows."""

    @abstractmethod
    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None, check: bool = True
    ) -> list[ReplicaResult]:
        """Wait until all attempts have ended, and return their results in the order of `handles`. Safe to call again.

        `timeout`: seconds. Raises `ReplicaFailed` if one did not succeed, unless `check=False`; `CollectTimeout` after
        `timeout` seconds, cancelling nothing.
        """

    @abstractmethod
    def cancel(self, handle: ReplicaHandle) -> None:
        """Ask the provider to end the attempt; returns before it has ended. Safe to repeat, and after its end."""

    @abstractmethod
    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines of the attempt's output, during it and after. `follow`: until its end; `tail`: the last ones only."""

    @abstractmethod
    def find(self, run_id: str) -> list[ReplicaHandle]:
        """The handles of a run's attempts, found by the provider's own names or labels; ended ones may be missing."""

    def close(self) -> None:
        """Release connections and threads of this object. Never ends a replica. Default: does nothing."""
        return

    # -- what an executor may offer beside that ------------------------------------------------------------------

    # The constructor's arguments as JSON without credentials (see `plain_options`), by which another process makes the
    # executor again from `run.json`; None if JSON cannot hold them. `withheld`: names of arguments that are not there.
    options: Mapping[str, Any] | None = None
    withheld: Sequence[str] = ()
    ranks_per_machine: int | None = None  # at the most; None: all ranks of a replica are on one machine
    free_until_taken: bool = False  # a launch costs nothing until somebody's machine takes the attempt (`diloco join`)
    offers_keys: bool = False  # whether such a machine gets the keys of an attempt, as a signed run needs

    def price(self, request: LaunchRequest) -> Price | None:
        """The price of the machine of this request and its source. Default: None, it is not known."""
        return None

    def identity(self) -> Identity | None:
        """The identity of every replica that this executor launches. Default: None, nothing is known of it."""
        return None

    def check_machine(self) -> None:
        """Raise ValueError if the provider has no machine of the configured type; the text names the nearest type.

        Default: never.
        """
        return

    def use_store(self, url: str, storage_options: Mapping[str, Any]) -> None:
        """Reach machines through the run's folder at `url`, opened with `storage_options`. Called before other methods.

        Default: does nothing.
        """
        return

    def forget(self, run_id: str) -> None:
        """Delete all records of the run's attempts that the executor keeps where other processes find them.

        Safe to call twice; call it once they have ended: a running attempt is ended by it, and its machine writes
        nothing more. Raises `ExecutorError`. Default: does nothing.
        """
        return

    def part(self, attempt: LaunchRequest | ReplicaHandle) -> "ServerlessExecutor":
        """The executor that launches, or has launched, this attempt. Default: this one.

        Of several executors as one, such as a mixed fleet, it is one of these. Raises ValueError if it is none of them.
        """
        return self

    def has(self, handle: ReplicaHandle) -> bool:
        """Whether this executor, or one of its parts, launched the attempt with this handle, so that it can poll it."""
        return self.name == handle.executor


def in_order(handles: Iterable[ReplicaHandle]) -> list[ReplicaHandle]:
    """Handles sorted by replica and attempt, the first of each attempt: a provider's listing may name one twice."""
    found: dict[tuple[int, int], ReplicaHandle] = {}
    for handle in handles:
        found.setdefault((handle.replica_id, handle.attempt), handle)
    return [found[who] for who in sorted(found)]


def hourly_usd(executor: ServerlessExecutor, request: LaunchRequest) -> float | None:
    """US dollars an hour for the machine of this request, or None if the executor does not report it."""
    found = price_of(executor, request)
    return None if found is None else found.hourly_usd


def price_of(executor: ServerlessExecutor, request: LaunchRequest) -> Price | None:
    """The price of the machine of this request, with its source, or None if the executor does not report it.

    A reported price that is no number of dollars, 0 or more, counts as none.
    """
    found = executor.price(request)
    return found if found is not None and 0 <= found.hourly_usd < math.inf else None
