"""The parts of a replica's round one by one: the round beside training, and when to poll for a commit."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from protocol_fleet import Fleet, answer, close, delta, report
from scripted import STAMP

from diloco_orchestrator.clock import ManualClock, NoBackground, ThreadBackground
from diloco_orchestrator.errors import Preempted, QuorumLost, StoreUnavailable
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Cancel
from diloco_orchestrator.protocol.records import Halt, Out
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from replica.rounds.interface import ClosedRound
from replica.rounds.participant import Participant, Transfer
from replica.rounds.tip import OpenRound

CLOSED = ClosedRound(applied=True, skipped=False, average={})
OPEN = OpenRound(12, 0, ("weight",), 11)


class Work(Future[Any]):
    """A call in the background that is done when a test says so, or when somebody waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def do(self) -> None:
        try:
            self.set_result(self.call())
        except BaseException as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.do()
        return super().result()


class ByHand:
    """Background calls in the order in which they began. Those that they start themselves are done at once."""

    def __init__(self) -> None:
        self.begun: list[Work] = []
        self._inside = False

    def start(self, call: Callable[[], Any]) -> "Future[Any]":
        if self._inside:
            return NoBackground().start(call)

        def run() -> Any:
            self._inside = True
            try:
                return call()
            finally:
                self._inside = False

        self.begun.append(Work(run))
        return self.begun[-1]

    def every(self, interval_s: float, call: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("a round starts nothing periodic")

    def do_all(self) -> None:
        for work in self.begun:
            if not work.done():
                work.do()


def transfer_of(clock: ManualClock, publish_s: float = 1.0, close_s: float = 5.0) -> tuple[Transfer, ByHand, list[str]]:
    """A transfer of round 12 whose two calls take so long, and what was done so far."""
    background, done = ByHand(), list[str]()

    def contribute() -> None:
        clock.advance(publish_s)
        done.append("published")

    def close() -> ClosedRound:
        clock.advance(close_s)
        done.append("closed")
        return CLOSED

    transfer = Transfer(background, clock, OPEN, contribute)
    transfer.close(close)
    transfer.close(close)  # it has begun: nothing happens
    return transfer, background, done


def test_a_round_is_closed_behind_its_publishing_which_can_be_waited_for_alone():
    transfer, background, done = transfer_of(ManualClock())
    transfer.wait_published()
    transfer.raise_error()
    assert done == ["published"]
    background.do_all()
    assert transfer.wait() is CLOSED and done == ["published", "closed"] and len(background.begun) == 2


@pytest.mark.parametrize(
    ("finished", "words"), [(2, "waited 0.0 s of 6.0 s"), (1, "waited 5.0 s of 6.0 s"), (0, "waited 6.0 s of 6.0 s")]
)
def test_the_log_says_how_long_training_waited_for_how_long_a_round(finished: int, words: str, caplog):
    """`finished`: how many of the two calls are done when training comes to the synchronisation step."""
    caplog.set_level("INFO")
    transfer, background, _ = transfer_of(clock := ManualClock())
    for work in background.begun[:finished]:
        work.do()
    if finished == 2:
        clock.advance(35.2)  # training goes on
    transfer.wait()
    assert f"round 12: {words}" in caplog.text


def test_an_error_of_publishing_is_raised_wherever_it_is_looked_for():
    background = ByHand()

    def contribute() -> None:
        raise StoreUnavailable("no route to host.")

    transfer = Transfer(background, ManualClock(), OPEN, contribute)
    transfer.close(lambda: CLOSED)
    transfer.raise_error()
    background.do_all()
    for look in (transfer.wait_published, transfer.raise_error, transfer.wait):
        with pytest.raises(StoreUnavailable):
            look()


def test_an_error_of_closing_leaves_what_is_published():
    background = ByHand()

    def close() -> ClosedRound:
        raise QuorumLost("nobody is there.", (1,))

    transfer = Transfer(background, ManualClock(), OPEN, lambda: None)
    transfer.close(close)
    background.do_all()
    transfer.wait_published()
    for look in (transfer.raise_error, transfer.wait):
        with pytest.raises(QuorumLost):
            look()


def test_a_replica_says_that_it_publishes_unless_it_trains_meanwhile():
    background, fleet, said = ByHand(), Fleet(replicas=1, rounds=2), list[str]()
    taking = fleet.join(0, background=background)

    def form() -> Any:
        said.append(taking._attempt.pulse.phase)
        return delta(1.0)

    taking.publish(form, report())
    taking.close()
    taking._attempt.pulse.phase = "training"
    taking.publish(form, report(), in_background=True)
    background.do_all()
    assert said == ["publishing", "training"]


def test_while_a_round_is_in_flight_nothing_moves_for_training_though_it_is_closed():
    background, fleet, then = ByHand(), Fleet(replicas=1, rounds=1), list[int]()
    taking = fleet.join(0, background=background)
    before, pulse = taking.open, taking._attempt.pulse.round
    taking.publish(lambda: delta(1.0), report(), in_background=True)
    taking.close_beside_training(lambda: then.append(taking._tip.open.round))
    background.do_all()
    assert len(fleet.commits()) == 1 and then == [2]
    taking.close_beside_training(lambda: then.append(0))
    assert (taking.open, taking._attempt.pulse.round) == (before, pulse) and not taking.open.final_evaluation
    assert taking.close().applied and then == [2]
    assert (taking.open.round, taking.open.outer_step, taking._attempt.pulse.round, taking.open.final_evaluation) == (
        2,
        1,
        2,
        True,
    )


def test_the_time_of_the_next_round_begins_when_training_takes_its_base():
    background, clock = ByHand(), ManualClock()
    taking = Fleet(replicas=1).join(0, clock=clock, background=background)
    taking.publish(lambda: delta(1.0), report(), in_background=True)
    taking.close_beside_training()
    background.do_all()
    clock.advance(30.0)  # inner steps of the round before
    taking.close()
    assert taking._timing.train_s == 0.0


def test_a_round_to_which_an_earlier_attempt_contributed_is_closed_beside_training_too():
    background, fleet = ByHand(), Fleet(replicas=1)
    answer(fleet.join(0), 1.0)
    again = fleet.join(0, background=background)
    again.close_beside_training()
    background.do_all()
    assert len(fleet.commits()) == 1 and again.open.round == 1
    assert again.close().applied and again.open.round == 2


def test_a_round_that_ended_beside_training_has_the_average_that_was_asked_for():
    background = ByHand()
    taking = Fleet(replicas=1).join(0, background=background)
    taking.publish(lambda: delta(1.0), report(), in_background=True)
    taking.close_beside_training(keep_average=True)
    background.do_all()
    assert set(taking.close(keep_average=True).average) == set(taking.open.names)


def test_a_snapshot_is_written_beside_training_and_before_the_base_is_stepped_again():
    background, fleet = ByHand(), Fleet(replicas=1, rounds=2, snapshot_every=1)
    taking = fleet.join(0, background=background)
    answer(taking, 1.0)
    taking.close()
    taking.write_snapshot_if_due()
    assert RunLog(fleet.store).snapshots() == [0]
    digest = taking.digest
    answer(taking, 1.0)
    taking.close()
    assert taking.digest != digest and RunLog(fleet.store).snapshots() == [0, 1]
    stored = StoredSnapshot(fleet.store, 1, RunLog(fleet.store).snapshot(1))
    assert stored.base(fleet.start()).digest() == digest


def test_who_leaves_waits_for_the_background_and_not_for_the_others():
    """The other replica never comes, so the round cannot end."""
    taking = Fleet(replicas=2).join(0, background=ThreadBackground())
    taking.publish(lambda: delta(1.0), report(), in_background=True)
    taking.close_beside_training()
    taking.leave()
    with pytest.raises(Preempted):
        taking.close_beside_training()


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
    assert not zero._timing.poll_due()
    clock.advance(0.1)
    assert zero._timing.poll_due()


def test_polls_are_apart():
    (zero, *_), clock = fleet_of()
    clock.advance(140.0)
    assert [zero._timing.poll_due(), zero._timing.poll_due()] == [True, False]
    clock.advance(9.9)
    assert not zero._timing.poll_due()
    clock.advance(0.1)
    assert zero._timing.poll_due()


def test_a_replica_off_the_roster_polls_from_the_start():
    (zero, one, two), clock = fleet_of()
    clock.advance(100.0)
    for participant in (zero, one):
        answer(participant, 1.0)
    zero.close(), two.close()
    assert zero.open.roster == (0, 1)
    assert two._timing.poll_due() and not zero._timing.poll_due()


def be_out(participant: Participant, replica_id: int) -> None:
    out = Out(**STAMP(), leg=1, replica_id=replica_id, attempt=1, by="coordinator", reason="another model")
    participant._attempt.store.create(keys.out(1, replica_id), out.to_bytes())


def test_a_round_does_not_wait_for_a_replica_that_is_out():
    (zero, one, _), clock = fleet_of()
    be_out(zero, 2)
    clock.advance(20.0)
    answer(one, 1.0), answer(zero, 1.0)
    before = clock.now()
    assert close(zero).commit.reason.startswith("2 of 3 contributions, out for good: 2")
    assert clock.now() - before < 30.0  # the straggler deadline is 130 s ahead


def test_who_may_not_commit_leaves_once_all_that_may_are_out():
    """It waited without end: its round can end, and nobody ends it."""
    (*_, two), clock = fleet_of(invited=[2], quorum=1, aggregate="mean")
    be_out(two, 0), be_out(two, 1)
    clock.advance(20.0)
    answer(two, 1.0)
    with pytest.raises(QuorumLost, match=r"replicas \[0, 1\] are out, and no other one may commit"):
        two.close()


def test_a_replica_that_answers_after_it_was_called_out_is_waited_for_again():
    """Whoever may write to the bucket can write that a replica is out; it costs that replica one round."""
    (zero, one, two), clock = fleet_of()
    be_out(zero, 2)
    clock.advance(20.0)
    answer(one, 1.0), answer(zero, 1.0)
    close(zero), close(one)
    answer(two, 1.0), close(two)  # late, which is carried
    clock.advance(100.0)
    for participant in (zero, one, two):
        answer(participant, 1.0)
    assert close(zero).commit.roster == (0, 1, 2)
    close(one), close(two)
    answer(zero, 1.0), answer(one, 1.0)
    before = clock.now()
    assert "out for good" not in close(zero).commit.reason
    assert clock.now() - before > 60.0


def be_vacated(participant: Participant, replica_id: int) -> None:
    cancel = Cancel(**STAMP(), replica_id=replica_id, attempt=1, reason="vacated: no machine")
    participant._attempt.store.create(keys.cancel(replica_id, 1), cancel.to_bytes())


def test_a_round_with_too_few_contributions_waits_for_a_vacated_replica_as_long_as_for_a_quorum():
    """Three rounds that name nobody would fail the run in seconds, while the replica is being launched again."""
    (zero, one, _), clock = fleet_of(max_replicas=4)
    be_out(zero, 2), be_vacated(zero, 1)
    clock.advance(20.0)
    answer(zero, 1.0)
    before = clock.now()
    with pytest.raises(QuorumLost, match=r"missing: 1\."):
        close(zero)
    assert clock.now() - before > 60.0
    answer(one, 1.0)
    assert close(zero).commit.reason.startswith("2 of 3 contributions, out for good: 2")


def test_a_round_with_a_quorum_does_not_wait_for_a_vacated_replica_and_one_given_up_since_is_out():
    (zero, one, _), clock = fleet_of(max_replicas=4)
    be_vacated(zero, 2)
    clock.advance(20.0)
    answer(one, 1.0), answer(zero, 1.0)
    before = clock.now()
    assert close(zero).commit.reason.startswith("2 of 3 contributions") and clock.now() - before < 30.0
    close(one), be_out(zero, 2)
    clock.advance(100.0)
    answer(zero, 1.0)
    with pytest.raises(QuorumLost, match=r"missing: 1\."):
        close(zero)


def test_an_object_that_is_no_such_record_keeps_nobody_out(caplog: pytest.LogCaptureFixture):
    (zero, *_), _ = fleet_of()
    zero._attempt.store.create(keys.out(1, 1), b"junk")
    zero._attempt.store.create(keys.out(1, 2), Halt(**STAMP(), leg=1, by="x", reason="y").to_bytes())
    be_out(zero, 9)  # a replica that the run does not have
    zero._attempt.store.create(keys.out(1, 0), zero._attempt.store.get(keys.out(1, 9)))  # it names another
    log = zero._attempt.log
    assert log.out(1) == log.out(1) == {}
    assert caplog.text.count("counts for nothing") == 3


@pytest.mark.parametrize(("outage_s", "counted_s"), [(10.0, 110.0), (3600.0, 100.0)])
def test_an_outage_of_the_store_does_not_count_as_waiting_for_the_others(outage_s: float, counted_s: float):
    (zero, *_), clock = fleet_of()
    zero._timing.start_waiting()
    clock.advance(100.0)
    assert zero._timing.without_outages(lambda waited: (clock.advance(outage_s), waited)[1], True) is True
    assert clock.now() - zero._timing.view([]).waiting_since == counted_s


def test_in_the_first_round_of_a_leg_everybody_polls_from_the_start():
    fleet = Fleet(replicas=2, quorum=1)
    assert fleet.join(0, clock=ManualClock())._timing.poll_due()


def test_with_quorum_all_nobody_polls():
    (zero, *_), clock = fleet_of(quorum="all")
    clock.advance(1e6)
    assert not zero._timing.poll_due()


@pytest.mark.parametrize(
    ("scoring_s", "steps_s", "steps", "behind"),
    [
        (0.0, 100.0, 20, False),  # 150 s for the whole round, just the deadline
        (0.0, 100.0, 19, True),  # 158 s for the whole round, and the next step ends after the median
        (0.0, 90.0, 17, False),  # 159 s, but the next step ends before the median
        (0.0, 100.0, 0, False),  # nothing to publish
        (0.0, 100.0, 30, False),  # whole
        (97.0, 3.0, 2, False),  # 142 s: most of it was scoring, which no later step repeats
        (97.0, 4.0, 2, True),  # 157 s
    ],
)
def test_a_replica_is_behind_if_it_would_miss_the_deadline_with_a_whole_round(scoring_s, steps_s, steps, behind):
    (zero, *_), clock = fleet_of(sync_every=30)
    clock.advance(scoring_s + steps_s)
    assert zero._timing.is_behind(steps, steps_s) is behind
