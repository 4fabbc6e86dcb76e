"""An hour in which a provider is down, on virtual time, through the genuine SDKs: nothing is lost, nothing is spent."""

from pathlib import Path
from typing import Any

import held_services
import pytest
from held_services import OnThisMachine, beat
from scripted import Scene

from executors.contract import NoCapacity, ReplicaHandle

HOUR_S, STEP_S = 3600.0, 60.0

# The service's words for "not now", what Retry-After says, and the least and the most launch calls that are made of it
# in an hour for each replica: the pauses double from 2 to 120 s and are spread over their second half.
FAULTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "500": ({"failing": 500}, 20, 60),
    "429 that asks for ten minutes": ({"failing": 429, "retry_after": "600"}, 5, 7),
    "429": ({"failing": 429}, 20, 60),
    "UNAVAILABLE": ({"failing": 503}, 20, 60),
    "a gateway that times out": ({"failing": 504}, 20, 60),
    "no answer in time": ({"delay_s": 0.3}, 20, 60),
    "half an answer": ({"halves": True}, 20, 60),
    "a login page with 200": ({"odd": b"<!doctype html><html>Please log in</html>"}, 20, 60),
    "an error with 200": ({"odd": b'{"error": "upstream is away"}'}, 20, 60),
    "a controller that is away": (
        {"says": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"},
        20,
        60,
    ),
    "a controller that is overloaded": ({"says": "sbatch: error: Slurm temporarily unable to accept job"}, 20, 60),
    "a controller that does not answer": ({"says": "error: Socket timed out on send/recv operation"}, 20, 60),
    "munge is away": ({"says": "error: If munged is up, restart with --num-threads=10. Did you start munged?"}, 20, 60),
}
OF_HTTP = [name for name, (fault, _, _) in FAULTS.items() if "says" not in fault]
FAULTS_OF = {
    "hugging_face": OF_HTTP,
    "kubernetes": OF_HTTP,
    "eks": OF_HTTP,
    "mixed": OF_HTTP,
    "modal": [name for name in OF_HTTP if name != "half an answer"],  # for gRPC half a message is none
    "slurm": [name for name, (fault, _, _) in FAULTS.items() if {"says", "odd"} & fault.keys()],
}
QUICK = {
    ("hugging_face", "500"),
    ("kubernetes", "429 that asks for ten minutes"),
}
CASES = [
    pytest.param(name, fault, id=f"{name}, {fault}", marks=() if (name, fault) in QUICK else pytest.mark.slow)
    for name, faults in FAULTS_OF.items()
    for fault in faults
]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Limits of calls: short where the service does not answer, so that a wait costs no time."""
    what, _, _ = FAULTS[request.getfixturevalue("fault")]
    short_s = 0.05 if "delay_s" in what or "halves" in what else 5.0
    for limit in ("hf_api._READ_TIMEOUT_S", "hf_api._CALL_S"):
        monkeypatch.setattr(f"executors.{limit}", short_s)
    monkeypatch.setattr("executors.kubernetes_api._CALL_S", (5, short_s))
    for limit in ("modal_api.CALL_S", "modal_api.LAUNCH_S", "modal_sandboxes.CALL_S"):
        # Modal says 429 as RESOURCE_EXHAUSTED with a pause, which the SDK makes within the call.
        monkeypatch.setattr(f"executors.{limit}", 0.2 if "delay_s" in what or what.get("failing") == 429 else 60.0)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(("name", "fault"), CASES)
def test_an_hour_in_which_the_provider_is_down_spends_no_attempt(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """First while replicas are launched, then while they run: `max_errors=0` would give each one up at its first."""
    what, fewest, most = FAULTS[fault]
    # Modal's SDK tries a call four times within a second, so that there are fewer of them here.
    step_s, fewest, most = (300.0, 10, 13) if name == "modal" else (STEP_S, fewest, most)
    with getattr(held_services, name)(tmp_path) as service:
        service.hold(True)
        scene = Scene(retry={"max_errors": 0, "max_no_capacity": 0, "hung_after_s": 3 * step_s})
        scene.executor = OnThisMachine(service.executor)
        service.break_with(what)
        coordinator = scene.coordinator()
        launches = Count(monkeypatch, service.executor, "launch")
        scene.steps(coordinator, HOUR_S, every=step_s)
        assert 2 * fewest <= launches.calls <= 2 * most
        service.heal()
        scene.steps(coordinator, 1200.0, every=step_s)
        everybody = [("0", "1"), ("1", "1")]
        assert sorted(set(service.machines())) == everybody
        assert coordinator.alive() == [0, 1]

        service.break_with(what)
        for tick in range(int(HOUR_S / step_s)):
            beat(scene, 0, tick), beat(scene, 1, tick)
            scene.steps(coordinator, step_s, every=step_s)
        service.heal()
        scene.steps(coordinator, 2 * step_s, every=step_s)
        assert scene.executor.cancelled == [] and sorted(set(service.machines())) == everybody
        assert [coordinator.reader.attempts.numbers(i) for i in (0, 1)] == [[1], [1]]


def test_a_provider_that_is_down_holds_up_no_replica_of_another(tmp_path: Path):
    with held_services.mixed(tmp_path) as service:
        service.hold(True)
        scene = Scene(replicas=3, quorum=2, retry={"max_errors": 0, "hung_after_s": 200.0})
        scene.executor = OnThisMachine(service.executor)
        service.parts[0].break_with({"failing": 503})
        coordinator = scene.coordinator()
        for tick in range(60):
            beat(scene, 1, tick), beat(scene, 2, tick)
            scene.steps(coordinator, STEP_S, every=STEP_S)
        assert sorted(service.machines()) == [("1", "1"), ("2", "1")] and scene.executor.cancelled == []
        service.heal()
        scene.steps(coordinator, 300.0, every=STEP_S)
        assert sorted(service.machines()) == [("0", "1"), ("1", "1"), ("2", "1")]


class Count:
    """Counts the calls of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls, self._call = 0, getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._call(*args)


def test_a_pause_that_kubernetes_asks_for_is_not_slept_in_the_call(tmp_path: Path):
    """urllib3 sleeps for as long as `Retry-After` says, and callers hold a coordinator."""
    with held_services.kubernetes(tmp_path) as service:
        service.break_with({"failing": 429, "retry_after": "600"})
        before = service.calls()
        status = service.executor.poll(
            ReplicaHandle("kubernetes", "r", 0, 1, "default/a", {"namespace": "default", "job": "a", "uid": "u"})
        )
        assert "429" in status.message and service.calls() == before + 1


def test_a_replica_without_a_machine_is_gone_on_without_and_taken_back():
    """Two of three are the quorum. The third gets none for hours, and is launched when there is one."""
    scene = Scene(replicas=3, quorum=2, retry={"max_no_capacity": 3, "hung_after_s": 200.0})
    for attempt in range(1, 1000):
        scene.executor.refuse_launch[2, attempt] = NoCapacity("no A100 today")
    coordinator = scene.coordinator()
    for tick in range(120):
        beat(scene, 0, tick), beat(scene, 1, tick)
        scene.steps(coordinator, STEP_S, every=STEP_S)
    assert coordinator.reader.log.result(1) is None  # the run goes on
    assert scene.executor.launched == [(0, 1), (1, 1)] and scene.executor.cancelled == []
    asked = coordinator.reader.attempts.numbers(2)[-1]
    assert 10 <= asked <= 20  # every ten minutes
    scene.executor.refuse_launch.clear()
    for tick in range(120, 150):
        beat(scene, 0, tick), beat(scene, 1, tick), beat(scene, 2, tick, asked + 1)
        scene.steps(coordinator, STEP_S, every=STEP_S)
    assert scene.executor.launched[2:] == [(2, asked + 1)] and coordinator.alive() == [0, 1, 2]
