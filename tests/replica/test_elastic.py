"""Rounds that go on without everybody: deadlines, late work and its carry, coming back. Participants over one store,
one thread, a clock moved by waiting."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from protocol_fleet import Fleet, answer, play, report

from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.errors import ModelMismatch, QuorumLost
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Halt
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)


class LaggingStore(MemoryStore):
    """Its listings do not show yet what is `hidden`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[str] = set()

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix, start_after) if info.key not in self.hidden)


def fleet_of(replicas: int = 3, **settings: Any) -> tuple[Fleet, list[Participant], ManualClock]:
    """After a first round in which everybody was named, so that there is a pace: 2 s, deadline 4 s."""
    clock = ManualClock()
    fleet = Fleet(replicas=replicas, rounds=50, store=LaggingStore(), **{"quorum": None, **settings})
    joined = [fleet.join(replica_id, clock=clock) for replica_id in range(replicas)]
    one_after_another(joined, clock, [1.0] * replicas)
    return fleet, joined, clock


def one_after_another(taking: list[Participant], clock: ManualClock, values: list[float]) -> None:
    """One round of 2 s in which these answer."""
    clock.advance(2.0)
    for participant, value in zip(taking, values, strict=True):
        answer(participant, value)
    for participant in taking:
        participant.close()


def published(fleet: Fleet, manifest: Contribution) -> float:
    """The one value that fills a payload of these tests."""
    key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, 0)
    assert manifest.payload is not None
    values = Encoded(fleet.store.get(key), "fp32", manifest.payload.numel).values()
    assert bool((values == values[0]).all())
    return float(values[0])


def averaged(fleet: Fleet, round_: int) -> list[int]:
    return [a.replica_id for a in fleet.commits()[round_ - 1].answers if a.averaged]


def test_a_round_does_not_wait_longer_than_the_deadline_for_who_is_silent():
    fleet, (zero, one, two), clock = fleet_of()
    began = clock.now()
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert 4.0 <= clock.now() - began < 4.5
    assert averaged(fleet, 2) == [0, 1] and "without 2 after 4." in fleet.commits()[1].reason
    assert fleet.commits()[1].roster == (0, 1)
    began = clock.now()
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert clock.now() - began == 2.0  # not on the roster any more: nobody waits
    assert not two.open.stopped


def test_late_work_is_carried_into_the_next_contribution_and_counts_less():
    fleet, (zero, one, two), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert two.committed()
    late = answer(two, 3.0, report(steps=12))
    two.close()
    assert two.digest == zero.digest and averaged(fleet, 2) == [0, 1]
    clock.advance(2.0)
    carrying = answer(two, 1.0)
    assert [(o.round, o.steps) for o in carrying.origins] == [(2, 12), (3, 30)]
    assert published(fleet, late) == 3.0
    assert published(fleet, carrying) == pytest.approx(1.0 + carry_weight(1) * 3.0)
    for participant in (zero, one):
        answer(participant, 1.0)
    for participant in (zero, one, two):
        participant.close()
    assert averaged(fleet, 3) == [0, 1, 2] and len({p.digest for p in (zero, one, two)}) == 1
    clock.advance(2.0)
    assert [o.round for o in answer(two, 1.0).origins] == [4]  # it counted: nothing is owed any more


def test_a_contribution_in_time_that_the_commit_does_not_name_is_carried_too():
    fleet, (zero, one, two), clock = fleet_of()
    fleet.engine.hidden.add(keys.contribution(2, 2))
    answer(two, 2.0)
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert averaged(fleet, 2) == [0, 1]
    two.close()
    assert [o.round for o in answer(two, 1.0).origins] == [2, 3]


def test_who_came_late_is_waited_for_again():
    fleet, (zero, one, two), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert zero.open.roster == (0, 1)
    answer(two, 1.0)
    two.close()
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert fleet.commits()[2].roster == (0, 1, 2)


def test_a_carry_that_comes_late_itself_is_carried_on():
    fleet, (zero, one, two), clock = fleet_of()
    expected = 0.0
    for round_ in (2, 3, 4):
        one_after_another([zero, one], clock, [1.0, 1.0])
        late = answer(two, 1.0)
        expected = 1.0 + carry_weight(1) * expected
        assert published(fleet, late) == pytest.approx(expected)
        assert [o.round for o in late.origins] == list(range(2, round_ + 1))
        two.close()


def test_late_work_of_rounds_ago_counts_by_its_staleness():
    fleet, (zero, one, two), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    answer(two, 1.0)
    two.close()
    for _ in range(2):
        one_after_another([zero, one], clock, [1.0, 1.0])
        two.close()
    assert published(fleet, answer(two, 0.0)) == pytest.approx(carry_weight(3))


@pytest.mark.parametrize("in_time", [True, False])
def test_a_restarted_replica_finds_in_the_bucket_what_it_owes(in_time):
    fleet, (zero, one, two), clock = fleet_of()
    if in_time:
        fleet.engine.hidden.add(keys.contribution(2, 2))
        answer(two, 5.0)
    one_after_another([zero, one], clock, [1.0, 1.0])
    if not in_time:
        answer(two, 5.0)
    assert averaged(fleet, 2) == [0, 1]
    carrying = answer(fleet.join(2, clock=clock), 1.0)
    assert [o.round for o in carrying.origins] == [2, 3]
    assert published(fleet, carrying) == pytest.approx(1.0 + 0.8 * 5.0)


def test_what_was_named_is_not_carried_by_a_restarted_replica():
    fleet, _, clock = fleet_of()
    assert [o.round for o in answer(fleet.join(2, clock=clock), 1.0).origins] == [2]


def test_an_abstention_leaves_what_is_owed():
    fleet, (zero, one, two), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    answer(two, 2.0)
    two.close()
    one_after_another([zero, one, two], clock, [1.0, 1.0, float("nan")])
    assert averaged(fleet, 3) == [0, 1]
    assert published(fleet, answer(two, 0.0)) == pytest.approx(2.0 * carry_weight(2))


def test_late_work_is_dropped_with_a_word_if_so_wished(caplog):
    fleet, (zero, one, two), clock = fleet_of(late="drop")
    one_after_another([zero, one], clock, [1.0, 1.0])
    answer(two, 2.0, report(steps=12))
    two.close()
    with caplog.at_level(logging.WARNING):
        told = answer(two, 1.0)
    assert [(o.round, o.steps) for o in told.dropped] == [(2, 12)] and [o.round for o in told.origins] == [3]
    assert published(fleet, told) == 1.0
    assert "12 inner steps of round 2 are dropped: late is set to drop" in caplog.text


def test_a_carry_whose_payload_went_bad_is_dropped_with_a_word(caplog):
    fleet, (zero, one, two), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    late = answer(two, 2.0)
    two.close()
    key = keys.payload(late.round, 2, 1, 0)
    fleet.store.put(key, b"\x00" + fleet.store.get(key)[1:])
    told = answer(two, 1.0)
    assert [o.round for o in told.dropped] == [2] and published(fleet, told) == 1.0
    assert "30 inner steps of round 2 are dropped" in caplog.text and key in caplog.text


def test_a_round_that_names_nobody_drops_no_work():
    """With quorum "all" nothing is late, but one abstention keeps the others' work out of the round."""
    fleet = Fleet(replicas=2)
    zero, one = fleet.join_all()
    play([zero, one], [1.0, float("nan")])
    play([zero, one], [1.0, 1.0])
    commit = fleet.commits()[1]
    assert [[o.round for o in a.origins] for a in commit.answers] == [[1, 2], [2]]


def test_what_is_owed_when_the_run_stops_is_dropped_with_a_word(caplog):
    clock = ManualClock()
    fleet = Fleet(replicas=2, rounds=2, quorum=1)
    zero, one = (fleet.join(i, clock=clock) for i in (0, 1))
    one_after_another([zero, one], clock, [1.0, 1.0])
    one_after_another([zero], clock, [1.0])
    answer(one, 1.0, report(steps=7))
    one.close()
    with caplog.at_level(logging.WARNING):
        one_after_another([zero, one], clock, [0.0, 0.0])
    assert one.open.stopped and "7 inner steps of round 2 are dropped: the run has stopped" in caplog.text


def test_a_partial_round_weighs_by_its_steps():
    fleet, (zero, one, two), clock = fleet_of()
    answer(two, 2.0, report(steps=10))
    before = zero.base.copy()
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert averaged(fleet, 2) == [0, 1, 2]
    assert [a.weight for a in fleet.commits()[1].answers] == [30, 30, 10]
    mean = (1.0 + 1.0 + 2.0 / 3) / (2 + 1 / 3)
    expected = step(
        before, {"bias": torch.full((3,), mean), "weight": torch.full((3, 3), mean)}, fleet.config.outer
    ).parameters["bias"]
    assert torch.allclose(zero.base.parameters["bias"], expected)


def test_a_newcomer_announces_itself_and_is_waited_for():
    fleet, (zero, one, _), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    again = fleet.join(2, clock=clock)
    again.announce()
    said = ContributionReader(fleet.store).of(2, 2)
    assert said is not None and (said.kind, said.reason) == ("abstention", "back, after this round")
    one_after_another([zero, one], clock, [1.0, 1.0])
    assert zero.open.roster == (0, 1, 2)


def test_who_is_waited_for_anyway_has_nothing_to_announce():
    for settings in ({}, {"quorum": "all"}):
        fleet, (zero, *_), _ = fleet_of(**settings)
        before = [info.key for info in fleet.store.list("rounds/")]
        zero.announce()
        assert [info.key for info in fleet.store.list("rounds/")] == before


def test_a_replica_far_behind_follows_every_commit_to_the_same_base():
    _, (zero, one, two), clock = fleet_of()
    for _ in range(4):
        one_after_another([zero, one], clock, [1.0, 0.5])
    while two.committed():
        two.close()
    assert two.digest == zero.digest and two.open.round == zero.open.round


def test_a_quorum_of_answers_ends_a_round_without_a_quorum_of_contributions():
    fleet, (zero, one, _), clock = fleet_of()
    began = clock.now()
    one_after_another([zero, one], clock, [1.0, float("nan")])
    commit = fleet.commits()[1]
    assert not commit.applied and commit.empty_rounds == 1 and commit.roster == (0, 1)
    assert "no answer from 2, but only 1 of the 2 contributions needed" in commit.reason
    assert 12.0 <= clock.now() - began < 12.5  # three deadlines


def test_without_quorum_the_wait_ends_in_an_error_that_names_who_is_missing():
    _, (zero, *_), _ = fleet_of(timing={"round_timeout_s": 20.0, "poll_s": 0.01})
    answer(zero, 1.0)
    with pytest.raises(QuorumLost, match=r"round 2: no quorum \(2\) after 20 s; missing: 1, 2"):
        zero.close()


def test_the_first_round_of_a_leg_waits_for_everybody_to_start():
    clock = ManualClock()
    fleet = Fleet(replicas=3, quorum=1, timing={"startup_timeout_s": 20.0, "poll_s": 0.01})
    zero = fleet.join(0, clock=clock)
    answer(zero, 1.0)
    zero.close()
    assert 20.0 <= clock.now() < 20.5 and "without 1, 2 after 20.0 s" in fleet.commits()[0].reason


def test_a_restarted_replica_knows_the_pace_of_the_rounds_before():
    fleet, (_, one, _), clock = fleet_of()
    again = fleet.join(0, clock=clock)
    clock.advance(2.0)
    answer(again, 1.0), answer(one, 1.0)
    began = clock.now()
    again.close()
    assert clock.now() - began <= 2.5


def test_a_cut_contribution_tells_the_pace_of_a_whole_round():
    _, (zero, one, two), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    clock.advance(6.0)
    answer(two, 1.0, report(steps=3))  # 10 s for a tenth of a round: 100 s for a whole one
    two.close()
    answer(zero, 1.0), answer(one, 1.0)
    zero.close()
    times = zero._timing._times
    assert times.deadline is not None and times.reported[2, 2].train_s == pytest.approx(100.0, rel=0.1)


def test_replicas_that_split_the_model_otherwise_are_refused():
    fleet = Fleet(replicas=2)
    fleet.join(0)
    with pytest.raises(ModelMismatch, match="synchronises 2 fragments of the model, the run in memory:// 1"):
        fleet.join(1, fragments=[("bias",), ("weight",)])


@pytest.mark.parametrize("restarted", [False, True])
def test_each_fragment_owes_its_own(restarted):
    clock, fragments = ManualClock(), [("bias",), ("weight",)]
    fleet = Fleet(replicas=2, rounds=50, quorum=1, fragments=2)
    zero, one = (fleet.join(i, clock=clock, fragments=fragments) for i in (0, 1))

    def part(participant: Participant, value: float) -> FlatTensors:
        return FlatTensors([torch.full((3,) if participant.open.fragment == 0 else (3, 3), value)])

    for participant in (zero, one):
        participant._contributor.contribute_delta(part(participant, 1.0), report())
    zero.close(), one.close()
    for _ in range(2):  # rounds 2 and 3, of fragments 1 and 0, without replica 1
        zero._contributor.contribute_delta(part(zero, 1.0), report())
        zero.close()
        one._contributor.contribute_delta(part(one, 1.0), report(steps=5))
        one.close()
    found = []
    if restarted:
        one = fleet.join(1, clock=clock, fragments=fragments)
    for _ in range(2):
        told = one._contributor.contribute_delta(part(one, 1.0), report())
        found.append((told.fragment, [(o.round, o.steps) for o in told.origins], published(fleet, told)))
        zero._contributor.contribute_delta(part(zero, 1.0), report())
        one.close(), zero.close()
    assert found == [
        (1, [(2, 5), (4, 30)], pytest.approx(1.8)),  # one synchronisation of the fragment late, two rounds
        (0, [(3, 5), (5, 30)], pytest.approx(1.8)),
    ]


@pytest.mark.slow
def test_a_carry_of_several_shards_is_added_whole():
    clock = ManualClock()
    fleet = Fleet(replicas=2, rounds=50, quorum=1, shard_mib=1, timing={"startup_timeout_s": 20.0, "poll_s": 1.0})
    model = torch.nn.Linear(600, 600)  # 360,600 elements: one full shard and a shorter one
    zero, one = (fleet.join(i, clock=clock, model=model) for i in (0, 1))
    noise = torch.randn(360_600, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        zero._contributor.contribute_delta(FlatTensors([torch.ones(360_600)]), report())
        zero.close()
    one.close()
    one._contributor.contribute_delta(FlatTensors([noise.clone()]), report())
    one.close()
    training = torch.ones(360_600)
    told = one._contributor.contribute_delta(FlatTensors([training]), report())
    assert told.payload is not None and len(told.payload.shards) == 2
    reader, ranges = ContributionReader(fleet.store), shard_ranges(360_600, fleet.config.shard_numel)
    shards = [Encoded(reader.shard(told, i), "fp32", stop - start).values() for i, (start, stop) in enumerate(ranges)]
    assert torch.equal(torch.cat(shards), training + noise * torch.tensor(0.8))
    assert torch.equal(training, torch.ones(360_600))  # training goes on from it


def test_what_an_ended_leg_still_owed_is_told_when_the_next_one_begins(caplog):
    fleet, (zero, one, two), clock = fleet_of()
    one_after_another([zero, one], clock, [1.0, 1.0])
    answer(two, 1.0, report(steps=7))  # late, and its process dies
    fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason="lunch").to_bytes())
    one_after_another([zero, one], clock, [1.0, 1.0])
    zero.finish_leg()
    more = {"rounds": 3, "from_round": None, "by": "test", "why": "go on", "stamp": STAMP}
    begin_next_leg(RunLog(fleet.store), **more)
    with caplog.at_level(logging.WARNING):
        again = fleet.join(2, clock=clock)
    assert "7 inner steps of round 2 are dropped: their leg has ended" in caplog.text
    assert [o.round for o in answer(again, 1.0).origins] == [4]
