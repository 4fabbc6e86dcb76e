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
    """Where four replicas train after so many minutes. A token costs 1 at a, from minute 60 on 1.5, and 1.2 at b."""
    usd = ([1.0] * 60 + [1.5] * 200)[:minutes]
    sites = [
        fleet.Site("a", 100.0, 1.0, usd, [4] * minutes),
        fleet.Site("b", 100.0, 1.0, [1.2] * minutes, [4] * minutes),
    ]
    world = fleet.World(fleet.Market(sites, least=2, most=4), math.inf)
    world.run()
    return Counter(machine.site.name for machine in world.machines.values() if machine.leaves_at == math.inf)


@pytest.mark.parametrize(("minutes", "at_a"), [(79, 3), (80, 2), (88, 0)])
def test_replicas_leave_when_the_higher_price_has_cost_as_much_as_a_start_elsewhere(fleet, minutes, at_a):
    """30 cents an hour too much, and ten cents for five minutes of a machine that starts: after 20 minutes. One was at
    b already, which was tried; one leaves for it, and the other two once that one trains.
    """
    assert places_after(fleet, minutes)["a"] == at_a
