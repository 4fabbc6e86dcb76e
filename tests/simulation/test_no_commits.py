"""Whole runs with faults in which somebody has put what is no commit under the keys of commits."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from simulation import Simulation
from simulation_plan import plan_of

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.void_commits import no_commit

pytestmark = pytest.mark.slow

GARBAGE = b"\x00garbage"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def unlinked(round_: int) -> bytes:
    """A commit of a round that names nobody's record."""
    return no_commit(round_, "forged").model_copy(update={"begin_sha256": "0" * 64, "previous": "0" * 64}).to_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_commit_costs_its_round_alone(seed: int):
    drawn = plan_of(seed)
    harms = {"collapse": False, "halt_at": None, "corrupt_payloads": (), "nan": (), "flips": (), "lies": ()}
    first = 1 + seed % 3
    placed = ((first, GARBAGE), (first + 2, unlinked(first + 2))) if seed % 2 else ((first, unlinked(first)),)
    simulation = Simulation(replace(drawn, **harms, no_commits=placed))
    commits = simulation.run()
    assert commits[-1].stop == "completed" and commits[-1].outer_step == drawn.rounds
    void = [commit.round for commit in commits if commit.reason.startswith("void")]
    assert void == [round_ for round_, _ in placed if round_ <= len(commits)]
    found = verify_run(simulation.bucket).disagreement
    assert found is not None and found.key == keys.commit(first)


def test_three_in_a_row_fail_the_run_for_the_coordinator_too():
    placed = tuple((round_, GARBAGE) for round_ in (2, 3, 4))
    harms = {"collapse": False, "halt_at": None, "corrupt_payloads": (), "nan": (), "flips": (), "lies": ()}
    simulation = Simulation(replace(plan_of(3, rounds=5), **harms, no_commits=placed))
    simulation.play()
    from diloco_orchestrator.run_log.run_log import RunLog

    log = RunLog(simulation.bucket)
    result = log.result(1)
    assert result is not None and (result.status, result.round) == ("failed", 4)
    assert len(set(simulation.last_digests.values())) == 1
