"""Counts the store requests of runs on virtual time, launcher and screen included: rounds of any length in seconds.

`live_requests.py` calls it, and says what is counted. Everything is the project's own but the machine: coordinator and
status of a launcher, replicas from their claims to their exit records, and the store with its HTTP client, whose
requests are counted in front of an S3 server on loopback. Only the clock is virtual: it jumps to whatever waits next,
so a request takes no time on it. Training is a gradient of one line that sleeps for as long as an inner step takes.
"""

import random
from collections.abc import Mapping
from typing import Any

from count_requests import BUCKET, RUN, URL, CountingServer, Request, counting
from s3_server import S3Server, running_server
from simulation import SimExecutor, Simulation
from simulation_plan import calm
from virtual_time import VirtualClock

from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.retrying import RetryPolicy
from diloco_orchestrator.supervision.coordinator import Coordinator, Means

_POLL_S = 1.0  # between two steps of a launcher, as in `Run.wait`


class CountedRun(Simulation):
    """A run whose replicas differ in each inner step by up to `spread`, a share of it, over a store that is counted."""

    def __init__(
        self, server: S3Server, launcher: CountingServer, replicas: CountingServer, config: RunConfig, pace: Any
    ) -> None:
        self._given, self._pace = config, pace
        super().__init__(calm(replicas=config.replicas, rounds=config.rounds, paces=(1.0,) * config.replicas))
        self._server, self._launcher, self._replicas = server, launcher, replicas
        stamp = self.stamp(VirtualClock(self.time, self.time.current))
        create_run(self._opened(launcher), Run(**stamp(), run_id=RUN, config=config, package_version="0"), "t", stamp)

    def _config(self) -> RunConfig:
        return self._given

    def step_s(self, replica_id: int) -> float:
        return float(self._pace(replica_id))

    def _opened(self, front: CountingServer, clock: VirtualClock | None = None) -> Store:
        options = self._server.options(endpoint_url=f"http://127.0.0.1:{front.server_port}")
        return open_store(URL, options, clock=clock, rng=random.Random(0))

    def network(self, clock: VirtualClock, retry: RetryPolicy | None = None) -> Store:
        return self._opened(self._replicas, clock)

    def _supervise(self, clock: VirtualClock) -> None:
        """What `diloco run` does: a step of the coordinator, then the screen, by readings that both share."""
        reader = RunReader(SeenStore.of(self._opened(self._launcher, clock), clock))
        coordinator = Coordinator(reader, Means(SimExecutor(self), clock, self.stamp(clock)))
        while not coordinator.step():
            reader.status()
            clock.sleep(_POLL_S)


def play(
    replicas: int, rounds: int, steps: int, step_s: float, spread: float
) -> tuple[Mapping[str, list[Request]], list[float]]:
    """(the requests of a run by who sent them, in the order of their replies; the virtual time of each commit)."""
    draws = [random.Random(replica_id) for replica_id in range(replicas)]

    def pace(replica_id: int) -> float:
        return step_s * (1 + spread * draws[replica_id].uniform(-1, 1))

    config = make_config({"entrypoint": "m:f", "replicas": replicas, "rounds": rounds, "sync_every": steps})
    with running_server() as server:
        server.make_bucket(BUCKET)
        with counting(server) as launcher, counting(server) as others:
            run = CountedRun(server, launcher, others, config, pace)
            run.play()
            seen = {"launcher and screen": list(launcher.seen), "replicas": list(others.seen)}
            return seen, [commit.at for commit in RunLog(open_store(URL, server.options())).commits()]
