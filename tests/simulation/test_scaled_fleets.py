"""Whole runs on virtual time that are scaled while they train: who is averaged and waited for, and the invariants."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import pytest
from simulation import Simulation, simulate_scaled
from simulation_plan import NextLeg, calm, scaled_plan_of

from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runs with faults say much."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_invariants_hold_in_fleets_that_grow_and_shrink(first):
    """Thousands of seeds are `make simulate SCALED=1 SEEDS=…`."""
    for seed in range(first, first + 10):
        simulate_scaled(seed)


def test_plans_of_scaled_fleets_cover_what_they_should():
    plans = [scaled_plan_of(seed) for seed in range(300)]
    assert {plan.most_replicas for plan in plans} == {3, 4, 6, 8, 16} and {plan.replicas for plan in plans} == {1, 2}
    to_one_and_back = [p for p in plans if [n for _, n in p.scales] == [p.most_replicas, p.replicas, p.most_replicas]]
    assert sum(p.most_replicas == 16 and p.replicas == 1 for p in to_one_and_back) > 10
    for what in ("kills", "notices", "lies", "machines", "next_leg", "no_machine", "coordinators", "storms", "refused"):
        assert sum(bool(getattr(p, what)) for p in plans) > 10, what


def averaged(commit: Commit) -> list[int]:
    return [answer.replica_id for answer in commit.answers if answer.averaged]


GROWN = calm(replicas=2, rounds=12, paces=(1.0,) * 5, scales=((20.0, 5), (45.0, 3)), settings={"max_replicas": 5})


@pytest.fixture(scope="module")
def grown() -> Simulation:
    """Two replicas, then five, then three."""
    logging.disable(logging.CRITICAL)
    simulation = Simulation(GROWN)
    simulation.run()
    return simulation


def commits_of(simulation: Simulation) -> Sequence[Commit]:
    return RunLog(simulation.bucket).commits()


def test_a_replica_that_is_added_is_averaged_in_the_next_round_or_the_one_after(grown):
    commits, written = commits_of(grown), grown.bucket.written_at
    assert averaged(commits[0]) == [0, 1] and commits[0].roster == (0, 1)  # the first round waits for nobody else
    for replica_id in range(2, 5):
        intent = AttemptRecords(grown.bucket).intent(replica_id, 1)
        assert intent is not None
        claimed = written[keys.claim(replica_id, 1, intent.claim_token)]
        open_then = 1 + sum(written[keys.commit(commit.round)] < claimed for commit in commits)
        first = next(commit.round for commit in commits if replica_id in averaged(commit))
        assert first <= open_then + 2, f"replica {replica_id} came in round {open_then}"


def test_a_round_is_without_those_that_it_waited_for_and_not_without_vacant_ids(grown):
    missed = [row.without for row in RunReader(grown.bucket).rows() if row.applied]
    assert missed[0] == [] and {replica_id for row in missed for replica_id in row} == {3, 4}  # as they leave
    assert sum(map(bool, missed)) <= 2


def test_a_replica_that_leaves_publishes_what_it_has_trained_and_stops_nobody_for_long(grown):
    commits, reader = commits_of(grown), ContributionReader(grown.bucket)
    assert averaged(commits[-2]) == [0, 1, 2] and commits[-1].stop == "completed"
    for replica_id in (3, 4):
        last = max(c.round for c in commits if reader.of(c.round, replica_id) is not None)
        manifest = reader.of(last, replica_id)
        assert manifest is not None and manifest.kind == "delta" and 0 < manifest.own_steps <= 4
        assert grown.exit_codes[replica_id, 1] == 75
        assert AttemptRecords(grown.bucket).cancel(replica_id, 1).reason == "vacated: 3 replicas are wanted"
        assert AttemptRecords(grown.bucket).numbers(replica_id) == [1]
    waits = [commit.round for commit in commits if "without" in commit.reason]
    assert len(waits) <= 2 * 2  # a straggler deadline for each, at most in the round that it left and in the next


def test_the_quorum_follows_the_replicas_that_a_run_has_at_the_least():
    """Of eight replicas seven are killed at once and get no machines: one goes on alone, as ceil(2 / 2) may."""
    lost = range(1, 8)
    plan = calm(
        replicas=2,
        rounds=8,
        paces=(1.0,) * 8,
        scales=((1.0, 8),),
        kills=tuple((40.0, i) for i in lost),
        no_machine=tuple((40.0, 1e5, i) for i in lost),
        settings={"max_replicas": 8},
    )
    commits = Simulation(plan).run()
    assert commits[-1].stop == "completed" and averaged(commits[-2]) == [0]
    assert max(len(averaged(commit)) for commit in commits) == 8


@pytest.mark.parametrize(
    ("refused", "launched", "last"),
    [
        ((1,), {0, 1, 2, 3}, [0, 2, 3]),  # three are wanted, and three train
        ((1, 2), {0, 1, 2, 3}, [0, 3]),  # two for one cause: one vacant id is opened to try it, and no other
        ((1, 2, 3, 4, 5), {0, 1, 2, 3}, [0]),
    ],
)
def test_a_vacant_id_replaces_a_replica_that_is_refused_until_another_is_for_the_same_cause(refused, launched, last):
    settings = {"max_replicas": 6, "quorum": 1}
    plan = calm(replicas=2, rounds=12, paces=(1.0,) * 6, scales=((1.0, 3),), refused=refused, settings=settings)
    simulation = Simulation(plan)
    commits = simulation.run()
    assert commits[-1].stop == "completed" and averaged(commits[-2]) == last
    assert {i for i in range(6) if AttemptRecords(simulation.bucket).numbers(i)} == launched


def test_a_vacant_id_replaces_a_replica_whose_relaunches_are_used_up():
    """It has trained before, so that nothing of what ends it lies in the run."""
    settings = {"max_replicas": 4, "quorum": 1, "retry": {"max_errors": 0, "hung_after_s": 60.0}}
    kills = ((25.0, 1), (40.0, -1), (60.0, 2), (80.0, -1))
    plan = calm(replicas=2, rounds=20, paces=(1.0,) * 4, kills=kills, settings=settings)
    commits = Simulation(plan).run()
    assert commits[-1].stop == "completed" and averaged(commits[-2]) == [0, 3]


def test_a_resumed_run_begins_with_another_number_of_replicas():
    simulation = Simulation(dataclasses.replace(GROWN, rounds=3, scales=(), next_leg=NextLeg(rounds=3, replicas=4)))
    simulation.run()
    commits = commits_of(simulation)
    second = [commit for commit in commits if commit.leg == 2]
    assert averaged(second[0]) == [0, 1, 2, 3] and second[-1].stop == "completed"
    assert all(len(averaged(commit)) == 2 for commit in commits if commit.leg == 1 and commit.applied)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace_of_a_scaled_fleet():
    first, second = simulate_scaled(5), simulate_scaled(5)
    assert first.plan.scales and first.digest.hexdigest() == second.digest.hexdigest()
