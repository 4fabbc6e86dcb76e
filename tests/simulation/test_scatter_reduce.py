"""Runs by scatter-reduce on virtual time, with the faults that runs by gather have: every invariant holds."""

import logging
from collections.abc import Iterator

import pytest
from simulation import Simulation, simulate
from simulation_plan import calm

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def drawn(seed: int) -> Simulation:
    """A run with the faults of a seed: kills, storms, late work, damaged payloads, false reports of a provider."""
    replicas = (4, 3, 5, 4)[seed % 4]
    codec = ("fp32", "int4", "2bit", "bf16", "int8")[seed % 5]
    aggregate = "mean" if replicas < 4 else ("mean", "agreeing_mean", "median", "trimmed_mean")[seed // 4 % 4]
    return simulate(seed, replicas=replicas, path="scatter_reduce", aggregate=aggregate, codec=codec)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_the_invariants_hold_whatever_goes_wrong(first: int):
    """Bases are compared with plain float32 arithmetic, and `verify` derives them from payloads alone (I11)."""
    checked = 0
    for seed in range(first, first + 10):
        checked += sum(commit.checks is not None for commit in RunLog(drawn(seed).bucket).commits())
    assert checked > 10


@pytest.mark.parametrize("seed", [6, 13])
def test_the_invariants_hold_in_some_of_these_runs(seed: int):
    drawn(seed)


def test_a_dealer_that_dies_after_its_manifest_is_read_and_averaged_for():
    """Replica 1 is killed at several times of its first rounds, so that it reads or averages nothing in one of them."""
    plan = calm(replicas=4, paces=(1.0,) * 4, kills=((13.1, 1), (19.0, 1)), settings={"path": "scatter_reduce"})
    simulation = Simulation(plan)
    commits = simulation.run()
    assert [commit.checks is not None for commit in commits[:4]].count(True) > 1
    assert any(keys.reduced.parse(info.key) for info in simulation.bucket.list(keys.ROUNDS))
