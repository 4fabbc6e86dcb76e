"""What the coordinator does about its replicas, as a table."""

import pytest

from diloco_orchestrator.config import RetryConfig
from diloco_orchestrator.supervision.fleet_policy import (
    LEFTOVER_S,
    Cancel,
    Condition,
    Fail,
    FleetView,
    GiveUp,
    Halt,
    Launch,
    ReplicaView,
    decide,
)

POLICY = RetryConfig(max_errors=2, max_preemptions=3, backoff_s=4.0)


def replica(condition: Condition, replica_id: int = 0, attempt: int = 1, times: int = 1, **fields):
    """One whose newest attempt is in this condition, as `times` attempts before it or with it."""
    endings = {condition: times}
    return ReplicaView(replica_id, attempt, condition, 1000.0, endings=endings, reason="because", **fields)


def actions(*replicas: ReplicaView, now: float = 1000.0, stopped_at: float | None = None, quorum=0, halt=""):
    return decide(FleetView(replicas, stopped_at, halt), now, POLICY, quorum or len(replicas))


def test_a_new_run_launches_everybody():
    found = actions(*(replica(Condition.NONE, i, attempt=0) for i in range(3)))
    assert found == [Launch(i, 1, "start of the leg") for i in range(3)]


def test_the_next_leg_goes_on_counting_attempts():
    assert actions(replica(Condition.NONE, 0, attempt=7)) == [Launch(0, 8, "start of the leg")]


@pytest.mark.parametrize("condition", [Condition.ALIVE, Condition.DONE])
def test_who_lives_or_is_done_is_left_alone(condition):
    assert actions(replica(condition), now=1e9) == []


@pytest.mark.parametrize(("errors", "pause_s"), [(1, 4), (2, 8)])
def test_an_error_is_relaunched_after_a_pause_that_doubles(errors, pause_s):
    failed = replica(Condition.ERROR, attempt=5, times=errors)
    assert actions(failed, now=1000 + pause_s - 0.1) == []
    assert actions(failed, now=1000 + pause_s) == [Launch(0, 6, "attempt 5: because")]


def test_the_pause_has_a_bound():
    policy = RetryConfig(max_errors=50, backoff_s=4.0)
    view = FleetView([replica(Condition.ERROR, times=40)], None)
    assert decide(view, 1059.9, policy, 1) == [] and len(decide(view, 1060.0, policy, 1)) == 1


@pytest.mark.parametrize("condition", [Condition.PREEMPTED, Condition.TIMED_OUT])
def test_what_is_nobodys_fault_is_relaunched_at_once(condition):
    assert actions(replica(condition)) == [Launch(0, 2, "attempt 1: because")]


def test_a_replica_without_machine_waits_longer_and_longer():
    assert actions(replica(Condition.NO_CAPACITY, times=2), now=1019.9) == []
    assert len(actions(replica(Condition.NO_CAPACITY, times=2), now=1020.0)) == 1


def test_one_budget_is_not_spent_on_another():
    endings = {Condition.PREEMPTED: 3, Condition.TIMED_OUT: 900, Condition.ERROR: 1}
    view = ReplicaView(0, 904, Condition.ERROR, 1000.0, endings=endings, reason="because")
    assert actions(view, now=1004.0) == [Launch(0, 905, "attempt 904: because")]


def test_a_replica_whose_heart_stands_still_is_replaced_once():
    hung = replica(Condition.ALIVE, silent_s=181.0)
    assert actions(hung) == [Cancel(0, 1, "hung: no heartbeat for 181 s")]
    assert actions(replica(Condition.ALIVE, silent_s=181.0, cancelled=True)) == []
    assert actions(replica(Condition.ALIVE, silent_s=179.0)) == []


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (replica(Condition.PERMANENT, 1), "replica 1 cannot take part: because"),
        (
            replica(Condition.ERROR, 1, times=3),
            "failed 3 times, 2 relaunches are allowed (retry.max_errors): because",
        ),
        (replica(Condition.PREEMPTED, 1, times=4), "replica 1 was preempted 4 times"),
    ],
)
def test_a_replica_that_cannot_be_had_again_fails_the_run_and_nothing_else_is_started(lost, words):
    found = actions(replica(Condition.NONE, 0, attempt=0), lost, now=1e9)
    assert len(found) == 1 and isinstance(found[0], Fail) and words in found[0].why


def test_a_quorum_goes_on_without_those_who_cannot_be_had_again():
    lost, fine = replica(Condition.PERMANENT, 1), replica(Condition.ALIVE, 2)
    assert actions(replica(Condition.NONE, 0, attempt=0), lost, fine, quorum=2) == [
        Launch(0, 1, "start of the leg"),
        GiveUp(1, 1, "replica 1 cannot take part: because"),
    ]
    both = actions(lost, replica(Condition.ERROR, 3, times=3), fine, quorum=2)
    assert len(both) == 1 and isinstance(both[0], Fail)
    assert "replica 1 cannot" in both[0].why and "replica 3 failed 3 times" in both[0].why


def test_a_halt_relaunches_nobody_and_is_seen_to_here_if_too_few_are_alive_for_it():
    dead = [replica(Condition.ERROR, 0), replica(Condition.PREEMPTED, 1)]
    alive = [replica(Condition.ALIVE, 2), replica(Condition.ALIVE, 3)]
    assert actions(*dead, now=1e9, halt="lunch", quorum=1) == [Halt("halt requested: lunch")]
    assert actions(*dead, *alive, now=1e9, halt="lunch", quorum=3) == [Halt("halt requested: lunch")]
    assert actions(*dead, *alive, now=1e9, halt="lunch", quorum=2) == []


def test_after_a_stop_nobody_is_relaunched_and_leftovers_are_cancelled_in_time():
    fleet = [replica(Condition.ERROR, 0), replica(Condition.ALIVE, 1), replica(Condition.DONE, 2)]
    assert actions(*fleet, now=1000 + LEFTOVER_S - 1, stopped_at=1000.0) == []
    assert actions(*fleet, now=1000 + LEFTOVER_S, stopped_at=1000.0) == [Cancel(1, 1, "the run is over")]
