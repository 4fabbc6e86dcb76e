"""A run whose replicas train in this process, one after another or as threads: for tests of what `attach` is given."""

import random
from collections.abc import Callable
from typing import Any

from protocol_fleet import FAST, together

from diloco_orchestrator.clock import SystemClock, ThreadBackground
from diloco_orchestrator.config import make_config
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Contribution, Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext


class SmallRun:
    """A run in memory. `leaving`: ids of replicas that are asked to leave."""

    def __init__(self, replicas: int = 1, store: Store | None = None, **settings: Any) -> None:
        self.store: Store = store or MemoryStore()
        self.replicas = replicas
        self.leaving: set[int] = set()
        values = {"entrypoint": "m:f", "replicas": replicas, "rounds": 2, "sync_every": 3, "timing": FAST}
        values |= {"quorum": "all", **settings}
        stamp = Stamp("founder", lambda: 0.0)
        create_run(self.store, Run(**stamp(), run_id="r", config=make_config(values), package_version="0"), "t", stamp)

    def context(self, replica_id: int = 0) -> ReplicaContext:
        stamp = Stamp(f"token{replica_id}-{random.random()}", lambda: 0.0)
        leaving = lambda: replica_id in self.leaving  # noqa: E731
        return ReplicaContext(
            claim_attempt(self.store, replica_id, None, SystemClock(), stamp, leaving, ThreadBackground())
        )

    def train(self, workload: Callable[[ReplicaContext], Any]) -> list[Any]:
        """What the workload returns in every replica, each in a thread."""
        return together([lambda i=i: workload(self.context(i)) for i in range(self.replicas)])  # type: ignore[misc]

    def commits(self) -> list[Commit]:
        return RunReader(self.store).commits()

    def manifest(self, round_: int, replica_id: int = 0) -> Contribution:
        key = keys.contribution(round_, replica_id)
        return Contribution.from_bytes(self.store.get(key), key)
