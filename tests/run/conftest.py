"""Fixtures of tests with real runs."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from real_runs import FAST, digests

from diloco_orchestrator import LocalProcessExecutor, Run, RunResult, launch


@dataclass(frozen=True)
class FinishedRun:
    """A run that completed: two replicas, three rounds, snapshots after the second and the last. Tests only read it."""

    run: Run
    result: RunResult
    folder: Path  # its bucket


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    settings = {"replicas": 2, "rounds": 3, "sync_every": 3, "snapshot_every": 2, **FAST}
    executor = LocalProcessExecutor(folder / "executor")
    run = launch("tiny_workloads:train", store=str(folder / "bucket"), executor=executor, **settings)
    return FinishedRun(run, run.wait(), folder / "bucket")


@pytest.fixture(scope="session")
def undisturbed(finished: FinishedRun) -> list[str]:
    """The base digests of `train`, and of `train_holding`, which trains the same, when nobody is held or killed."""
    return digests(finished.folder)
