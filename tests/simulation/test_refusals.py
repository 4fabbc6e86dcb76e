"""Runs on virtual time whose tokens end, or whose bucket refuses everybody for a while."""

import random
from typing import Any

import pytest
from simulation import Network, Simulation
from simulation_plan import calm
from tokens import AsObstore, Source
from virtual_time import VirtualClock

from diloco_orchestrator.errors import StoreDenied
from diloco_orchestrator.protocol.process import EXIT_DONE
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import LASTING
from diloco_orchestrator.store.retrying import RetryingStore

LIFE_S = 15 * 60.0
SELDOM = {"poll_s": 20.0, "heartbeat_s": 20.0, "round_timeout_s": 3600.0, "startup_timeout_s": 600.0}


class Judged(Network):
    """The way of one process to a bucket that refuses what a token signed that has ended, and all in `outages`."""

    def __init__(self, simulation: "Refusing", clock: VirtualClock, chance: random.Random) -> None:
        super().__init__(simulation.bucket, simulation.plan, clock, chance, simulation.trace)
        self._simulation = simulation
        # Its first token was handed out some time before this process began.
        self._tokens = AsObstore(Source(clock, LIFE_S, LIFE_S, age_s=chance.uniform(0, LIFE_S)))

    def _call(self, verb: str, key: str, call: Any) -> Any:
        ends, now = self._tokens.token_ends(), self._clock.wall_time()
        if ends <= now:
            self._simulation.refused += 1
            raise StoreDenied(f"cannot {verb} {key}: ExpiredToken. The session token has expired: sign in again.")
        if any(begin <= self._clock.now() < end for begin, end in self._simulation.outages):
            self._simulation.refused += 1
            raise StoreDenied(f"cannot {verb} {key}: AccessDenied.")
        return super()._call(verb, key, call)


class Refusing(Simulation):
    """Every process has tokens of `LIFE_S`; in `outages` the bucket refuses all calls."""

    outages: tuple[tuple[float, float], ...] = ()
    refused = 0

    def network(self, clock: VirtualClock) -> RetryingStore:
        self._tokens += 1
        judged = Judged(self, clock, random.Random(f"{self.plan.seed} {self._tokens}"))
        return RetryingStore(judged, clock, random.Random(self._tokens), LASTING)


def completed(simulation: Refusing) -> None:
    simulation.run()
    result = RunLog(simulation.bucket).result(1)
    assert result is not None and result.status == "completed"
    assert set(simulation.exit_codes.values()) == {EXIT_DONE}
    assert {attempt for _, attempt in simulation.exit_codes} == {1}  # nobody was launched twice


@pytest.mark.slow
def test_a_run_of_two_hours_completes_with_tokens_of_fifteen_minutes():
    simulation = Refusing(calm(replicas=2, rounds=8, paces=(230.0, 231.0), settings={"timing": SELDOM}))
    completed(simulation)
    assert simulation.time.now > 7200 and simulation.refused == 0


@pytest.mark.parametrize("lasts_s", [3.0, 300.0])
def test_a_bucket_that_refuses_everybody_for_a_while_ends_nothing(lasts_s: float):
    simulation = Refusing(calm(rounds=6))
    simulation.outages = ((9.0, 9.0 + lasts_s),)
    completed(simulation)
    assert simulation.refused > 3
