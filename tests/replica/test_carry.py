"""What late work weighs, where it may not be carried, and what a lost carry leaves behind."""

import logging
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from protocol_fleet import BY_HAND, Fleet, answer, report, together

from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.codecs.table import Encoded, encode
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution, Payload, Score
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.contributions import ContributionReader
from replica.rounds.debt import StoredPayload, WithDebt
from replica.rounds.participant import Participant


def fleet_of(replicas: int = 3, **settings: object) -> tuple[Fleet, list[Participant], ManualClock]:
    """After a first round of 2 s in which everybody was averaged."""
    clock = ManualClock()
    fleet = Fleet(replicas=replicas, rounds=50, **{"quorum": None, "timing": BY_HAND, **settings})
    joined = [fleet.join(replica_id, clock=clock) for replica_id in range(replicas)]
    round_without(joined, clock)
    return fleet, joined, clock


def round_without(taking: list[Participant], clock: ManualClock) -> None:
    """One round of 2 s in which only these answer."""
    clock.advance(2.0)
    for participant in taking:
        answer(participant, 1.0, replace(report(), tokens=100))
    for participant in taking:
        participant.close()


def from_another_base(fleet: Fleet, said: Contribution) -> None:
    """Let a manifest claim another base than its round started from."""
    stray = said.model_copy(update={"base_digest": "b3:" + "0" * 64})
    fleet.store.put(keys.contribution(said.round, said.replica_id), stray.to_bytes())


def test_work_from_another_base_is_dropped_with_a_word_and_not_carried(caplog):
    """A replica whose base was not the round's, because its machine computes other bits, leaves an answer behind."""
    fleet, (zero, one, two), clock = fleet_of()
    said = answer(two, 3.0, report(steps=12))
    from_another_base(fleet, said)
    round_without([zero, one], clock)
    assert [a.kind for a in fleet.commits()[1].answers] == ["delta", "delta", "wrong_base"]
    with caplog.at_level(logging.WARNING):
        again = fleet.join(2, clock=clock)
    assert "our 12 inner steps, from another base, are dropped" in caplog.text
    said = answer(again, 1.0)
    assert [origin.round for origin in said.origins] == [3]
    assert [(origin.round, origin.steps) for origin in said.dropped] == [(2, 12)]  # and its next manifest says so
    round_without([zero, one], clock)
    again.close()
    assert answer(again, 1.0).dropped == ()  # once


def test_work_that_a_newer_manifest_lists_as_dropped_is_not_listed_again_after_a_restart():
    fleet, (zero, one, two), clock = fleet_of()
    for round_ in (2, 3):  # in both from another base
        said = answer(two, 1.0)
        assert [origin.round for origin in said.dropped] == list(range(2, round_))
        from_another_base(fleet, said)
        round_without([zero, one], clock)
        two = fleet.join(2, clock=clock)
    assert [origin.round for origin in answer(two, 1.0).dropped] == [3]


def test_what_a_left_out_contribution_carried_is_given_up_with_it():
    fleet, joined, clock = fleet_of(4, scored=True, guard={"per_replica": True})
    *others, three = joined
    for _ in range(2):  # its first late answer puts it on the roster again
        round_without(others, clock)
        answer(three, 1.0)
        three.close()
    for share, participant in enumerate(joined):
        local = Score(share=share, sum=None if participant is three else 6.0, count=10)
        said = answer(participant, 1.0, replace(report(share=share, score=0.5), local_scores=(local,)))
    assert [origin.round for origin in said.origins] == [2, 3, 4]
    for participant in joined:
        participant.close()
    assert [left.replica_id for left in fleet.commits()[3].quarantined] == [3]
    said = answer(three, 1.0)
    assert [origin.round for origin in said.origins] == [5] and [origin.round for origin in said.dropped] == [2, 3, 4]


def test_work_from_another_base_leaves_what_was_owed_before():
    fleet, (zero, one, two), clock = fleet_of()
    round_without([zero, one], clock)
    answer(two, 2.0)  # late: owed
    two.close()
    said = answer(two, 3.0)
    assert [origin.round for origin in said.origins] == [2, 3]
    from_another_base(fleet, said)
    round_without([zero, one], clock)
    again = fleet.join(2, clock=clock)
    said = answer(again, 1.0)
    assert [origin.round for origin in said.origins] == [2, 4] and [origin.round for origin in said.dropped] == [3]


def test_work_of_a_round_that_moved_nothing_counts_less_in_the_next_one_though_its_fragment_stays_the_open_one():
    """With two fragments that is one round late, and less than one turn of all fragments."""
    fleet = Fleet(replicas=2, fragments=2)
    zero, one = (fleet.join(i, fragments=[("bias",), ("weight",)]) for i in (0, 1))
    for values in ((1.0, float("nan")), (1.0, 1.0)):
        said, _ = (
            participant._contributor.contribute_delta(FlatTensors([torch.full((3,), value)]), report())
            for participant, value in zip((zero, one), values, strict=True)
        )
        together([zero.close, one.close])
    assert (said.fragment, [origin.round for origin in said.origins]) == (0, [1, 2])
    published = Encoded(fleet.store.get(keys.payload(2, 0, 1, 0)), "fp32", 3).values()
    assert published.tolist() == pytest.approx([1.0 + carry_weight(1)] * 3)


def test_every_shard_of_a_carry_is_added_however_the_sum_is_read():
    carried = torch.arange(10, dtype=torch.float32)
    payload = Payload(codec="fp32", numel=10, shard_numel=4, shards=())
    for cuts in ([0, 10], [0, 3, 5, 10], [0, 4, 8, 10], [0, 1, 9, 10]):
        stored = StoredPayload(payload)
        for index, part in enumerate(carried.split(4)):
            stored.put(index, encode(part, "fp32"))
        with closing(WithDebt(FlatTensors([torch.ones(10)]), [(stored, 0.5)])) as both:
            read = torch.cat([both.read(start, stop) for start, stop in pairwise(cuts)])
            assert torch.equal(read, 1.0 + 0.5 * carried)


def weights_in(fleet: Fleet, round_: int) -> dict[int, int]:
    return {a.replica_id: a.weight for a in fleet.commits()[round_ - 1].answers}


def test_by_tokens_a_contribution_weighs_more_for_the_steps_that_it_carries():
    """30 steps of 100 tokens and 15 steps carried along count as 150 tokens."""
    fleet, (zero, one, two), clock = fleet_of(weights="tokens")
    round_without([zero, one], clock)
    answer(two, 1.0, replace(report(steps=15), tokens=50))
    two.close()
    assert answer(two, 1.0, replace(report(steps=30), tokens=100)).tokens == 100
    round_without([zero, one], clock)
    assert weights_in(fleet, 3) == {0: 100, 1: 100, 2: 150}


def test_a_whole_round_that_carries_another_weighs_no_more_than_one():
    fleet, (zero, one, two), clock = fleet_of()
    round_without([zero, one], clock)
    answer(two, 1.0)
    two.close()
    carrying = answer(two, 1.0)
    round_without([zero, one], clock)
    assert [origin.steps for origin in carrying.origins] == [30, 30]
    assert weights_in(fleet, 3) == {0: 30, 1: 30, 2: 30}


def test_a_part_that_carries_the_rest_of_its_round_weighs_as_much_as_a_whole_one():
    fleet, (zero, one, two), clock = fleet_of()
    answer(two, 1.0, report(steps=20))
    round_without([zero, one], clock)
    two.close()
    assert weights_in(fleet, 2)[2] == 20
    round_without([zero, one], clock)
    answer(two, 1.0, report(steps=20))
    two.close()
    answer(two, 1.0, report(steps=10))
    round_without([zero, one], clock)
    assert weights_in(fleet, 4)[2] == 30


def test_of_several_rounds_that_went_on_without_it_a_restarted_replica_carries_what_its_newest_holds():
    fleet, (zero, one, two), clock = fleet_of()
    for _ in range(2):
        round_without([zero, one], clock)
        answer(two, 1.0)
        two.close()
    newest = answer(fleet.join(2, clock=clock), 1.0)
    assert [origin.round for origin in newest.origins] == [2, 3, 4]


def test_a_manifest_of_who_is_late_in_every_round_does_not_grow_for_good():
    """It listed every round of the leg, and so did the commit that averaged it."""
    fleet, (zero, one, two), clock = fleet_of()
    for _ in range(40):
        round_without([zero, one], clock)
        answer(two, 1.0)
        two.close()
    said = answer(two, 1.0)
    assert [origin.round for origin in said.origins] == [*range(10, 42), 42]
    dropped = [ContributionReader(fleet.store).exact(round_, 2, None).dropped for round_ in range(2, 42)]
    assert [each.round for each in sum((*dropped, said.dropped), ())] == list(range(2, 10))
    assert carry_weight(1) ** 32 < 0.001


def test_a_carry_whose_payload_was_deleted_is_listed_as_dropped_and_does_not_count():
    fleet, (zero, one, two), clock = fleet_of()
    round_without([zero, one], clock)
    answer(two, 2.0)
    two.close()
    fleet.store.delete(keys.payload(2, 2, 1, 0))
    said = answer(two, 1.0)
    assert [origin.round for origin in said.dropped] == [2] and [origin.round for origin in said.origins] == [3]


def test_who_came_late_once_and_then_died_is_waited_for_once_more_and_then_not():
    fleet, (zero, one, two), clock = fleet_of()
    round_without([zero, one], clock)
    answer(two, 1.0)  # late
    rosters = []
    for _ in range(3):
        round_without([zero, one], clock)
        rosters.append(fleet.commits()[-1].roster)
    assert rosters == [(0, 1, 2), (0, 1), (0, 1)]


def test_work_of_a_void_round_from_a_wrong_base_is_dropped_once_the_base_is_healed():
    """A void commit names no base, so that the replica judges the work by its own, and would carry it."""
    fleet, joined, clock = fleet_of()
    *others, two = joined
    with torch.no_grad():
        two.base.parameters["bias"].add_(1.0)  # a bit has flipped
    fleet.engine.create(keys.commit(2), b"junk")
    round_without([two], clock)  # before it has seen what others claim
    round_without(others, clock)
    clock.advance(2.0)
    for participant in joined:
        answer(participant, 1.0)
    together([participant.close for participant in joined])
    assert [a.kind for a in fleet.commits()[2].answers] == ["delta", "delta", "wrong_base"]
    said = answer(two, 1.0)
    assert [origin.round for origin in said.origins] == [4]
    assert [origin.round for origin in said.dropped] == [2, 3]
