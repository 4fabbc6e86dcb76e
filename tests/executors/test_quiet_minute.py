"""How often a run asks its provider while nothing happens: some replicas that train, on virtual time."""

from collections.abc import Callable
from pathlib import Path

import held_services
import pytest
from held_services import OnThisMachine, Service, beat
from scripted import Scene

from diloco_orchestrator.supervision.coordinator import Coordinator
from executors.contract import ReplicaHandle, ReplicaState
from executors.testing import wait_until

HEARTBEAT_S = 10.0  # the default of `timing.heartbeat_s`
MINUTES, STEP_S = 10, 5.0


def handles_of(coordinator: Coordinator, replicas: int) -> list[ReplicaHandle]:
    records = [coordinator.reader.attempts.handle(replica_id, 1) for replica_id in range(replicas)]
    return [ReplicaHandle.from_json(record.handle) for record in records if record is not None]


def requests_a_minute(service: Service, is_settled: Callable[[ReplicaState], bool], replicas: int = 3) -> float:
    """Requests a minute that the service meets while every replica beats and nothing else happens."""
    timing = {"poll_s": 0.01, "heartbeat_s": HEARTBEAT_S, "round_timeout_s": 600.0, "startup_timeout_s": 600.0}
    scene = Scene(replicas=replicas, timing=timing)
    scene.executor = OnThisMachine(service.executor, ["sleep", "600"])
    coordinator = scene.coordinator()
    scene.steps(coordinator, 1.0)
    states = service.executor.poll_many
    handles = handles_of(coordinator, replicas)
    wait_until(lambda: all(is_settled(each.state) for each in states(handles)), "all are as they stay")
    scene.executor.shares_machine = False
    scene.steps(coordinator, 30.0, every=STEP_S)
    before = service.calls()
    for tick in range(int(MINUTES * 60 / STEP_S)):
        for replica_id in range(replicas):
            beat(scene, replica_id, tick)
        scene.clock.advance(STEP_S)
        coordinator.step()
    assert coordinator.alive() == list(range(replicas))
    return (service.calls() - before) / MINUTES


def runs(state: ReplicaState) -> bool:
    return state is ReplicaState.RUNNING


@pytest.mark.parametrize(
    "name", ["hugging_face", *(pytest.param(n, marks=pytest.mark.slow) for n in ("kubernetes", "modal"))]
)
def test_a_quiet_run_asks_its_provider_four_times_a_minute(name: str, tmp_path: Path):
    with getattr(held_services, name)(tmp_path) as service:
        assert requests_a_minute(service, runs) == 4


# A waiting pod is told from its Job too, and of a Sandbox that waits each poll asks whether it has a machine.
@pytest.mark.parametrize(("name", "most"), [("hugging_face", 4), ("kubernetes", 8), ("modal", 16), ("slurm", 4)])
def test_replicas_that_wait_for_machines_are_asked_for_in_as_few_calls(name: str, most: int, tmp_path: Path):
    with getattr(held_services, name)(tmp_path) as service:
        service.hold(True)
        assert requests_a_minute(service, lambda state: state is ReplicaState.PENDING) <= most


def test_one_replica_is_asked_for_as_seldom_as_a_fleet(tmp_path: Path):
    with held_services.hugging_face(tmp_path) as service:
        assert requests_a_minute(service, runs, replicas=1) == 4
