"""The policy of places in small markets of the benchmark's world: when replicas leave for a cheaper place."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import fleet

    yield fleet
    for name in ("fleet", "fleet_markets", "spot_records"):
        sys.modules.pop(name, None)


def places_after(fleet: ModuleType, minutes: int) -> Counter[str]:
    """Where four replicas train after so many minutes. A token costs 1 at a, from minute 60 on 1.3, and 1.1 at b."""
    usd = ([1.0] * 60 + [1.3] * 200)[:minutes]
    sites = [
        fleet.Site("a", 100.0, 1.0, usd, [4] * minutes),
        fleet.Site("b", 100.0, 1.0, [1.1] * minutes, [4] * minutes),
    ]
    world = fleet.World(fleet.Market(sites, least=2, most=4), math.inf)
    world.run()
    return Counter(machine.site.name for machine in world.machines.values() if machine.leaves_at == math.inf)


@pytest.mark.parametrize(("minutes", "at_a"), [(87, 3), (88, 2), (95, 0)])
def test_replicas_leave_when_the_higher_price_has_cost_as_much_as_a_start_elsewhere(fleet, minutes, at_a):
    """20 cents an hour too much, and 9 cents for five minutes of a machine that starts: after 28 minutes. One was at b
    already, which was tried; one leaves for it, and the other two once that one trains.
    """
    assert places_after(fleet, minutes)["a"] == at_a


@pytest.mark.parametrize(("hours", "training"), [(3.9, 6), (4.1, 2), (30.0, 6)])
def test_a_price_that_rises_ends_machines_beyond_the_least_until_it_is_the_usual_one(fleet, hours, training):
    """The only place costs half more from hour 4 on: what has cost less counts for a day or so, and then no more."""
    minutes = round(hours * 60)
    usd = ([1.0] * 240 + [1.5] * minutes)[:minutes]
    world = fleet.World(fleet.Market([fleet.Site("a", 100.0, 1.0, usd, [9] * minutes)], least=2, most=6), math.inf)
    world.run()
    assert sum(machine.leaves_at == math.inf for machine in world.machines.values()) == training


def test_five_minutes_of_a_start_and_one_of_leaving_are_paid_without_tokens(fleet):
    """Six machines start for $1 an hour; four of them leave once it is $1.50."""
    minutes = 246
    usd = ([1.0] * 240 + [1.5] * minutes)[:minutes]
    world = fleet.World(fleet.Market([fleet.Site("a", 100.0, 1.0, usd, [9] * minutes)], least=2, most=6), math.inf)
    found = world.run()
    assert (found.launches, found.ends) == (6, 4)
    assert found.idle_usd == pytest.approx((6 * 5 * 1.0 + 4 * 1.5) / 60)
    trained_usd = found.usd - found.idle_usd
    hours = found.tokens / 100.0 / 3600
    assert 1.0 < trained_usd / hours < 1.5
