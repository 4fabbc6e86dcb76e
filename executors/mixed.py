"""`MixedExecutor`: several executors as one; each launches its share of the replicas."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_orchestrator.executors.contract import (
    ChecksMachines,
    ExecutorDenied,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    forget_run,
    give_store,
    in_order,
    price_of,
)
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.executors.remote_base import RemoteExecutor


class MixedExecutor(RemoteExecutor):
    """Launches the first replicas by the first executor, the next ones by the second, and so on.

    Args:
        shares: (executor, number of replicas that it launches) each.

    Raises ValueError for no shares, or a number below 1.
    """

    def __init__(self, shares: Sequence[tuple[ServerlessExecutor, int]]) -> None:
        if not shares or any(count < 1 for _, count in shares):
            raise ValueError("every executor of a mixed fleet takes at least one replica.")
        super().__init__()
        self.shares = list(shares)
        self._of_replica = [executor for executor, count in shares for _ in range(count)]
        self._executors = [executor for executor, _ in shares]
        self.name = "+".join(f"{executor.name}:{count}" for executor, count in shares)
        self.shares_machine = all(executor.shares_machine for executor in self._executors)

    def use_store(self, url: str, storage_options: Mapping[str, Any]) -> None:
        for executor in self._executors:
            give_store(executor, url, storage_options)

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        return self.part(request.replica_id).plan(request)

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        return self.part(request.replica_id).launch(request)

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return self.part(handle.replica_id).poll(handle)

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """`statuses` with its errors: each part has already turned transient ones into UNKNOWN."""
        return self.statuses(handles)

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Statuses in the order of `handles`: one `poll_many` per executor, UNKNOWN where credentials are refused."""
        found: dict[tuple[int, int], ReplicaStatus] = {}
        for executor in self._executors:
            theirs = [handle for handle in handles if self.part(handle.replica_id) is executor]
            statuses = _statuses(executor, theirs)
            for handle, status in zip(theirs, statuses, strict=True):
                found[handle.replica_id, handle.attempt] = status
        return [found[handle.replica_id, handle.attempt] for handle in handles]

    def cancel(self, handle: ReplicaHandle) -> None:
        self.part(handle.replica_id).cancel(handle)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        return self.part(handle.replica_id).logs(handle, follow=follow, tail=tail)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        found = [handle for executor in self._executors for handle in executor.find(run_id)]
        return in_order(found)

    def forget(self, run_id: str) -> None:
        for executor in self._executors:
            forget_run(executor, run_id)

    def price(self, request: LaunchRequest) -> Price | None:
        return price_of(self.part(request.replica_id), request)

    def check_machine(self) -> None:
        for executor in self._executors:
            if isinstance(executor, ChecksMachines):
                executor.check_machine()

    def close(self) -> None:
        for executor in self._executors:
            executor.close()

    def part(self, replica_id: int) -> ServerlessExecutor:
        """The executor that launches a replica. Raises ValueError for a replica beyond all shares."""
        if replica_id >= len(self._of_replica):
            raise ValueError(f"replica {replica_id}: this fleet has executors for {len(self._of_replica)} replicas.")
        return self._of_replica[replica_id]


def _statuses(executor: ServerlessExecutor, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
    try:
        return executor.poll_many(handles) if handles else []
    except ExecutorDenied as error:
        return [ReplicaStatus(ReplicaState.UNKNOWN, message=str(error)) for _ in handles]
