"""What retention leaves: the newest state of who is away, snapshots where legs begin and end, files being written."""

from dataclasses import replace

import pytest
from long_history import LongRun
from protocol_fleet import BY_HAND, Fleet, answer, play, report, saved

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import RetentionConfig
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from diloco_orchestrator.supervision.retention import RetentionSweeper, plan
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)


def collect(fleet: Fleet, **retention: object) -> set[str]:
    """What is deleted."""
    gone = [info.key for info in plan(RunLog(fleet.store), RetentionConfig(**retention)).objects]  # type: ignore[arg-type]
    for key in gone:
        fleet.store.delete(key)
    return set(gone)


def rounds_of(fleet: Fleet, participants: list[Participant], count: int) -> None:
    for _ in range(count):
        play(participants, [1.0, 2.0])
        for participant in participants:
            participant.write_snapshot_if_due()


def halt(fleet: Fleet, leg: int) -> None:
    fleet.store.create(keys.halt(leg), Halt(**STAMP(), leg=leg, by="test", reason="lunch").to_bytes())


def resume(fleet: Fleet, from_round: int | None = None) -> None:
    begin_next_leg(RunLog(fleet.store), rounds=20, from_round=from_round, by="test", why="go on", stamp=STAMP)


def test_a_replica_that_is_away_finds_its_newest_state_when_it_comes_back():
    """Its last contribution was in round 3, long before the snapshots that allow older payloads to go."""
    clock = ManualClock()
    fleet = Fleet(replicas=3, rounds=50, quorum=2, snapshot_every=2, timing=BY_HAND)
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    for round_ in range(1, 10):
        clock.advance(2.0)
        taking = [zero, one, two] if round_ <= 3 else [zero, one]
        for participant in taking:
            answer(participant, 1.0, replace(report(), state=saved(f"state of round {round_}".encode())))
        for participant in taking:
            participant.close()
            participant.write_snapshot_if_due()
    gone = collect(fleet, payloads="needed")
    assert {keys.state(2, 1, 1), keys.state(0, 3, 1)} <= gone
    assert keys.state(2, 3, 1) not in gone
    assert fleet.store.get(keys.state(2, 3, 1)) == b"state of round 3"


def test_a_replica_that_is_away_finds_its_newest_state_after_many_sweeps_too():
    clock = ManualClock()
    fleet = Fleet(replicas=3, rounds=50, quorum=2, snapshot_every=2, timing=BY_HAND, retention={"payloads": "needed"})
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    sweeper = RetentionSweeper(RunLog(fleet.store))
    for round_ in range(1, 20):
        clock.advance(2.0)
        taking = [zero, one, two] if round_ <= 3 else [zero, one]
        for participant in taking:
            answer(participant, 1.0, replace(report(), state=saved(f"state of round {round_}".encode())))
        for participant in taking:
            participant.close()
            participant.write_snapshot_if_due()
        sweeper.step()
        sweeper.step()
    states = {each: [info.key for info in fleet.store.list(keys.states(each))] for each in (0, 2)}
    assert keys.state(2, 3, 1) in states[2] and keys.state(2, 1, 1) not in states[2]
    assert keys.state(0, 13, 1) not in states[0]


@pytest.mark.parametrize("rounds", [100, 2000])
def test_a_sweep_lists_the_newest_rounds_alone_however_long_a_replica_has_been_away(rounds):
    run = LongRun(rounds, idle=1)
    run.write_segments()
    sweeper = RetentionSweeper(RunLog(run.store))
    sweeper.step()
    run.add(10)
    run.write_snapshot(rounds + 10)
    run.store.forget()
    sweeper.step()
    assert 0 < run.store.lists <= 15


def test_a_replica_that_is_away_when_a_leg_ends_finds_its_newest_state_in_the_next():
    clock = ManualClock()
    fleet = Fleet(replicas=3, rounds=50, quorum=2, snapshot_every=2, timing=BY_HAND)
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    for round_ in range(1, 10):
        clock.advance(2.0)
        if round_ == 9:
            halt(fleet, 1)
        taking = [zero, one, two] if round_ <= 3 else [zero, one]
        for participant in taking:
            answer(participant, 1.0, replace(report(), state=saved(b"state")))
        for participant in taking:
            participant.close()
            participant.write_snapshot_if_due()
    resume(fleet)
    gone = collect(fleet, payloads="needed")
    assert keys.state(2, 1, 1) in gone and keys.state(2, 3, 1) not in gone


@pytest.fixture
def two_legs() -> Fleet:
    """Leg 1 ends in round 5, on the base after round 5; leg 2 starts from round 3 and goes on to round 15."""
    fleet = Fleet(replicas=2, rounds=50, snapshot_every=1)
    participants = fleet.join_all()
    rounds_of(fleet, participants, 4)
    halt(fleet, 1)
    rounds_of(fleet, participants, 1)
    resume(fleet, from_round=3)
    rounds_of(fleet, fleet.join_all(), 10)
    return fleet


def test_snapshots_where_a_leg_begins_or_ended_are_kept(two_legs: Fleet):
    assert plan(RunLog(two_legs.store), RetentionConfig(snapshots=2)).kept_snapshots == {
        0: "the first base",
        3: "leg 2 starts from it",
        5: "leg 1 ended with it",
        13: "among the newest confirmed",  # nobody has claimed the base of snapshot 15 yet
        14: "among the newest",
        15: "among the newest",
    }
    collect(two_legs, snapshots=2)
    assert RunLog(two_legs.store).snapshots() == [0, 3, 5, 13, 14, 15]


def test_a_leg_that_applied_nothing_ended_with_the_base_it_started_from():
    fleet = Fleet(replicas=2, rounds=50, snapshot_every=1)
    participants = fleet.join_all()
    rounds_of(fleet, participants, 3)
    halt(fleet, 1)
    rounds_of(fleet, participants, 1)
    resume(fleet, from_round=2)
    halt(fleet, 2)
    play(fleet.join_all(), [1.0, float("nan")])
    resume(fleet)
    rounds_of(fleet, fleet.join_all(), 6)
    assert {2, 4} <= plan(RunLog(fleet.store), RetentionConfig(snapshots=2)).kept_snapshots.keys()


def test_files_of_a_snapshot_without_its_record_go_only_after_a_stop():
    """While the run goes on somebody may be writing them."""
    fleet = Fleet(replicas=2, rounds=50, snapshot_every=2)
    participants = fleet.join_all()
    rounds_of(fleet, participants, 7)
    half = keys.snapshot(3, "model.safetensors")
    fleet.store.put(half, b"half a snapshot")
    assert half not in collect(fleet, snapshots=2)
    halt(fleet, 1)
    rounds_of(fleet, participants, 1)
    assert half in collect(fleet, snapshots=2)
