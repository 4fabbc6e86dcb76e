"""What late work weighs, where it may not be carried, and what a lost carry leaves behind."""

import logging
from dataclasses import replace

from protocol_fleet import BY_HAND, Fleet, answer, report

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.protocol import keys
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


def test_work_from_another_base_is_dropped_with_a_word_and_not_carried(caplog):
    """A replica whose base was not the round's, because its machine computes other bits, leaves an answer behind."""
    fleet, (zero, one, two), clock = fleet_of()
    said = answer(two, 3.0, report(steps=12))
    fleet.store.put(keys.contribution(2, 2), said.model_copy(update={"base_digest": "b3:" + "0" * 64}).to_bytes())
    round_without([zero, one], clock)
    assert [a.kind for a in fleet.commits()[1].answers] == ["delta", "delta", "wrong_base"]
    with caplog.at_level(logging.WARNING):
        again = fleet.join(2, clock=clock)
    assert "our 12 inner steps, from another base, are dropped" in caplog.text
    said = answer(again, 1.0)
    assert [origin.round for origin in said.origins] == [3]
    assert [(origin.round, origin.steps) for origin in said.dropped] == [(2, 12)]  # and its next manifest says so


def test_work_from_another_base_leaves_what_was_owed_before():
    fleet, (zero, one, two), clock = fleet_of()
    round_without([zero, one], clock)
    answer(two, 2.0)  # late: owed
    two.close()
    said = answer(two, 3.0)
    stray = said.model_copy(update={"base_digest": "b3:" + "0" * 64, "origins": said.origins[-1:]})
    fleet.store.put(keys.contribution(3, 2), stray.to_bytes())
    round_without([zero, one], clock)
    again = fleet.join(2, clock=clock)
    assert [origin.round for origin in answer(again, 1.0).origins] == [2, 4]


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
