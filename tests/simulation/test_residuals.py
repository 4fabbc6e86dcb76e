"""What codecs of very few bits lose is in the next payload once, or listed (I12), whoever is killed or late."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from simulation import Simulation
from simulation_plan import Plan, calm, wide_plan_of
from simulation_residuals import FEEDBACK
from simulation_store import InvariantBroken

from replica.rounds.debt import Debt


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def plan_with(codec: str, quorum: Any = None, **changes: Any) -> Plan:
    settings = {"codec": codec, "quorum": quorum, **changes.pop("settings", {})}
    return calm(rounds=6, width=5, settings=settings, **changes)


def paid(plan: Plan) -> int:
    simulation = Simulation(plan)
    simulation.run()
    return simulation.paid


EACH = [pytest.param(codec, marks=() if codec == "topk64" else pytest.mark.slow) for codec in FEEDBACK]


@pytest.mark.parametrize("codec", ["2bit", "topk64"])
def test_every_residual_is_in_the_next_payload(codec: str):
    """In all rounds but the first; the gradients of one replica in three are encoded by two bits without a loss."""
    assert paid(plan_with(codec)) == {"2bit": 10, "topk64": 15}[codec]


def test_of_a_late_replica_too():
    assert paid(plan_with("2bit", 2, paces=(1.0, 1.0, 2.4))) > 8


@pytest.mark.parametrize("state", ["snapshot", *(pytest.param(s, marks=pytest.mark.slow) for s in ("none", "round"))])
def test_kills_lose_it_only_with_a_word(state: str):
    kills = ((21.0, 0), (26.0, 2), (33.0, -2))
    assert paid(plan_with("topk64", settings={"replica_state": state}, kills=kills)) > 4


@pytest.mark.parametrize("codec", EACH)
def test_killed_with_every_state_saved_a_run_ends_with_the_undisturbed_bits(codec: str):
    """`Simulation.run` compares them."""
    plan = plan_with(codec, "all", kills=((14.0, 1), (22.0, 0), (31.0, -2)))
    assert plan.exact and paid(plan) >= 10


def _nothing(self: Debt, fragment: int) -> Any:
    return [], ()


_found = Debt._residual_of_newest


def _twice(self: Debt, fragment: int) -> Any:
    residual, missing = _found(self, fragment)
    return [*residual, *residual], missing


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize("fault", [_nothing, _twice])
def test_a_residual_that_is_lost_without_a_word_or_paid_twice_is_caught(codec: str, fault: Any, monkeypatch):
    monkeypatch.setattr(Debt, "_residual_of_newest", fault)
    with pytest.raises(InvariantBroken, match=r"I12: .* steps and debt make"):
        paid(plan_with(codec))


@pytest.mark.slow
def test_whatever_goes_wrong_in_runs_of_few_bits_the_invariants_hold():
    plans = [plan for plan in map(wide_plan_of, range(100, 200)) if plan.settings["codec"] in FEEDBACK]
    each = list(map(paid, plans))
    assert sum(each) > 120 and sum(map(bool, each)) > 16, each  # of 26 plans
