"""Signed runs on virtual time: what somebody without a key forges changes no byte of the log."""

import dataclasses

import pytest
from simulation_signed import SignedBucket, SignedSimulation, signed_plan_of

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog


def played(plan) -> tuple[SignedSimulation, dict[str, bytes]]:
    simulation = SignedSimulation(plan)
    simulation.run()
    return simulation, simulation.bucket.commits


@pytest.mark.parametrize("seed", [1, 3])
def test_forgeries_change_no_byte_of_a_signed_runs_log(seed):
    assert forged_in(seed)


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(1, 7))
def test_forgeries_change_no_byte_of_many_signed_runs(tens):
    assert sum(map(forged_in, range(10 * tens, 10 * tens + 10)))


def forged_in(seed: int) -> int:
    """Play a seed with and without its forgeries, compare logs and every call to the store; returns how many forged."""
    plan = signed_plan_of(seed)
    forged, commits = played(plan)
    undisturbed, expected = played(dataclasses.replace(plan, forgeries=()))
    assert commits == expected
    assert forged.digest.hexdigest() == undisturbed.digest.hexdigest()
    assert isinstance(forged.bucket, SignedBucket)
    return forged.bucket.forged


def test_a_signed_log_has_the_records_of_an_unsigned_one():
    """So that signatures can be left out of everything that reads a log."""
    plan = dataclasses.replace(signed_plan_of(3), forgeries=())
    simulation, commits = played(plan)
    log = RunLog(simulation.bucket)
    assert [log.commit(round_).written.to_bytes() for round_ in range(1, len(commits) + 1)] == [
        commits[key] for key in sorted(commits)
    ]
    assert keys.commit(1) not in {info.key for info in simulation.bucket.stored.list("")}
