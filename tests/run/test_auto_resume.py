"""Runs with a planted fault that nobody attends to end where the healthy run ends."""

import math
from pathlib import Path
from typing import Any

import pytest
from real_runs import FAST, reader_of

from diloco_orchestrator import LocalProcessExecutor, RunResult, launch, verify

pytestmark = pytest.mark.slow  # four processes, 45 rounds each

SETTINGS: dict[str, Any] = {
    **FAST,
    "replicas": 4,
    "rounds": 45,
    "sync_every": 10,
    "outer": {"lr": 0.4, "momentum": 0.6},
    "guard": {"rule": "sequential", "per_replica": True},
    "on_halt": {"change": {"outer.lr": 0.3}, "at_most": 2},
    "snapshot_every": 20,
}


def run_with(fault: str, folder: Path, **settings: Any) -> RunResult:
    executor = LocalProcessExecutor(folder / "executor")
    given = {**SETTINGS, **settings, "args": {"fault": fault, "lr": 0.1}}
    return launch("faulty_workloads:train", store=str(folder / "bucket"), executor=executor, **given).wait()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The held-out score, in nats, of a run without a fault. Nobody is left out, no leg begins by itself."""
    folder = tmp_path_factory.mktemp("healthy")
    result = run_with("", folder)
    reader = reader_of(folder / "bucket")
    assert result.status == "completed" and len(reader.log.begins()) == 1
    assert not any(commit.quarantined for commit in reader.commits())
    assert result.model.heldout is not None
    return result.model.heldout


def check_resumed(result: RunResult, healthy: float) -> None:
    assert result.status == "completed" and result.verdict is None
    assert result.model.heldout is not None
    assert math.isclose(result.model.heldout, healthy, rel_tol=0.01), (result.model, healthy)


def test_a_loss_spike_in_every_replica_is_rolled_back_and_passed(healthy, tmp_path):
    result = run_with("spike", tmp_path)
    check_resumed(result, healthy)
    begins = reader_of(tmp_path / "bucket").log.begins()
    assert len(begins) > 1 and begins[1].by == "on_halt" and begins[1].settings == {"outer.lr": 0.3}
    assert begins[1].from_round <= 23  # before the spike
    assert "on_halt 1 of at most 2 (outer.lr=0.3)" in begins[1].why
    assert verify(result.url).agrees


def test_a_shard_of_nan_in_one_replica_changes_nothing(healthy, tmp_path):
    """That replica abstains with every round of it, and the quorum goes on."""
    result = run_with("nan", tmp_path, quorum=3)
    check_resumed(result, healthy)
    answers = reader_of(tmp_path / "bucket").commits()[30].answers
    assert [a.kind for a in answers if a.replica_id == 2] == ["abstention"]


def test_a_hack_in_one_of_four_replicas_is_left_out(healthy, tmp_path):
    result = run_with("hack", tmp_path)
    check_resumed(result, healthy)
    commits = reader_of(tmp_path / "bucket").commits()
    assert {each.replica_id for commit in commits for each in commit.quarantined} == {2}
    first = next(commit.round for commit in commits if commit.quarantined)
    assert 23 <= first <= 27
    assert verify(result.url).agrees
