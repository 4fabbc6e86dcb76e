"""`RemoteExecutor`: common parts of executors of other machines: `launch_replicas`, `collect`, names and labels.

Each provider's module adds the rest: build the request, send it, translate the reply.
"""

import hashlib
import re
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_orchestrator.executors.clock import ExecutorClock, SystemExecutorClock
from diloco_orchestrator.executors.contract import LaunchRequest, ReplicaHandle, ReplicaResult, ReplicaStatus
from diloco_orchestrator.executors.function_launch import (
    check_options,
    collect_by_polling,
    function_requests,
    launch_all,
)
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.executors.process_contract import ENV_LEAVE_AFTER

_LEAVE_BEFORE_S = 300.0  # long enough to publish what is trained and a large optimizer's state
LABEL_RUN, LABEL_REPLICA, LABEL_ATTEMPT = "diloco-run", "diloco-replica", "diloco-attempt"


class RemoteExecutor:
    """Base class of executors of other machines: gives `launch_replicas`, `collect`, `poll_many`, `price` and `close`.

    A subclass has a `name` and the six methods below; docs/write_an_executor.md shows one. A replica's environment is
    the request's `env` and `secrets` over the variables of its image.
    """

    name: str
    shares_machine = False
    _clock: ExecutorClock = SystemExecutorClock()  # a test's constructor sets another
    _given_usd: float | None = None  # hourly_usd=, which wins over every list

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
        """Call `entrypoint(**entrypoint_args)` on `n_replicas` machines, all launched at once.

        The entrypoint's module must be in the image, or in the small folder `code`, which is sent along. Raises
        `LaunchError`, which holds the other handles, if only some could be launched.
        """
        check_options(options, ("run_id", "code", "env"))
        run = run_id or f"{self.name}-{uuid.uuid4().hex[:12]}"
        return launch_all(self, function_requests(run, n_replicas, entrypoint, entrypoint_args, env or {}, code))

    def price(self, request: LaunchRequest) -> Price | None:
        """The price that the user gave; else that of the provider's list."""
        return self._listed_price() if self._given_usd is None else Price(self._given_usd, "given as hourly_usd")

    def hourly_usd(self, request: LaunchRequest) -> float | None:
        """US dollars an hour for the machine of this request, or None if its price is not known."""
        found = self.price(request)
        return None if found is None else found.hourly_usd

    def _listed_price(self) -> Price | None:
        """The price of one replica's machine in the provider's list, or None if it is not known."""
        return None

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return [self.poll(handle) for handle in handles]

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None, check: bool = True
    ) -> list[ReplicaResult]:
        return collect_by_polling(self, handles, timeout, check, self._clock)

    def close(self) -> None:
        """Does nothing: no connection is kept open. Replicas run on."""


def env_within(request: LaunchRequest, limit_s: float) -> dict[str, str]:
    """The request's environment, and the seconds after which the replica leaves by itself.

    That is some minutes before the provider ends the attempt at `limit_s` without a notice.
    """
    leave_s = limit_s - min(_LEAVE_BEFORE_S, 0.1 * limit_s)
    return {**request.env, ENV_LEAVE_AFTER: f"{leave_s:g}"}


def run_label(run_id: str) -> str:
    """The run's id in a form that every provider accepts: at most 40 lowercase letters, digits and hyphens.

    Different ids have different labels: an id that has to be changed or cut gets a digest appended.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if slug == run_id and 0 < len(slug) <= 40:
        return slug
    return f"{slug[:27].strip('-')}-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}".lstrip("-")


def attempt_name(attempt: LaunchRequest | ReplicaHandle) -> str:
    """The provider's name for an attempt, a DNS label of at most 63 characters. It makes launching idempotent."""
    return f"dl-{run_label(attempt.run_id)}-r{attempt.replica_id}-a{attempt.attempt}"


def attempt_labels(attempt: LaunchRequest | ReplicaHandle) -> dict[str, str]:
    """The provider's labels or tags for an attempt: `find` selects by the run's and reads the others."""
    return {
        LABEL_RUN: run_label(attempt.run_id),
        LABEL_REPLICA: str(attempt.replica_id),
        LABEL_ATTEMPT: str(attempt.attempt),
    }
