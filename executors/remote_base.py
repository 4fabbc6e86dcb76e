"""What executors of other machines share: the low-level form, native names and labels, checks.

Each vendor's file brings the rest: build the request, send it, translate the reply.
"""

import hashlib
import re
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from executors.contract import (
    ENV_LEAVE_AFTER,
    ExecutorClock,
    LaunchRequest,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from executors.function_launch import check_options, collect_by_polling, launch_all, low_level_requests
from executors.names import unknown_name

_LEAVE_BEFORE_S = 300.0  # enough to publish what is trained and a large optimizer's state
LABEL_RUN, LABEL_REPLICA, LABEL_ATTEMPT = "diloco-run", "diloco-replica", "diloco-attempt"


class RemoteExecutor:
    """Base of an executor of other machines. A request's `env` and `secrets` are all that a replica finds in its
    environment beside what its image sets."""

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


def env_within(request: LaunchRequest, limit_s: float) -> dict[str, str]:
    """The request's environment, and when to leave, for vendors that end an attempt at their limit without a notice."""
    leave_s = limit_s - min(_LEAVE_BEFORE_S, 0.1 * limit_s)
    return {**request.env, ENV_LEAVE_AFTER: f"{leave_s:g}"}


def check_resources(request: LaunchRequest, known: Iterable[str]) -> None:
    """Raise ValueError for a resource that the executor cannot give, naming the nearest."""
    known = sorted(known)
    for name in request.resources:
        if name not in known:
            raise ValueError(unknown_name("resource", name, known))


def run_label(run_id: str) -> str:
    """The run's id as every vendor takes it: at most 40 letters, digits and hyphens, different for different ids."""
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if slug == run_id and len(slug) <= 40:
        return slug
    return f"{slug[:27].strip('-')}-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}".lstrip("-")


def attempt_name(request: LaunchRequest) -> str:
    """The native name of an attempt, the key that makes launching idempotent. At most 63 characters, a DNS label."""
    return f"dl-{run_label(request.run_id)}-r{request.replica_id}-a{request.attempt}"


def attempt_labels(request: LaunchRequest) -> dict[str, str]:
    """Native labels or tags of an attempt: `find` selects by the first and reads the others. The user's come too."""
    return {
        **request.labels,
        LABEL_RUN: run_label(request.run_id),
        LABEL_REPLICA: str(request.replica_id),
        LABEL_ATTEMPT: str(request.attempt),
    }
