"""A coordinator on a stage: an executor that follows a script, a store in memory, a clock moved by hand."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protocol_fleet import Fleet, play, together

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.retrying import RetryingStore
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from executors.contract import (
    ExecutorError,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)

STAMP = Stamp("test", lambda: 0.0)


class ScriptedExecutor(ServerlessExecutor):
    """Says of every attempt what the test says; everything runs until then."""

    name = "scripted"
    shares_machine = True

    def __init__(self) -> None:
        self.polls = 0  # calls of `poll_many`
        self.launched: list[tuple[int, int]] = []
        self.cancelled: list[tuple[int, int]] = []
        self.states: dict[tuple[int, int], ReplicaStatus] = {}
        self.refuse_launch: dict[tuple[int, int], str | Exception] = {}
        self.refuse_cancel = 0
        self.denied: ExecutorError | None = None
        self.output: list[str] = []  # of every attempt

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        return {}

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        who = request.replica_id, request.attempt
        if who in self.refuse_launch:
            refusal = self.refuse_launch[who]
            raise refusal if isinstance(refusal, Exception) else ExecutorError(refusal)
        if who not in self.launched:
            self.launched.append(who)
        return ReplicaHandle(self.name, request.run_id, *who, native_id=f"{who}")

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        self.polls += 1
        if self.denied is not None:
            raise self.denied
        return [self.poll(handle) for handle in handles]

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return self.states.get((handle.replica_id, handle.attempt), ReplicaStatus(ReplicaState.RUNNING))

    def cancel(self, handle: ReplicaHandle) -> None:
        if self.refuse_cancel:
            self.refuse_cancel -= 1
            raise ExecutorError("the vendor is away")
        self.cancelled.append((handle.replica_id, handle.attempt))

    def launch_replicas(self, *args: Any, **options: Any) -> list[ReplicaHandle]:
        raise NotImplementedError

    def collect(self, *args: Any, **options: Any) -> list[Any]:
        raise NotImplementedError

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        return iter(self.output if tail is None else self.output[-tail:])

    def find(self, run_id: str) -> list[ReplicaHandle]:
        if self.denied is not None:
            raise self.denied
        return [ReplicaHandle(self.name, run_id, *who, native_id=f"{who}") for who in self.launched]

    def close(self) -> None:
        pass


class CountingStore(MemoryStore):
    """Counts calls by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.calls["GET"] += 1
        return super().get(key, start, end)

    def put(self, key: str, data: bytes) -> None:
        self.calls["PUT"] += 1
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self.calls["PUT"] += 1
        return super().create(key, data)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self.calls["LIST"] += 1
        return super().list(prefix, start_after)


class Scene:
    """A created run, a scripted executor and a clock."""

    def __init__(self, **settings: Any) -> None:
        self.engine = CountingStore()
        timing = {"poll_s": 0.01, "round_timeout_s": 20.0, "startup_timeout_s": 20.0}  # on the clock below
        self.fleet = Fleet(store=self.engine, **{"replicas": 2, "rounds": 2, "timing": timing, **settings})
        self.executor, self.clock = ScriptedExecutor(), ManualClock()
        self.secrets: dict[str, str] = {}

    def coordinator(self) -> Coordinator:
        store = RetryingStore(self.engine, self.clock, random.Random(0))
        return Coordinator(RunReader(store), Means(self.executor, self.clock, STAMP, secrets=self.secrets))

    def steps(self, coordinator: Coordinator, seconds: float, every: float = 1.0) -> bool:
        """Look every second; whether the leg is over at the end."""
        over = coordinator.step()
        for _ in range(int(seconds / every)):
            self.clock.advance(every)
            over = coordinator.step()
        return over

    def ends(
        self, replica_id: int, attempt: int, state: ReplicaState, reason: str = "", code: int | None = None
    ) -> None:
        self.executor.states[replica_id, attempt] = ReplicaStatus(state, reason, code)

    def complete(self, rounds: int = 3) -> None:
        """Play so many rounds, by default the whole run, without the executor's processes; snapshots as they are due.

        A stop, if there is one by then, gets its result.
        """
        participants = self.fleet.join_all()
        for _ in range(rounds):
            if not participants[0].open.stopped:
                play(participants, [1.0, 1.0])
                for participant in participants:
                    participant.write_snapshot_if_due()
        if participants[0].open.stopped:
            together([p.finish_leg for p in participants])

    def exit(self, replica_id: int, attempt: int, code: int) -> None:
        record = Exit(**STAMP(), replica_id=replica_id, attempt=attempt, code=code, reason="told", round=1)
        self.fleet.store.create(keys.exit_record(replica_id, attempt), record.to_bytes())
