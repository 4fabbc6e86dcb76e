"""Two replicas claim different bases while a third is away: the round waits for it, and only the wrong one leaves."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from simulation import Simulation, simulate_wide
from simulation_checks import check
from simulation_plan import calm

from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.process import EXIT_PERMANENT

WITHOUT_S = 13.0  # in the second round
ROUND_TIMEOUT_S = 900.0
AWAY_S = 400.0  # far beyond three straggler deadlines, within `round_timeout_s`


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def third_away(away_s: float = AWAY_S, quorum: int | None = None, **changes: Any) -> Simulation:
    """A run in which replica 2 is killed in the second round, and gets no machine for `away_s`."""
    away = {"kills": ((WITHOUT_S, 2),), "no_machine": ((WITHOUT_S, WITHOUT_S + away_s, 2),)}
    simulation = Simulation(calm(rounds=5, settings={"quorum": quorum, "snapshot_every": 1}, **away, **changes))
    simulation.play()
    return simulation


def commit_times(simulation: Simulation) -> list[float]:
    return [when for key, when in simulation.bucket.written_at.items() if key.endswith("/commit.json")]


def left_for_good(simulation: Simulation) -> set[int]:
    return {i for (i, _), code in simulation.exit_codes.items() if code == EXIT_PERMANENT}


@pytest.mark.parametrize("quorum", [None, 1])
@pytest.mark.parametrize("different", [0, 1])
def test_a_tie_waits_for_the_absent_replica_and_only_the_wrong_one_leaves(different: int, quorum: int | None):
    simulation = third_away(quorum=quorum, other_arithmetic=(different,))
    assert check(simulation)[-1].stop == "completed" and left_for_good(simulation) == {different}


def test_a_tie_of_a_drawn_run_waits_too():
    simulate_wide(190000663)


def test_a_bit_that_flipped_makes_nobody_wait_for_the_absent_replica():
    """Who rebuilt its base and found that it was the wrong one knows who is right."""
    simulation = third_away(flips=((WITHOUT_S + 0.5, 1, "parameters"),))
    assert check(simulation)[-1].stop == "completed" and simulation.flipped
    assert max(commit_times(simulation)) < AWAY_S / 4 and not left_for_good(simulation)


def test_a_tie_that_nobody_breaks_ends_with_one_of_the_two():
    simulation = third_away(away_s=3 * ROUND_TIMEOUT_S, other_arithmetic=(0,))
    second = commit_times(simulation)[1]
    assert ROUND_TIMEOUT_S < second < ROUND_TIMEOUT_S + 60 and len(left_for_good(simulation) & {0, 1}) == 1


def test_a_request_to_halt_ends_a_tie():
    simulation = third_away(other_arithmetic=(0,), halt_at=60.0)
    assert RunReader(simulation.bucket).commits()[-1].stop == "halted" and max(commit_times(simulation)) < AWAY_S / 2
