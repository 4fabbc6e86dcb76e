"""An hour in which a provider is down, on virtual time, through the genuine SDKs: nothing is lost, nothing is spent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from scripted import STAMP, Scene

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Heartbeat
from executors.contract import LaunchRequest, NoCapacity, ReplicaHandle, ServerlessExecutor

HOUR_S, STEP_S = 3600.0, 60.0


@dataclass
class Provider:
    """An executor and its loopback service, which launches without ever finding a machine: nothing is started."""

    executor: ServerlessExecutor
    break_with: Callable[[Any], None]
    heal: Callable[[], None]
    calls: Callable[[], int]  # requests that the service has met
    machines: Callable[[], list[tuple[str, str]]]  # (replica, attempt) of every attempt that it was told to start


@contextmanager
def hugging_face(folder: Path) -> Iterator[Provider]:
    from loopback_hf import LoopbackHF

    from executors.hf_jobs import HFJobsExecutor

    with LoopbackHF() as service:
        service.hold(True)
        yield Provider(
            HFJobsExecutor(endpoint=service.endpoint, token=service.token),
            lambda fault: vars(service).update(fault),
            lambda: vars(service).update(failing=0, retry_after=None, delay_s=0.0),
            lambda: len(service.requests),
            lambda: [(j.labels["diloco-replica"], j.labels["diloco-attempt"]) for j in service.jobs.values()],
        )


@contextmanager
def kubernetes(folder: Path) -> Iterator[Provider]:
    from loopback_kubernetes import running_kubernetes

    from executors.kubernetes_jobs import KubernetesExecutor

    with running_kubernetes() as cluster:
        cluster.holding = True

        def break_with(fault: dict[str, Any]) -> None:
            vars(cluster).update({"slow_s" if name == "delay_s" else name: value for name, value in fault.items()})

        yield Provider(
            KubernetesExecutor(kubeconfig=cluster.write_kubeconfig(folder / "kubeconfig"), image="any"),
            break_with,
            lambda: vars(cluster).update(failing=0, retry_after=None, slow_s=0.0),
            lambda: len(cluster.requests),
            lambda: [
                (job["metadata"]["labels"]["diloco-replica"], job["metadata"]["labels"]["diloco-attempt"])
                for job in cluster.objects("jobs")
            ],
        )


@contextmanager
def modal(folder: Path) -> Iterator[Provider]:
    from grpclib import Status
    from loopback_modal import LoopbackModal

    from executors.modal_sandboxes import ModalExecutor

    with LoopbackModal() as server:
        server.hold(True)
        by_http = {500: Status.INTERNAL, 503: Status.UNAVAILABLE, 504: Status.DEADLINE_EXCEEDED}

        def break_with(fault: dict[str, Any]) -> None:
            server.failing = by_http[fault["failing"]]

        yield Provider(
            ModalExecutor("tests", client=server.client()),
            break_with,
            lambda: vars(server).update(failing=None),
            lambda: len(server.requests),
            lambda: [(s.tags["diloco-replica"], s.tags["diloco-attempt"]) for s in server.sandboxes.values()],
        )


class OnThisMachine:
    """An executor whose replicas need no code archive, so that a store in memory will do."""

    shares_machine = True

    def __init__(self, executor: ServerlessExecutor) -> None:
        self._executor = executor
        self.cancelled: list[ReplicaHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        return self._executor.launch(replace(request, command=["python", "-c", "pass"], secrets={}))

    def cancel(self, handle: ReplicaHandle) -> None:
        self.cancelled.append(handle)


# The service's words for "not now", what Retry-After says, and the least and the most launch calls that are made of it
# in an hour for each replica: the pauses double from 2 to 120 s and are spread over their second half.
FAULTS = {
    "500": ({"failing": 500}, 20, 60),
    "429 that asks for ten minutes": ({"failing": 429, "retry_after": "600"}, 5, 7),
    "429": ({"failing": 429}, 20, 60),
    "UNAVAILABLE": ({"failing": 503}, 20, 60),
    "a gateway that times out": ({"failing": 504}, 20, 60),
    "no answer in time": ({"delay_s": 0.3}, 20, 60),
}
CASES = [
    pytest.param(provider, fault, id=f"{provider.__name__}, {fault}", marks=() if quick else pytest.mark.slow)
    for provider, fault, quick in [
        (hugging_face, "500", True),
        (hugging_face, "429 that asks for ten minutes", True),
        (hugging_face, "429", False),
        (hugging_face, "UNAVAILABLE", False),
        (hugging_face, "a gateway that times out", False),
        (hugging_face, "no answer in time", False),
        (kubernetes, "500", False),
        (kubernetes, "429 that asks for ten minutes", True),
        (kubernetes, "429", False),
        (kubernetes, "UNAVAILABLE", False),
        (kubernetes, "a gateway that times out", False),
        (kubernetes, "no answer in time", False),
        (modal, "500", False),
        (modal, "UNAVAILABLE", False),
        (modal, "a gateway that times out", False),
    ]
]


@pytest.mark.parametrize(("provider", "fault"), CASES)
def test_an_hour_in_which_the_provider_is_down_spends_no_attempt(
    provider: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """First while replicas are launched, then while they run: `max_errors=0` would give each one up at its first."""
    what, fewest, most = FAULTS[fault]
    # Modal's SDK tries a call four times within a second, so that there are fewer of them here.
    step_s, fewest, most = (300.0, 10, 13) if provider is modal else (STEP_S, fewest, most)
    for limit in ("hf_api._READ_TIMEOUT_S", "hf_api._CALL_S"):
        monkeypatch.setattr(f"executors.{limit}", 0.05 if "delay_s" in what else 5.0)
    monkeypatch.setattr("executors.kubernetes_api._CALL_S", (5, 0.05 if "delay_s" in what else 5))
    with provider(tmp_path) as service:
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


class Count:
    """Counts the calls of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls, self._call = 0, getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._call(*args)


def beat(scene: Scene, replica_id: int, counter: int, attempt: int = 1) -> None:
    record = Heartbeat(
        **STAMP(), replica_id=replica_id, attempt=attempt, counter=counter, phase="training", round=1, inner_step=0
    )
    scene.fleet.store.put(keys.heartbeat(replica_id, attempt), record.to_bytes())


def test_a_pause_that_kubernetes_asks_for_is_not_slept_in_the_call(tmp_path: Path):
    """urllib3 sleeps for as long as `Retry-After` says, and callers hold a coordinator."""
    with kubernetes(tmp_path) as service:
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
