"""The executor contract on local processes."""

import os
import signal
from pathlib import Path

import pytest

from executors import LocalProcessExecutor
from executors.contract import ReplicaHandle
from executors.testing import ExecutorContract, Rig


class LocalRig(Rig):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.construct = f"from executors import LocalProcessExecutor; executor = LocalProcessExecutor({str(folder)!r})"

    def executor(self) -> LocalProcessExecutor:
        return LocalProcessExecutor(self._folder)

    def preempt(self, handle: ReplicaHandle) -> None:
        os.kill(handle.native["pid"], signal.SIGTERM)

    def machines(self, run_id: str) -> int:
        return len(self.executor().find(run_id))


class TestLocalProcesses(ExecutorContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> LocalRig:
        return LocalRig(tmp_path / "executor")
