"""Common parts of the contract's tests: the fixtures, and flags for differences between services. Holds no test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_orchestrator.executors.contract import ServerlessExecutor
from diloco_orchestrator.executors.testing.rig import RUN_ID, Rig

_WORKLOAD = """
import os

def greet(name, punctuation="!"):
    print("rank", os.environ["REPLICA_RANK"], "of", os.environ["REPLICA_WORLD_SIZE"], flush=True)
    return f"hello {name}{punctuation}"

def fail(words):
    print("about to fail", flush=True)
    raise RuntimeError(words)
"""


class ContractBase:
    """Fixtures of the contract. The subclass under test provides the fixture `rig`."""

    may_double = False
    """True for a service without idempotency key: of two processes that launch an attempt at once both get the same
    handle, but a second job may have run for a moment.
    """
    tells_exit_codes = True
    """False for a service that reports success and failure, but no exit code."""

    @pytest.fixture
    def executor(self, rig: Rig) -> Iterator[ServerlessExecutor]:
        """A new executor; after the test every attempt of the test's run is cancelled."""
        executor = rig.executor()
        yield executor
        for handle in rig.executor().find(RUN_ID):
            executor.cancel(handle)
        executor.close()

    @pytest.fixture
    def code(self, tmp_path: Path) -> str:
        """A folder with a module whose functions `launch_replicas` calls."""
        folder = tmp_path / "users_code"
        folder.mkdir()
        (folder / "contract_workload.py").write_text(_WORKLOAD)
        return str(folder)
