"""Signed runs on virtual time: what somebody without a key forges changes no byte of the log."""

import dataclasses

import pytest
from simulation_signed import SignedSimulation, signed_plan_of, simulate_signed

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog


@pytest.mark.parametrize("seed", [1, 3])
def test_forgeries_change_no_byte_of_a_signed_runs_log(seed):
    assert simulate_signed(seed).bucket.forged


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(1, 7))
def test_forgeries_change_no_byte_of_many_signed_runs(tens):
    assert sum(simulate_signed(seed).bucket.forged for seed in range(10 * tens, 10 * tens + 10))


def test_a_signed_log_has_the_records_of_an_unsigned_one():
    """So that signatures can be left out of everything that reads a log."""
    plan = dataclasses.replace(signed_plan_of(3), forgeries=())
    simulation = SignedSimulation(plan)
    simulation.run()
    commits = simulation.bucket.commits
    log = RunLog(simulation.bucket)
    assert [log.commit(round_).written.to_bytes() for round_ in range(1, len(commits) + 1)] == [
        commits[key] for key in sorted(commits)
    ]
    assert keys.commit(1) not in {info.key for info in simulation.bucket.stored.list("")}
