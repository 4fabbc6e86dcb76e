"""Several executors as one: `MixedExecutor`, in which each launches a fixed share of the replicas.

`SeveralExecutors` has what that and `places.Places` have in common: each call goes to one executor.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    in_order,
    price_of,
)
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.executors.remote_base import RemoteExecutor


class SeveralExecutors(RemoteExecutor):
    """Base class of executors that pass each call on to one of `executors`, which the method `part` chooses.

    Handles are those of the chosen executor; a subclass that renames them overrides `_ours` and `_theirs`.
    """

    def __init__(self, executors: Sequence[ServerlessExecutor]) -> None:
        super().__init__()
        self._executors = list(executors)
        self.shares_machine = all(executor.shares_machine for executor in self._executors)

    @abstractmethod
    def part(self, attempt: LaunchRequest | ReplicaHandle) -> ServerlessExecutor:
        """The executor that launches, or has launched, an attempt. Raises ValueError if none does."""

    @abstractmethod
    def has(self, handle: ReplicaHandle) -> bool:
        """Whether one of the executors launched the attempt with this handle, so that it can be polled."""

    def _ours(self, handle: ReplicaHandle, executor: ServerlessExecutor) -> ReplicaHandle:
        """The handle to record for an attempt that `executor` launched under `handle`."""
        return handle

    def _theirs(self, handle: ReplicaHandle) -> ReplicaHandle:
        """The handle under which the chosen executor knows the attempt that is recorded as `handle`."""
        return handle

    def use_store(self, url: str, storage_options: Mapping[str, Any]) -> None:
        for executor in self._executors:
            executor.use_store(url, storage_options)

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        return self.part(request).plan(request)

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        executor = self.part(request)
        return self._ours(executor.launch(request), executor)

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return self.part(handle).poll(self._theirs(handle))

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses; each executor has already turned transient errors into UNKNOWN."""
        return self.statuses(handles)

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses by one `poll_many` per executor, UNKNOWN where credentials are refused."""
        found: dict[tuple[int, int], ReplicaStatus] = {}
        for executor in self._executors:
            theirs = [handle for handle in handles if self.part(handle) is executor]
            statuses = _statuses(executor, list(map(self._theirs, theirs)))
            for handle, status in zip(theirs, statuses, strict=True):
                found[handle.replica_id, handle.attempt] = status
        return [found[handle.replica_id, handle.attempt] for handle in handles]

    def cancel(self, handle: ReplicaHandle) -> None:
        self.part(handle).cancel(self._theirs(handle))

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        return self.part(handle).logs(self._theirs(handle), follow=follow, tail=tail)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        """The handles of the run's attempts, each once, though two executors of one account both list it."""
        return in_order(self._ours(each, executor) for executor in self._executors for each in executor.find(run_id))

    def forget(self, run_id: str) -> None:
        for executor in self._executors:
            executor.forget(run_id)

    def price(self, request: LaunchRequest) -> Price | None:
        return price_of(self.part(request), request)

    def check_machine(self) -> None:
        for executor in self._executors:
            executor.check_machine()

    def close(self) -> None:
        for executor in self._executors:
            executor.close()


class MixedExecutor(SeveralExecutors):
    """Launches the first replicas by the first executor, the next ones by the second, and so on.

    Args:
        shares: (executor, number of replicas that it launches) each.

    Raises ValueError for no shares, or a number below 1.
    """

    def __init__(self, shares: Sequence[tuple[ServerlessExecutor, int]]) -> None:
        if not shares or any(count < 1 for _, count in shares):
            raise ValueError("every executor of a mixed fleet takes at least one replica.")
        super().__init__([executor for executor, _ in shares])
        self.shares = list(shares)
        self._of_replica = [executor for executor, count in shares for _ in range(count)]
        self.name = "+".join(f"{executor.name}:{count}" for executor, count in shares)

    def part(self, attempt: LaunchRequest | ReplicaHandle) -> ServerlessExecutor:
        """The executor that launches the replica of `attempt`. Raises ValueError if no share includes this replica."""
        if attempt.replica_id >= len(self._of_replica):
            known = len(self._of_replica)
            raise ValueError(f"replica {attempt.replica_id}: this fleet has executors for {known} replicas.")
        return self._of_replica[attempt.replica_id]

    def has(self, handle: ReplicaHandle) -> bool:
        return self.part(handle).name == handle.executor


def _statuses(executor: ServerlessExecutor, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
    try:
        return executor.poll_many(handles) if handles else []
    except ExecutorDenied as error:
        return [ReplicaStatus(ReplicaState.UNKNOWN, message=str(error)) for _ in handles]
