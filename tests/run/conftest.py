"""Fixtures of tests with real runs."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_runs import FAST, digests

from diloco_orchestrator import LocalProcessExecutor, Run, RunResult, launch


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    made = LocalProcessExecutor(tmp_path / "executor", grace_s=0.5)
    yield made
    for handle in (h for folder in (tmp_path / "executor").glob("*") for h in made.find(folder.name)):
        if not made.poll(handle).state.ended:
            os.killpg(handle.native["pid"], signal.SIGKILL)


@pytest.fixture
def start(executor: LocalProcessExecutor, tmp_path: Path) -> Callable[..., Run]:
    def launched(entrypoint: str = "train", store: Path | None = None, **settings: Any) -> Run:
        settings = {"replicas": 2, "rounds": 3, "sync_every": 3, **FAST, **settings}
        store = store or tmp_path / "bucket"
        return launch(f"tiny_workloads:{entrypoint}", store=str(store), executor=executor, **settings)

    return launched


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
