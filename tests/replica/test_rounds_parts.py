"""The parts of a replica's round one by one: the transfer beside training, and when to poll for a commit."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from protocol_fleet import Fleet, answer

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import StoreUnavailable
from diloco_orchestrator.protocol.records import Contribution
from replica.rounds.participant import Participant
from replica.rounds.transfer import Transfer

CONTRIBUTION = Contribution.model_construct(round=1)


class ByHand:
    """Background work that moves when a test says so."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.tick: Callable[[], None] = lambda: None
        self.stopped = False

    def start(self, call: Callable[[], Any]) -> "Future[Any]":
        return self.future

    def every(self, interval_s: float, call: Callable[[], None]) -> "ByHand":
        self.tick = call
        return self

    def stop(self) -> None:
        self.stopped = True


def test_others_are_received_beside_training_once_our_own_is_published():
    background, polls = ByHand(), []
    transfer = Transfer(background, lambda: CONTRIBUTION, poll=lambda: polls.append(1), poll_s=1.0)
    background.tick()
    assert not polls
    background.future.set_result(CONTRIBUTION)
    background.tick()
    assert polls == [1] and transfer.wait() is CONTRIBUTION and background.stopped


def test_an_error_of_a_poll_beside_training_is_left_to_whoever_closes_the_round():
    def unavailable() -> None:
        raise StoreUnavailable("no route to host.")

    background = ByHand()
    transfer = Transfer(background, lambda: CONTRIBUTION, poll=unavailable, poll_s=1.0)
    background.future.set_result(CONTRIBUTION)
    background.tick()
    assert transfer.wait() is CONTRIBUTION


def test_an_error_of_publishing_is_raised_where_it_is_waited_for_and_polling_ends():
    background = ByHand()
    transfer = Transfer(background, lambda: CONTRIBUTION, poll=lambda: None, poll_s=1.0)
    background.future.set_exception(StoreUnavailable("no route to host."))
    with pytest.raises(StoreUnavailable):
        transfer.wait()
    assert background.stopped


# -- when to poll for a commit ----------------------------------------------------------------------------------------


def fleet_of(**settings: Any) -> tuple[list[Participant], ManualClock]:
    """Three replicas after a round of 100 s: the deadline of the next is 150 s. Polls are 10 s apart."""
    clock = ManualClock(start=1000.0)
    timing = {"poll_s": 10.0, "round_timeout_s": 2000.0, "startup_timeout_s": 2000.0}
    fleet = Fleet(replicas=3, rounds=9, timing=timing, **{"quorum": None, **settings})
    joined = [fleet.join(i, clock=clock) for i in range(3)]
    clock.advance(100.0)
    for participant in joined:
        answer(participant, 1.0)
    for participant in joined:
        participant.close()
    return joined, clock


def test_nobody_polls_before_ninety_percent_of_the_deadline():
    (zero, *_), clock = fleet_of()
    clock.advance(135.0)
    assert not zero.timing.poll_due()
    clock.advance(0.1)
    assert zero.timing.poll_due()


def test_polls_are_apart():
    (zero, *_), clock = fleet_of()
    clock.advance(140.0)
    assert [zero.timing.poll_due(), zero.timing.poll_due()] == [True, False]
    clock.advance(9.9)
    assert not zero.timing.poll_due()
    clock.advance(0.1)
    assert zero.timing.poll_due()


def test_a_replica_off_the_roster_polls_from_the_start():
    (zero, one, two), clock = fleet_of()
    clock.advance(100.0)
    for participant in (zero, one):
        answer(participant, 1.0)
    zero.close(), two.close()
    assert zero.roster == (0, 1)
    assert two.timing.poll_due() and not zero.timing.poll_due()


def test_in_the_first_round_of_a_leg_everybody_polls_from_the_start():
    fleet = Fleet(replicas=2, quorum=1)
    assert fleet.join(0, clock=ManualClock()).timing.poll_due()


def test_with_quorum_all_nobody_polls():
    (zero, *_), clock = fleet_of(quorum="all")
    clock.advance(1e6)
    assert not zero.timing.poll_due()


@pytest.mark.parametrize(
    ("elapsed_s", "steps", "behind"),
    [
        (100.0, 20, False),  # 150 s for the whole round, just the deadline
        (100.0, 19, True),  # 158 s for the whole round, and the next step ends after the median
        (90.0, 17, False),  # 159 s, but the next step ends before the median
        (100.0, 0, False),  # nothing to publish
        (100.0, 30, False),  # whole
    ],
)
def test_a_replica_is_behind_if_it_would_miss_the_deadline_with_a_whole_round(elapsed_s, steps, behind):
    (zero, *_), clock = fleet_of(sync_every=30)
    clock.advance(elapsed_s)
    assert zero.timing.is_behind(steps) is behind
