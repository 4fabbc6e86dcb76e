"""Data dealt over the replicas that train (`deal="open"`): whole runs on virtual time, and tables of the rule."""

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from audited_simulation import rerun_of
from simulation import Simulation
from simulation_gradients import LEARNING_RATE, Model, gradient
from simulation_plan import NextLeg, Plan, calm, scaled_plan_of

from diloco_orchestrator.protocol.deal import Dealt, OpenDeal
from diloco_orchestrator.protocol.legs import leg_of_base
from diloco_orchestrator.protocol.process import EXIT_SUPERSEDED
from diloco_orchestrator.protocol.records import Answer, Begin, Commit, Origin
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from replica.context import ReplicaContext


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Numbers(Sequence[int]):
    """A data set whose batch i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return index


class DealtSimulation(Simulation):
    """A simulation whose replicas train on one data set, and note which batch each inner step took."""

    size = 10**6

    def _train(self, ctx: ReplicaContext) -> None:
        clock, who = ctx._attempt.clock, (ctx.replica_id, ctx._attempt.number)
        if not hasattr(self, "took"):
            self.took: dict[tuple[int, int], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        model = Model(self.plan.width, self.plan.buffer)
        optimizer = torch.optim.SGD(model.trained(), lr=LEARNING_RATE)
        items = list(range(max(8, self.plan.most_replicas)))
        with ctx.attach(model, optimizer, heldout=self._score, heldout_items=items) as replica:
            session = self.sessions[who] = replica._training
            for batch in replica.batches(Numbers(self.size)):
                self.took[who[0], session.round][who[1]][session._loop.inner_step] = batch
                if hasattr(clock, "world"):  # not an audit's
                    clock.sleep(self.step_s(who[0]))
                for parameter in model.trained():
                    parameter.grad = torch.full_like(parameter, gradient(who[0], batch))
                optimizer.step()
                replica.observe(loss=1.0, tokens=1)


def played(plan: Plan, size: int = 10**6) -> DealtSimulation:
    kept = {"fragment_sync_delay": 0, "fragment_update_alpha": 0.0, "adapters": "mean", "deal": "open"}
    simulation = DealtSimulation(replace(plan, settings={**plan.settings, **kept}, nan=()))
    simulation.size = size
    simulation.play()
    return simulation


def read_in(simulation: DealtSimulation) -> list[int]:
    """Batches of all applied steps that the newest base holds, in the order of the log."""
    log, found = RunLog(simulation.bucket), []
    begins = log.begins()
    for commit in log.commits():
        if commit.applied and leg_of_base(begins, commit.round) is not None:
            for answer in commit.answers:
                for origin in answer.origins if answer.averaged else ():
                    if not origin.steps:  # what a fragment trained in rounds of others
                        continue
                    (steps, *others) = simulation.took[answer.replica_id, origin.round].values()
                    for other in others:  # attempts of a replica are dealt the same in a round
                        assert all(other[step] == steps[step] for step in other.keys() & steps.keys())
                    longest = max((steps, *others), key=len)
                    found += [longest[step] for step in range(origin.steps)]
    return found


@pytest.mark.slow
def test_each_batch_is_read_once_in_fleets_that_grow_and_shrink_and_are_killed():
    """Of 40 runs with crashes, none reads a batch twice but where work came more than four commits late."""
    twice = total = 0
    for seed in range(40):
        simulation = played(scaled_plan_of(seed))
        found = read_in(simulation)
        total, twice = total + len(found), twice + len(found) - len(set(found))
        ids, steps = simulation.plan.most_replicas, simulation.config.round_steps
        surely = range(len(found) - 8 * ids * steps)  # others may be open, or lie at the end of the pass
        assert set(surely) <= set(found), f"seed {seed} leaves batches out"
    assert total > 4000 and twice <= total / 1000, f"{twice} of {total}"


def test_a_run_that_is_scaled_reads_each_pass_whole_and_a_restarted_replica_what_it_had():
    plan = calm(
        replicas=2,
        rounds=10,
        paces=(1.0,) * 4,
        scales=((15.0, 4), (36.0, 3)),
        settings={"max_replicas": 4, "sync_every": 4},
        kills=((26.0, 1), (33.0, -2)),
    )
    simulation = played(plan, size=40)
    found = read_in(simulation)
    assert any(len(attempts) > 1 for attempts in simulation.took.values()), "nobody was restarted in its round"
    times = Counter(found)
    assert sorted(times) == list(range(40)) and max(times.values()) - min(times.values()) <= 2, times


def test_with_quorum_all_every_whole_fleet_that_is_killed_reads_the_same_and_nothing_else():
    plan = calm(replicas=3, rounds=8, paces=(1.0,) * 3, settings={"quorum": "all", "sync_every": 4})
    calmly, killed = played(plan), played(replace(plan, kills=((9.0, -2), (26.0, -2), (14.0, 1))))
    assert read_in(calmly) == read_in(killed) and sorted(read_in(calmly)) == list(range(3 * 4 * 8))
    assert [c.base_digest for c in RunLog(calmly.bucket).commits()] == [
        c.base_digest for c in RunLog(killed.bucket).commits()
    ]


def test_a_resumed_run_goes_on_in_the_data_where_it_stood():
    plan = calm(replicas=2, rounds=3, paces=(1.0,) * 3, settings={"max_replicas": 3, "sync_every": 4})
    simulation = played(replace(plan, next_leg=NextLeg(rounds=3, replicas=3)))
    found = read_in(simulation)
    assert sorted(found) == list(range(2 * 4 * 3 + 3 * 4 * 3))


def test_an_attempt_goes_on_in_its_data_behind_an_earlier_one_that_lives_and_contributed_more_to_its_round():
    """The coordinator took that one for dead. What it counted are no steps of the later one on its last batch."""
    settings = {"quorum": None, "sync_every": 10}
    simulation = played(calm(rounds=6, paces=(1.0, 1.0, 1.3), settings=settings, lies=((6.0, 1),)))
    assert simulation.exit_codes[1, 1] == EXIT_SUPERSEDED and simulation.exit_codes[1, 2] == 0
    found = read_in(simulation)
    assert len(found) == len(set(found))


def test_an_audit_trains_a_round_on_the_batches_that_the_log_dealt(tmp_path):
    simulation = played(
        calm(
            replicas=2,
            rounds=4,
            paces=(1.0,) * 3,
            scales=((8.0, 3),),
            settings={"max_replicas": 3, "replica_state": "round"},
        )
    )
    reader = ContributionReader(simulation.bucket)
    for replica_id in range(3):
        manifest = reader.of(4, replica_id)
        assert manifest is not None and manifest.kind == "delta"
        again = rerun_of(simulation, manifest, tmp_path)
        assert again.distance == 0.0 and again.differing == (), again


# -- the rule ---------------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """A deal of 1000 batches over at most four replicas, in rounds of ten steps, and the commits that it took in."""

    deal: OpenDeal
    round: int = 0

    def commit(self, steps: dict[int, dict[int, int]], roster: Sequence[int], nan: Sequence[int] = ()) -> None:
        """`steps`: by averaged replica and round of origin."""
        self.round += 1
        answers = [
            Answer.model_construct(
                replica_id=i,
                kind="abstention" if i in nan else "delta",
                averaged=i in steps,
                origins=tuple(Origin(round=r, steps=s) for r, s in steps.get(i, {}).items()),
            )
            for i in sorted({*steps, *nan})
        ]
        self.deal.add(
            Commit.model_construct(round=self.round, fragment=0, applied=True, answers=answers, roster=tuple(roster))
        )

    def dealt(self, replica_id: int) -> list[int]:
        return numbers(self.deal.of(replica_id))


def numbers(dealt: Dealt) -> list[int]:
    return [dealt.number(step) for step in range(10)]


def a_log(replicas: int = 2, size: int = 1000, fragments: int = 1) -> Log:
    deal = OpenDeal(size, 10, 4, fragments)
    deal.begin(Begin.model_construct(leg=1, after_round=0, from_round=0), replicas)
    return Log(deal)


def span(first: int, stop: int) -> list[int]:
    return list(range(first, stop))


def test_the_roster_is_dealt_the_next_batches_and_others_the_last_ones_of_the_pass():
    log = a_log()
    assert [log.dealt(i) for i in range(4)] == [span(0, 10), span(10, 20), span(980, 990), span(990, 1000)]
    log.commit({0: {1: 10}, 1: {1: 10}, 2: {1: 4}}, roster=[0, 1, 2])
    assert [log.dealt(i) for i in range(3)] == [span(20, 30), span(30, 40), span(40, 50)]
    assert not {980, 981, 982, 983} & {*log.dealt(3)}  # which replica 2 has read


def test_what_a_contribution_does_not_hold_is_dealt_again_at_once():
    log = a_log()
    log.commit({0: {1: 10}, 1: {1: 7}}, roster=[0, 1])
    assert log.dealt(0) == [17, 18, 19, *span(20, 27)]


def test_what_a_dead_replica_was_dealt_is_dealt_again_four_commits_later():
    log = a_log()
    for round_ in range(1, 5):
        log.commit({0: {round_: 10}}, roster=[0])
        assert log.dealt(0) == span(10 + 10 * round_, 20 + 10 * round_)  # its work may come late
    log.commit({0: {5: 10}}, roster=[0])
    assert log.dealt(0) == span(10, 20)


def test_late_work_is_waited_for_and_counts():
    log = a_log()
    log.commit({0: {1: 10}}, roster=[0])
    log.commit({0: {2: 10}, 1: {1: 6, 2: 5}}, roster=[0, 1])
    assert not {*log.dealt(0), *log.dealt(1)} & {*span(10, 16)} and log.dealt(0)[:4] == [16, 17, 18, 19]


def test_late_work_of_a_model_in_many_fragments_is_waited_for_until_its_fragment_moves_again():
    log = a_log(fragments=6)
    for round_ in range(1, 7):
        log.commit({0: {round_: 10}}, roster=[0])
        assert not {*log.dealt(0)} & {*span(10, 20)}
    log.commit({0: {7: 10}, 1: {1: 10, 7: 3}}, roster=[0, 1])
    for round_ in range(8, 16):
        assert not {*log.dealt(0), *log.dealt(1)} & {*span(10, 20)}
        log.commit({0: {round_: 10}, 1: {round_: 10}}, roster=[0, 1])


def test_batches_of_an_abstention_are_not_dealt_again():
    log = a_log()
    log.commit({0: {1: 10}}, roster=[0], nan=[1])
    for round_ in range(2, 8):
        assert log.dealt(0) == span(10 * round_, 10 * round_ + 10)
        log.commit({0: {round_: 10}}, roster=[0])


def test_what_a_commit_does_not_apply_is_dealt_again():
    log = a_log()
    log.round += 1
    answers = [Answer.model_construct(replica_id=0, kind="delta", averaged=True, origins=(Origin(round=1, steps=10),))]
    log.deal.add(Commit.model_construct(round=1, fragment=0, applied=False, answers=answers, roster=(0, 1)))
    for _ in range(4):
        log.commit({}, roster=[0, 1])
    assert log.dealt(0)[0] == 0


def test_a_small_data_set_is_dealt_over_many_replicas_without_any_batch_twice_in_a_round():
    log = a_log(replicas=2, size=7)
    for round_ in range(1, 30):
        dealt = [number for i in range(4) for number in log.dealt(i)]
        assert len(set(dealt)) == 40
        log.commit({0: {round_: 10}, 1: {round_: 10}}, roster=[0, 1])
    assert log.deal.of(0).index(0) < 7


@pytest.mark.parametrize("seed", range(50))
def test_nobody_is_dealt_what_another_has_or_what_was_read_though_rosters_change_and_the_end_of_the_pass_is_read(seed):
    draw = random.Random(seed)
    size = draw.randint(1, 200)
    log, read = a_log(draw.randint(1, 4), size), set[int]()
    for round_ in range(1, 40):
        dealt = {i: log.dealt(i) for i in range(4)}
        every = [number for each in dealt.values() for number in each]
        assert len(set(every)) == 40 and not read.intersection(every), f"round {round_} of batches {size}"
        steps = {i: draw.randint(1, 10) for i in range(4) if draw.random() < 0.7}
        read |= {number for i, count in steps.items() for number in dealt[i][:count]}
        log.commit({i: {round_: count} for i, count in steps.items()}, roster=[*steps] or [0])
