"""The executor of docs/recipes/write_an_executor.md passes the contract, on a stand-in for `docker` and on Docker."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_docker
import pytest
from genuine_docker import IMAGE, GenuineDocker, running_docker

from executors.contract import ExecutorError, ReplicaHandle, ReplicaState
from executors.remote_base import attempt_name, run_label
from executors.testing import ExecutorContract, Rig, ended_state, request_of, wait_until
from executors.testing.rig import STAY

EXAMPLE = Path(__file__).parents[2] / "examples" / "docker_executor"
sys.path.insert(0, str(EXAMPLE))
from docker_executor import DockerExecutor  # noqa: E402

pytestmark = pytest.mark.slow
ANOTHER = "unix:///of/another"  # a daemon that this user may not use


class DockerRig(Rig):
    construct = "from docker_executor import DockerExecutor; executor = DockerExecutor()"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environ = {"PYTHONPATH": os.pathsep.join(sys.path)}

    def executor(self) -> DockerExecutor:
        return DockerExecutor()

    def denied(self) -> DockerExecutor:
        return DockerExecutor(host=ANOTHER)

    def preempt(self, handle: ReplicaHandle) -> None:
        self._docker("kill", "--signal=TERM", handle.native_id)

    def failing(self, on: bool) -> None:
        (self._folder / "down").touch() if on else (self._folder / "down").unlink()

    def forget(self, handle: ReplicaHandle) -> None:
        self._docker("rm", "--force", handle.native_id)

    def refuse(self, replica_id: int) -> None:
        (self._folder / "refused").write_text(str(replica_id))

    def machines(self, run_id: str) -> int:
        started = self._folder / "started"
        return started.read_text().split().count(run_label(run_id)) if started.exists() else 0

    def _docker(self, *words: str) -> None:
        subprocess.run(["docker", *words], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DockerRig:
    binaries = fake_docker.install(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    return DockerRig(tmp_path / "docker")


class TestDocker(ExecutorContract):
    pass


class GenuineRig(Rig):
    """Docker itself."""

    def __init__(self, docker: GenuineDocker) -> None:
        self._docker = docker
        self.construct = f"from docker_executor import DockerExecutor; executor = DockerExecutor(host={docker.host!r})"
        self.environ = {"PYTHONPATH": os.pathsep.join(sys.path)}

    def executor(self) -> DockerExecutor:
        return DockerExecutor(host=self._docker.host)

    def denied(self) -> DockerExecutor:
        return DockerExecutor(host=ANOTHER)

    def preempt(self, handle: ReplicaHandle) -> None:
        self._docker.call("kill", "--signal=TERM", handle.native_id)

    def failing(self, on: bool) -> None:
        self._docker.stop() if on else self._docker.start()

    def forget(self, handle: ReplicaHandle) -> None:
        self._docker.call("rm", "--force", handle.native_id)

    def refuse(self, replica_id: int) -> None:
        """Somebody else has a container of that name."""
        self._docker.call("create", f"--name={attempt_name(request_of('', replica_id=replica_id))}", IMAGE, "sh")

    def machines(self, run_id: str) -> int:
        return len(self._docker.call("ps", "-aq", f"--filter=label=diloco-run={run_label(run_id)}").split())


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenuineDocker]:
    with running_docker(tmp_path_factory.mktemp("docker")) as docker:
        yield docker


@pytest.fixture
def genuine(docker: GenuineDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GenuineRig]:
    """With `ANOTHER`, the command `docker` is run by a user who may not open the daemon's socket."""
    real, program = shutil.which("docker"), tmp_path / "bin" / "docker"
    nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ "$1" = "--host={ANOTHER}" ] || exec {real} "$@"\n'
        f'shift; HOME=/ exec {nobody} {real} --host={docker.host} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    yield GenuineRig(docker)
    docker.remove_containers()


class TestGenuineDocker(ExecutorContract):
    @pytest.fixture
    def rig(self, genuine: GenuineRig) -> GenuineRig:
        return genuine


def test_an_attempt_whose_launcher_died_before_its_start_is_started(genuine: GenuineRig, docker: GenuineDocker):
    request = request_of(STAY)
    docker.call("create", *genuine.executor().plan(request)["command"][2:])
    (found,) = genuine.executor().find(request.run_id)
    assert genuine.executor().poll(found).state is ReplicaState.PENDING
    assert genuine.executor().launch(request) == found
    assert genuine.executor().poll(found).state is ReplicaState.RUNNING


def test_a_container_that_cannot_be_started_is_an_error_each_time(docker: GenuineDocker, genuine: GenuineRig):
    """`docker run` leaves the container behind; the next launch does not take it for one that waits."""
    executor = DockerExecutor(host=docker.host, gpus="all")  # a driver that this daemon has not
    for _ in range(2):
        with pytest.raises(ExecutorError, match="device driver"):
            executor.launch(request_of(STAY))


def test_an_attempt_that_takes_too_much_memory_ends_by_it(genuine: GenuineRig, docker: GenuineDocker):
    executor = genuine.executor()
    code = STAY.replace("sys.exit(75)", "b'x' * 10**9")  # once it is told to leave
    handle = executor.launch(request_of(code))
    wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
    docker.call("update", "--memory=64m", "--memory-swap=64m", handle.native_id)
    docker.call("kill", "--signal=TERM", handle.native_id)
    assert ended_state(executor, handle) is ReplicaState.FAILED
    assert executor.poll(handle).reason == "oom"
