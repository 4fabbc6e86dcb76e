"""The executor of docs/write_an_executor.md passes the contract, on a stand-in for `docker` that runs processes."""

import os
import subprocess
import sys
from pathlib import Path

import fake_docker
import pytest

from executors.contract import ReplicaHandle
from executors.remote_base import run_label
from executors.testing import ExecutorContract, Rig

EXAMPLE = Path(__file__).parents[2] / "examples" / "docker_executor"
sys.path.insert(0, str(EXAMPLE))
from docker_executor import DockerExecutor  # noqa: E402

pytestmark = pytest.mark.slow


class DockerRig(Rig):
    construct = "from docker_executor import DockerExecutor; executor = DockerExecutor()"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environ = {"PYTHONPATH": os.pathsep.join(sys.path)}

    def executor(self) -> DockerExecutor:
        return DockerExecutor()

    def denied(self) -> DockerExecutor:
        return DockerExecutor(host="unix:///of/another")

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
