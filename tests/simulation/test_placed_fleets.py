"""Whole runs on virtual time at several places whose vendors lie about prices, capacity and states."""

import logging
from collections.abc import Iterator

import pytest
from simulation_places import PlacedSimulation, placed_plan_of, simulate_placed


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_runs_complete_within_their_limits_though_vendors_lie(first):
    """No launch takes the prices, as they were read, above `usd_per_hour`; one move in three rounds; and the invariants
    of every run. Thousands of seeds are `make simulate PLACED=1 SEEDS=…`."""
    for seed in range(first, first + 10):
        simulate_placed(seed)


def test_one_run_completes_though_two_of_three_vendors_lie():
    simulation = simulate_placed(4)
    assert simulation.opened > simulation.plan.replicas and simulation.places["b"].lies and simulation.places["c"].lies


def test_plans_of_runs_at_places_cover_what_they_should():
    simulations = [PlacedSimulation(placed_plan_of(seed)) for seed in range(40)]
    lies = [kind for each in simulations for place in each.places.values() for kind in place.lies]
    assert all(lies.count(kind) > 20 for kind in ("price", "capacity", "states", "launches"))
    assert {each.usd_per_hour is None for each in simulations} == {True, False}
    assert sum(bool(each.plan.kills) for each in simulations) > 10
