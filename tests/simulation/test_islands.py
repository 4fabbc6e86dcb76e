"""Replicas of several ranks on virtual time, whose ranks die and stop at any line: the invariants hold."""

import logging
from collections.abc import Iterator

import pytest
from simulation import Simulation, simulate_islands
from simulation_plan import calm


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_replicas_of_several_ranks_train_what_single_processes_do():
    """`check` compares the digests of their bases with those of a run whose replicas have one rank each."""
    settings = {"quorum": "all", "ranks_per_replica": [2, 1, 3], "weights": "uniform", "fragments": 2, "sync_every": 4}
    simulation = Simulation(calm(rounds=2, settings=settings))
    simulation.run()
    assert set(simulation.exit_codes.values()) == {0}
    assert {who[0]: len(ranks) for who, ranks in simulation.ranks.items()} == {0: 2, 2: 3}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_invariants_hold_whichever_rank_dies(first):
    hit = 0
    for seed in range(first, first + 10):
        hit += simulate_islands(seed).ranks_hit
    assert hit >= 3  # where deaths fall, follows from the calls that a seed makes
