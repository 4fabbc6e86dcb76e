"""The executor contract on a genuine Ray, and what only the genuine one shows."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import Faults, FaultyProxy
from genuine_ray import TOKEN, GenuineRay, running_ray

from executors.contract import ExecutorDenied, ReplicaHandle, ReplicaState
from executors.ray_jobs import RayExecutor
from executors.remote_base import run_label
from executors.testing import SECRET, ExecutorContract, Rig, ended_state, request_of, wait_until
from executors.testing.rig import RUN_ID, STAY

pytestmark = pytest.mark.slow


class RayRig(Rig):
    credentials = (TOKEN,)

    def __init__(self, ray: GenuineRay) -> None:
        self.ray = ray
        self._proxy = FaultyProxy(("127.0.0.1", ray.dashboard_port), Faults())
        self._options: dict[str, Any] = {"address": f"http://127.0.0.1:{self._proxy.port}", "cpu": 1}
        self.construct = f"from executors import RayExecutor; executor = RayExecutor(**{self._options!r})"
        self.environ = ray.environ

    def executor(self, **options: Any) -> RayExecutor:
        return RayExecutor(**{**self._options, **options})

    def preempt(self, handle: ReplicaHandle) -> None:
        """The processes of the job alone: their node is this machine.

        Waits for them: the log may hold the output of an earlier job of that name.
        """
        marker = f"DILOCO_STARTED=-- {handle.native_id} --".encode()

        def ended() -> bool:
            found = False
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # one that has ended meanwhile
                    inside = marker in (process / "environ").read_bytes().split(b"\0")
                    if inside and b"sigwait" in (process / "cmdline").read_bytes():
                        os.kill(int(process.name), signal.SIGTERM)
                        found = True
            return found

        wait_until(ended, "its process has started")

    def hold(self, on: bool) -> None:
        if on:
            RayExecutor(address=self.ray.address, cpu=8).launch(request_of(STAY, run_id="holder"))
            wait_until(lambda: "RUNNING" in self.ray.jobs().values(), "the node is full")
        else:
            self.ray.forget("dl-holder-r0-a1")

    def failing(self, on: bool) -> None:
        self._proxy.faults = Faults(refused=1.0) if on else Faults()

    def forget(self, handle: ReplicaHandle) -> None:
        self.ray.forget(handle.native_id)

    def machines(self, run_id: str) -> int:
        return sum(name.startswith(f"dl-{run_label(run_id)}-") for name in self.ray.jobs())

    def denied(self) -> RayExecutor:
        os.environ["RAY_AUTH_TOKEN"] = "of-another-cluster"  # the fixture puts it back
        return self.executor()


@pytest.fixture(scope="module")
def ray() -> Iterator[GenuineRay]:
    with running_ray() as ray:
        yield ray


@pytest.fixture
def rig(ray: GenuineRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayRig]:
    for name, value in ray.environ.items():
        monkeypatch.setenv(name, value)
    yield RayRig(ray)
    ray.forget()


class TestRay(ExecutorContract):
    @pytest.fixture
    def executor(self, rig: RayRig) -> RayExecutor:
        return rig.executor()


def test_ray_shows_and_keeps_no_secret(rig: RayRig, ray: GenuineRay):
    code = "import os; print('got', len(os.environ['KEY'])); " + STAY
    handle = rig.executor().launch(request_of(code, secrets={"KEY": SECRET}, env={"PLAIN": "plain value"}))
    wait_until(lambda: f"got {len(SECRET)}" in list(rig.executor().logs(handle)), "the job has read its secret")
    shown = ray.ask("GET", f"/api/jobs/{handle.native_id}").text + ray.ask("GET", "/api/jobs/").text
    assert "plain value" in shown and SECRET not in shown
    kept = [path for path in ray.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in kept)  # Ray's own logs, and the packages that it unpacks
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []


def test_a_stopped_replica_has_two_minutes_to_publish(rig: RayRig):
    """Ray's own default of three seconds would end it in the middle of an upload."""
    slow = STAY.replace("print('DILOCO", "import time; time.sleep(5); print('DILOCO")
    handle = rig.executor().launch(request_of(slow, attempt=7))  # Ray appends to the log of an earlier job of a name
    wait_until(lambda: "here" in list(rig.executor().logs(handle)), "it has started")
    rig.executor().cancel(handle)
    assert ended_state(rig.executor(), handle) is ReplicaState.CANCELLED
    assert 'DILOCO_EXIT {"code": 75}' in list(rig.executor().logs(handle))


def test_resources_that_no_node_has_are_waited_for_and_said(rig: RayRig):
    executor = rig.executor()
    rig.hold(True)
    handle = executor.launch(request_of("print('begun')", attempt=8))
    status = executor.poll(handle)
    rig.hold(False)
    assert (status.state, status.reason) == (ReplicaState.PENDING, "no_capacity")
    assert "waiting for resources" in status.message
    assert ended_state(executor, handle) is ReplicaState.SUCCEEDED


def test_a_job_of_somebody_else_under_the_attempts_name_is_refused(rig: RayRig, ray: GenuineRay):
    other = request_of(STAY, run_id=RUN_ID, replica_id=3)
    body = {"submission_id": "dl-contract-run-r3-a1", "entrypoint": "true"}
    rig.executor()._api.submit(body, "launching it")
    with pytest.raises(ExecutorDenied, match="not its labels"):
        rig.executor().launch(other)


def test_a_node_that_dies_without_a_word_is_a_preemption(monkeypatch: pytest.MonkeyPatch):
    with running_ray(4, 4) as ray:
        for name, value in ray.environ.items():
            monkeypatch.setenv(name, value)
        executor = RayExecutor(address=ray.address, cpu=4)
        handles = [executor.launch(request_of(STAY, replica_id=index)) for index in range(2)]
        wait_until(lambda: all("here" in list(executor.logs(handle)) for handle in handles), "both run")
        ray.cut_power(ray.node_of(handles[1].native_id))
        assert ended_state(executor, handles[1]) is ReplicaState.PREEMPTED
        other, lost = executor.poll_many(handles)
        assert other.state is ReplicaState.RUNNING and lost.reason == "lost"
        assert list(executor.logs(handles[1])) == []
