"""What a bucket says of loops that their users start, which send no heartbeat and have no coordinator."""

from pathlib import Path

import pytest
import torch
from tiny_workloads import batch_of, inner_step, mlp

from diloco_orchestrator import ConfigError, ObjectStoreManager, RunReader, attach, make_diloco_outer_loop, open_store
from diloco_orchestrator.inspection.explain import explain


def trained_alone(folder: Path, inner_steps: int) -> RunReader:
    """A run of two outer steps of two inner steps, of which `inner_steps` are trained."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = ObjectStoreManager.join(str(folder), 0, 1, rounds=2)
    with make_diloco_outer_loop(model, optimizer, manager, 2):
        for step in range(inner_steps):
            inner_step(model, optimizer, batch_of(step))
    return RunReader(open_store(str(folder)))


def words_of(reader: RunReader, after_s: float) -> str:
    status = reader.status()
    return "\n".join(explain(status, now=status.moved_at + after_s).lines())


def test_a_loop_that_has_taken_all_outer_steps_has_completed_its_run(tmp_path: Path):
    reader = trained_alone(tmp_path, inner_steps=4)
    status = reader.status()
    assert (status.state, status.reason) == ("completed", "every outer step is taken") and reader.has_stopped()
    assert status.replicas[0].words(stopped=True) == "by hand: started by its user, a loop that sends no heartbeat"
    words = words_of(reader, after_s=1e6)
    assert "Every outer step is taken." in words and "diloco resume" not in words


def test_a_loop_that_ended_early_is_to_be_started_by_its_user(tmp_path: Path):
    reader = trained_alone(tmp_path, inner_steps=2)
    assert reader.status().state == "running" and not reader.has_stopped()
    words = words_of(reader, after_s=1e6)
    assert "Replica 0: started by its user, in a loop that sends no heartbeat." in words
    assert "start the programs of its replicas again" in words and "diloco attach" not in words
    with pytest.raises(ConfigError, match="are loops that their users start"):
        attach(str(tmp_path))
