"""Signed runs on virtual time: what somebody without a key forges changes no byte of the log."""

import dataclasses

import pytest
from simulation_plan import Plan
from simulation_signed import SignedSimulation, signed_plan_of, simulate_signed

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.memory import MemoryStore


@pytest.mark.parametrize("seed", [1, 3])
def test_forgeries_change_no_byte_of_a_signed_runs_log(seed):
    assert simulate_signed(seed).bucket.forged


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(1, 7))
def test_forgeries_change_no_byte_of_many_signed_runs(tens):
    assert sum(simulate_signed(seed).bucket.forged for seed in range(10 * tens, 10 * tens + 10))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["gather", "scatter_reduce"])
def test_a_strangers_replica_contributes_and_writes_nothing_that_others_rest_on(path):
    """Its key signs no commit, result, start, snapshot, average or segment: the run would fail if it tried."""
    settings = {"quorum": "all", "sync_every": 4, "fragments": 1, "fragment_sync_delay": 0, "late": "carry"}
    settings |= {"snapshot_every": 2, "retention": {}, "aggregate": "mean", "path": path}
    replicas = 3 if path == "gather" else 5
    plan = Plan(seed=3, replicas=replicas, rounds=4, paces=(1.0, 1.1, 1.3, 1.2, 1.0)[:replicas], settings=settings)
    found = []
    for invited in ([], [0]):
        simulation = SignedSimulation(dataclasses.replace(plan, settings={**settings, "invited": invited}))
        simulation.run()
        log = RunLog(simulation.bucket)
        commits = [log.commit(round_).commit for round_ in range(1, len(simulation.bucket.commits) + 1)]
        found.append([(each.base_digest, [a.replica_id for a in each.answers if a.averaged]) for each in commits])
        assert not any(str(each.by).startswith("replica 0,") for each in commits) or not invited
    assert found[0] == found[1]
    assert [of for _, of in found[1]][:4] == 4 * [list(range(replicas))]


@pytest.mark.parametrize("harm", ["", "is missing", "bytes, not"])
def test_verify_agrees_with_the_segments_of_a_signed_run_as_long_as_each_record_has_its_own_object(harm: str):
    """Objects of their own end with a signature, and lines of a segment do not."""
    settings = {"quorum": "all", "sync_every": 4, "fragments": 1, "fragment_sync_delay": 0, "late": "carry"}
    settings |= {"snapshot_every": 4, "retention": {}, "aggregate": "mean"}
    simulation = SignedSimulation(Plan(seed=4, replicas=2, rounds=12, paces=(1.0, 1.1), settings=settings))
    simulation.run()
    stored = simulation.bucket.stored
    assert [info.key for info in stored.list(keys.LOG)]
    named = next(info.key for info in stored.list(keys.commit(2)))
    if harm:
        body = stored.get(named)
        MemoryStore.delete(stored, named)
    if harm == "bytes, not":
        MemoryStore.put(stored, named, body[: len(body) // 2])
    found = verify_run(simulation.bucket).disagreement
    assert (found is None) if not harm else (found is not None and found.key == keys.commit(2) and harm in found.words)


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
