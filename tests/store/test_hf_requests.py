"""Requests of whole runs in a storage bucket of Hugging Face, counted by the look-alike of its gateway.

Everything is the project's own but the machines and the clock, which is virtual (`simulation`): it jumps to whatever
waits next. The launcher shows the run beside supervising it, as `diloco run` does.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from hf_gateway import HfGateway, _Gateway, running_hf_gateway
from simulation import SimExecutor, Simulation
from simulation_plan import calm
from virtual_time import VirtualClock

from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.inspection.costs import forecast
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store, requests_allowed
from diloco_orchestrator.store.retrying import RetryPolicy
from diloco_orchestrator.supervision.coordinator import Coordinator, Means

ALLOWED = 1000  # in five minutes
STEPS = 25
STOPPED_AT_S = 100.0


class CountedRun(Simulation):
    """A run in the gateway's bucket; `asked`: the virtual time of each request. `slower`: factors by replica."""

    def __init__(self, gateway: HfGateway, config: RunConfig, round_s: float, slower: Mapping[int, float], **plan: Any):
        self._given, self._gateway, self._slower, self._step_s = config, gateway, slower, round_s / STEPS
        self._draws = [random.Random(replica_id) for replica_id in range(config.replicas)]
        super().__init__(calm(replicas=config.replicas, rounds=config.rounds, paces=(1.0,) * config.replicas, **plan))
        self.asked: list[float] = []
        asked, time = self.asked, self.time

        class Counting(_Gateway):
            def _serve(self) -> None:
                asked.append(time.now)
                return super()._serve()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

        gateway.server.RequestHandlerClass = Counting
        stamp = self.stamp(VirtualClock(self.time, self.time.current))
        create_run(self.opened(), Run(**stamp(), run_id="r", config=config, package_version="0"), "t", stamp)

    def _config(self) -> RunConfig:
        return self._given

    def step_s(self, replica_id: int) -> float:
        spread = 1 + 0.2 * self._draws[replica_id].uniform(-1, 1)
        return self._step_s * self._slower.get(replica_id, 1.0) * spread

    def opened(self, clock: VirtualClock | None = None) -> Store:
        url, options = self._gateway.url("counted"), self._gateway.options()
        return open_store(url, options, clock=clock, rng=random.Random(0))

    def network(self, clock: VirtualClock, retry: RetryPolicy | None = None) -> Store:
        return self.opened(clock)

    def _supervise(self, clock: VirtualClock) -> None:
        reader = RunReader(SeenStore.of(self.opened(clock), clock))
        coordinator = Coordinator(reader, Means(SimExecutor(self), clock, self.stamp(clock)))
        while not coordinator.step():
            reader.status()
            clock.sleep(1.0)

    @property
    def most_in_five_minutes(self) -> int:
        return max(sum(begin <= at < begin + 300.0 for at in self.asked) for begin in self.asked)


@contextmanager
def played(
    round_s: float, slower: Mapping[int, float] | None = None, stops: Any = (), **settings: Any
) -> Iterator[CountedRun]:
    config = make_config({"entrypoint": "m:f", "sync_every": STEPS, **settings})
    with running_hf_gateway() as gateway:
        run = CountedRun(gateway, config, round_s, slower or {}, stops=stops)
        run.play()
        yield run


def test_a_run_keeps_to_the_requests_of_five_minutes_and_a_plan_says_how_many_a_round_sends():
    with played(26.0, replicas=4, rounds=14) as run:
        ended = [commit.at for commit in RunLog(run.opened()).commits()]
        counted = sum(ended[0] < at <= ended[-2] for at in run.asked) / (len(ended) - 2)
        assert run.most_in_five_minutes <= ALLOWED  # of them the start, of which a plan says nothing
        assert sum(forecast(run.config, 26.0, 8000, ALLOWED).requests.values()) == pytest.approx(counted, rel=0.05)


def test_replicas_that_wait_for_a_slow_one_keep_to_the_requests_of_five_minutes():
    """Without a limit they ask every second: 1,700."""
    with played(26.0, {3: 8.0}, replicas=4, rounds=4, quorum="all") as run:
        assert run.most_in_five_minutes <= ALLOWED


def test_a_replica_that_hangs_is_found_within_five_minutes_though_heartbeats_are_read_less_often():
    with played(26.0, stops=((STOPPED_AT_S, 1, 2000.0),), replicas=4, rounds=20) as run:
        cancel = AttemptRecords(run.opened()).cancel(1, 1)
        assert cancel is not None and "hung" in cancel.reason and cancel.at <= STOPPED_AT_S + 300.0
        assert len(RunLog(run.opened()).commits()) == 21 and run.most_in_five_minutes <= ALLOWED


def test_other_stores_allow_as_many_requests_as_come(tmp_path: Any):
    assert requests_allowed("s3://bucket/run") is None and open_store(str(tmp_path)).requests_allowed is None
