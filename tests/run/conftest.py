"""Fixtures of tests with real runs."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from in_one_process import SmallRun
from real_runs import FAST, Strike
from tiny_workloads import mlp, train

from diloco_orchestrator import LocalProcessExecutor, Run, RunResult, launch
from replica.training.rng import seed_all


@dataclass(frozen=True)
class FinishedRun:
    """A run that completed: two replicas, three rounds, snapshots after the second and the last. Tests only read it.

    Replica 1 was killed by SIGKILL in the middle of round 2.
    """

    run: Run
    result: RunResult
    folder: Path  # its bucket


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    settings = {"replicas": 2, "rounds": 3, "sync_every": 3, "snapshot_every": 2, **FAST}
    settings["args"] = {"folder": str(folder), "hold": [1]}
    executor, strike = LocalProcessExecutor(folder / "executor"), Strike(folder, [1], signal.SIGKILL)
    run = launch("tiny_workloads:train_holding", store=str(folder / "bucket"), executor=executor, **settings)
    result = run.wait(on_poll=strike)
    assert strike.done
    return FinishedRun(run, result, folder / "bucket")


@pytest.fixture(scope="session")
def undisturbed() -> list[str]:
    """The base digests of `train`, and of `train_holding`, which trains the same, when nobody is held or killed."""
    models = []
    for _ in range(2):
        seed_all(0)
        models.append(mlp())
    run = SmallRun(2, rounds=3)
    run.train(lambda ctx: train(ctx, models[ctx.replica_id]))
    return [commit.base_digest for commit in run.commits()]
