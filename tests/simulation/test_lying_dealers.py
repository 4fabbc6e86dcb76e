"""Runs by scatter-reduce with one or two replicas that lie about averages: the bases of the others heal (I11)."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from simulation import Simulation
from simulation_checks import RightBases
from simulation_liars import Liars
from simulation_plan import calm

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.run_log.run_log import RunLog


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def played(seed: int, who: tuple[int, ...], **lies: Any) -> tuple[Simulation, Liars, list[Commit]]:
    """A run of five replicas and twenty shards of which some lie, after its end."""
    settings = {"path": "scatter_reduce", "snapshot_every": 99}
    simulation = Simulation(calm(seed=seed, replicas=5, rounds=10, paces=(1.0,) * 5, width=40_959, settings=settings))
    liars = Liars(simulation, who, **lies)
    simulation.play()
    commits = list(RunLog(simulation.bucket).commits())
    assert commits[-1].stop == "completed"
    return simulation, liars, commits


def claims(simulation: Simulation, commits: list[Commit], but: tuple[int, ...]) -> dict[int, set[bool]]:
    """By round, whether the manifests of the replicas that do not lie claim the right base."""
    right, found = RightBases.of(simulation, commits), dict[int, set[bool]]()
    for commit in commits:
        for answer in commit.answers:
            if answer.replica_id not in but:
                key = keys.contribution(commit.round, answer.replica_id)
                manifest = Contribution.from_bytes(simulation.bucket.sent[key], key)
                found.setdefault(commit.round, set()).add(right.is_right(manifest))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("omit", [False, True], ids=["", "their commits leave out what accuses them"])
@pytest.mark.parametrize("seed", [2, 4, 8])
def test_a_pair_whose_false_average_is_drawn_is_barred_and_every_base_healed(seed: int, omit: bool):
    simulation, liars, commits = played(seed, (1, 2), omit=omit)
    barred = [commit.round for commit in commits if commit.barred == (1, 2)]
    assert liars.lies and barred and all(commit.barred in (None, (1, 2)) for commit in commits)
    of_round = claims(simulation, commits, (1, 2))
    assert False in set().union(*of_round.values()), "somebody used a false average"
    assert all(of_round[round_] == {True} for round_ in barred[1:])
    assert set(simulation.last_digests.values()) == {RightBases.of(simulation, commits).last}
    assert verify_run(simulation.bucket).disagreement is None


@pytest.mark.slow
def test_a_false_average_that_nobody_draws_is_in_the_bases_until_one_is_rebuilt_and_verify_says_so():
    simulation, _, commits = played(0, (1, 2))
    assert claims(simulation, commits, (1, 2))[2] == {False}
    found = verify_run(simulation.bucket).disagreement
    assert found is not None and "the outer steps before, computed again, give" in found.words
    assert set(simulation.last_digests.values()) == {RightBases.of(simulation, commits).last}  # rebuilt at the end


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_one_liar_that_accuses_others_bars_nobody_but_itself_and_costs_no_work(seed: int):
    simulation, _, commits = played(seed, (1,), accuse=True)
    assert commits[-1].barred == (1,) and all(commit.barred in (None, (1,)) for commit in commits)
    assert set().union(*claims(simulation, commits, ()).values()) == {True}
    assert all(answer.averaged for commit in commits[:-1] for answer in commit.answers)
