"""Fixtures of tests with real runs."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from real_runs import FAST, digests

from diloco_orchestrator import LocalProcessExecutor, Run, RunResult, launch


@dataclass(frozen=True)
class FinishedRun:
    """A run that completed: two replicas, three rounds. Tests that share it only read it."""

    run: Run
    result: RunResult
    folder: Path  # its bucket


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    settings = {"replicas": 2, "rounds": 3, "sync_every": 3, **FAST}
    executor = LocalProcessExecutor(folder / "executor")
    run = launch("tiny_workloads:train", store=str(folder / "bucket"), executor=executor, **settings)
    return FinishedRun(run, run.wait(), folder / "bucket")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The base digests of `train_holding` when nobody is held or killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = {"replicas": 2, "rounds": 3, "sync_every": 3, **FAST}
    executor = LocalProcessExecutor(folder / "executor")
    args = {"folder": str(folder), "hold": []}
    store = str(folder / "bucket")
    launch("tiny_workloads:train_holding", store=store, executor=executor, args=args, **settings).wait()
    return digests(folder / "bucket")
