"""What is done about replicas, as a table: launches, cancels, budgets, stops; and who counts as hung or stuck."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from diloco_orchestrator.config import RetryConfig
from diloco_orchestrator.supervision.attempt import ReplicaView
from diloco_orchestrator.supervision.attempt_outcome import named, named_in
from diloco_orchestrator.supervision.attempt_types import (
    AttemptPolicy,
    Beat,
    Cancelling,
    Ended,
    GivenUp,
    Launching,
    Outcome,
    Postponed,
    Refusal,
    Replaced,
    Reserved,
    Running,
    State,
    Unlaunched,
    Unreachable,
)
from diloco_orchestrator.supervision.fleet_policy import (
    Action,
    Cancel,
    FleetView,
    GiveUp,
    Launch,
    Stop,
    can_take_part,
    decide,
    silence_s,
    stuck_reason,
)
from executors.contract import ReplicaHandle

POLICY = AttemptPolicy(startup_timeout_s=300.0, hung_after_s=180.0)
RETRY = RetryConfig(max_errors=2, max_preemptions=3, backoff_s=4.0)
HANDLE = ReplicaHandle("scripted", "run-1", 0, 1, "native")
RUNNING = Running(990.0, Beat(1, 1000.0), HANDLE, running_since=995.0)
CANCELLING = Cancelling(0.0, Beat(1, 0.0), "hung", 900.0, HANDLE, accepted=True)


def ended(outcome: Outcome) -> Ended:
    return Ended(outcome, at=1000.0, reason="because")


def replica(state: State, replica_id: int = 0, attempt: int = 1, times: int = 1) -> ReplicaView:
    """One whose newest attempt is in this state; if it has ended, as `times` attempts did, itself included."""
    endings = {state.outcome: times} if isinstance(state, Ended) else {}
    return ReplicaView(replica_id, attempt, state, endings)


def actions(
    *replicas: ReplicaView,
    now: float = 1000.0,
    stopped_at: float | None = None,
    quorum: int = 0,
    halt: str = "",
    retry: RetryConfig = RETRY,
    wanted: int | None = None,
    offered: tuple[int, ...] = (),
) -> list[Action]:
    view = FleetView(replicas, stopped_at, halt, wanted=wanted, offered=offered)
    return decide(view, now, POLICY, retry, quorum or len(replicas))


# -- runs that are scaled ----------------------------------------------------------------------------------------------

STARTING = Running(990.0, None, HANDLE)
LEAVING = Cancelling(0.0, Beat(1, 0.0), "vacated: 1 replicas are wanted", 900.0, HANDLE)
VACANT = Unlaunched()
VACATED = ended(Outcome.VACATED)


@pytest.mark.parametrize(
    ("states", "wanted", "launched", "cancelled"),
    [
        ((VACANT,) * 4, 2, [0, 1], []),
        ((RUNNING, RUNNING, VACANT, VACANT), 2, [], []),
        ((RUNNING, RUNNING, VACATED, VACANT), 4, [2, 3], []),
        ((RUNNING, RUNNING, RUNNING, RUNNING), 1, [], [1, 2, 3]),
        ((STARTING, RUNNING, RUNNING, VACANT), 2, [], [0]),  # who trains stays, before who starts
        ((ended(Outcome.PREEMPTED), RUNNING, RUNNING, VACANT), 2, [], []),  # down, and not wanted again
        ((ended(Outcome.PREEMPTED), RUNNING, RUNNING, VACANT), 3, [0], []),  # its id, rather than a new one
        ((RUNNING, LEAVING, VACANT, VACANT), 2, [2], []),  # an id is free again once its machine has ended
        ((RUNNING, GivenUp("because"), VACANT, VACANT), 2, [2], []),  # another id takes its place
        ((RUNNING, CANCELLING, VACANT, VACANT), 2, [], []),  # hung: its own next attempt
    ],
)
def test_as_many_replicas_are_kept_as_are_wanted(states, wanted, launched, cancelled):
    found = actions(*(replica(each, i) for i, each in enumerate(states)), quorum=1, wanted=wanted)
    assert [each.replica_id for each in found if isinstance(each, Launch)] == launched
    assert [each.replica_id for each in found if isinstance(each, Cancel)] == cancelled
    assert all(each.why.startswith("vacated: ") for each in found if isinstance(each, Cancel))


def given_up(cause: str, took_part: bool = False) -> ReplicaView:
    return replace(replica(GivenUp("because", cause)), took_part=took_part)


@pytest.mark.parametrize(
    ("lost", "launched"),
    [
        ([given_up("error")], [4]),
        ([given_up("OSError at data.py:3"), given_up("preempted")], [4, 5]),  # each for a cause of its own
        ([given_up("error"), given_up("error")], [4]),  # the second one has shown that it is nobody's own cause
        ([given_up("error"), given_up("error"), given_up("permanent")], [4, 5]),
        ([given_up("error", took_part=True), given_up("error", took_part=True)], [4, 5]),  # so any id can train
    ],
)
def test_a_vacant_id_replaces_a_replica_that_was_given_up_unless_it_would_end_alike(lost, launched):
    fleet = [*lost, *(replica(RUNNING) for _ in range(4 - len(lost))), *(replica(VACANT) for _ in range(3))]
    fleet = [replace(each, replica_id=number) for number, each in enumerate(fleet)]
    found = actions(*fleet, quorum=1, wanted=4)
    assert [each.replica_id for each in found if isinstance(each, Launch)] == launched and len(found) == len(launched)


def test_replicas_that_train_stay_whatever_has_become_of_others():
    fleet = [given_up("error"), *(replica(RUNNING, i) for i in range(3, 7))]
    fleet = [fleet[0], *(replace(fleet[0], replica_id=i) for i in (1, 2)), *fleet[1:]]
    assert actions(*fleet, quorum=1, wanted=4) == []


def test_a_run_ends_once_fewer_than_a_quorum_are_left_and_no_vacant_id_replaces_one():
    second = replace(replica(ended(Outcome.PERMANENT), 1), attempt=2)
    vacant = [replica(VACANT, i) for i in range(2, 8)]
    assert [each.replica_id for each in actions(given_up("error"), second, *vacant, quorum=1, wanted=2)] == [1, 2]
    third = replace(given_up("permanent"), replica_id=2)
    (stop,) = actions(given_up("permanent"), second, third, *vacant[1:], quorum=1, wanted=2)
    assert isinstance(stop, Stop) and stop.status == "failed" and "replica 1 cannot take part" in stop.why


def test_ids_that_are_offered_to_machines_that_join_are_all_open_until_somebody_scales():
    fleet = [replica(each, i) for i, each in enumerate((RUNNING, RUNNING, VACANT, VACATED))]
    assert [each.replica_id for each in actions(*fleet, quorum=1, wanted=2, offered=(0, 1, 2, 3))] == [2, 3]
    assert actions(*fleet, quorum=1, wanted=2) == []


def test_the_intent_after_a_vacated_attempt_says_how_it_ended_for_a_new_coordinator():
    (launch,) = actions(replica(VACATED, attempt=3), wanted=1)
    assert isinstance(launch, Launch) and launch.attempt == 4
    assert named_in(launch.why, 3) == Replaced(Outcome.VACATED, "because")


# -- errors that stay --------------------------------------------------------------------------------------------------


def failed(replica_id: int, fault: str, faults: int = 1, state: State | None = None) -> ReplicaView:
    """A replica whose newest ended attempt raised `fault`, as `faults` in a row did."""
    state = state or replace(ended(Outcome.ERROR), fault=fault)
    return replace(replica(state, replica_id), fault=fault, faults=faults)


def test_a_replica_that_fails_twice_in_a_row_at_one_line_is_given_up_within_its_budget():
    healthy = replica(RUNNING, 1)
    assert actions(failed(0, "ValueError at a.py:3"), healthy, now=1004.0, quorum=1)[0] == Launch(
        0, 2, "attempt 1 (error): because"
    )
    given_up = actions(failed(0, "ValueError at a.py:3", 2), healthy, now=1004.0, quorum=1)
    assert given_up == [GiveUp(0, 1, "failed twice in a row in the same way, ValueError at a.py:3: because")]


def test_a_fleet_that_fails_at_one_line_stops_before_any_relaunch():
    fleet = [failed(i, "ValueError at a.py:3") for i in range(3)]
    assert actions(*fleet, quorum=1) == [
        Stop("failed", "every replica failed in the same way, ValueError at a.py:3: because")
    ]
    relaunched = failed(0, "ValueError at a.py:3", state=Running(1001.0, None, HANDLE))
    assert actions(relaunched, *fleet[1:], quorum=1) == actions(*fleet, quorum=1)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(failed(1, "ValueError at a.py:4"), id="at another line"),
        pytest.param(failed(1, ""), id="for a reason outside"),
        pytest.param(failed(1, "ValueError at a.py:3", state=RUNNING), id="once, and it runs again"),
    ],
)
def test_a_fleet_whose_replicas_do_not_all_fail_alike_goes_on(other):
    assert Launch(0, 2, "attempt 1 (error): because") in actions(
        failed(0, "ValueError at a.py:3"), other, now=1004.0, quorum=1
    )


def test_a_run_of_one_replica_is_given_a_second_attempt():
    assert actions(failed(0, "ValueError at a.py:3"), now=1004.0) == [Launch(0, 2, "attempt 1 (error): because")]


# -- launching and relaunching ----------------------------------------------------------------------------------------


def test_a_new_run_launches_everybody():
    found = actions(*(replica(Unlaunched(), i, attempt=0) for i in range(3)))
    assert found == [Launch(i, 1, "start of the leg") for i in range(3)]


def test_the_next_leg_goes_on_counting_attempts():
    assert actions(replica(Unlaunched(), 0, attempt=7)) == [Launch(0, 8, "start of the leg")]


WAITED_FOR = [
    pytest.param(Reserved(0.0, None, launch_at=5.0), id="reserved"),
    pytest.param(Launching(0.0, None), id="launching"),
    pytest.param(Postponed(0.0, None, Refusal(0.0, "no", denied=True), retry_at=30.0), id="postponed"),
    pytest.param(Running(0.0, None, HANDLE), id="waiting for a machine"),
    pytest.param(CANCELLING, id="cancelling"),
    pytest.param(ended(Outcome.SUPERSEDED), id="superseded"),
]


@pytest.mark.parametrize("state", WAITED_FOR)
def test_who_is_on_the_way_is_left_alone(state):
    assert actions(replica(state), now=1e9) == []


def test_who_ended_as_done_is_left_alone_unless_the_leg_goes_on_for_a_minute():
    """No attempt does so before the stop, which is read here within seconds: somebody forged its exit record."""
    done = ended(Outcome.DONE)
    assert actions(replica(done), now=done.at + 59.0) == []
    assert actions(replica(done), now=done.at + 61.0) == [Launch(0, 2, "attempt 1 (done): because")]
    assert actions(replica(done), now=done.at, retry=RetryConfig(max_errors=0)) == [], "the stop was not read yet"


@pytest.mark.parametrize(("errors", "pause_s"), [(1, 4), (2, 8)])
def test_an_error_is_relaunched_after_a_pause_that_doubles(errors, pause_s):
    failed = replica(ended(Outcome.ERROR), attempt=5, times=errors)
    assert actions(failed, now=1000 + pause_s - 0.1) == []
    assert actions(failed, now=1000 + pause_s) == [Launch(0, 6, "attempt 5 (error): because")]


def test_the_pause_has_a_bound():
    retry = RetryConfig(max_errors=50, backoff_s=4.0)
    failed = replica(ended(Outcome.ERROR), times=40)
    assert actions(failed, now=1059.9, retry=retry) == [] and len(actions(failed, now=1060.0, retry=retry)) == 1
    often = {Outcome.PREEMPTED: 3000, Outcome.ERROR: 3000}
    for outcome in often:
        view = ReplicaView(0, 3001, ended(outcome), often)
        assert len(actions(view, now=1060.0, retry=RetryConfig(max_errors=5000, max_preemptions=5000))) == 1


@pytest.mark.parametrize("outcome", [Outcome.PREEMPTED, Outcome.TIMED_OUT])
def test_what_is_nobodys_fault_is_relaunched_at_once(outcome):
    assert actions(replica(ended(outcome))) == [Launch(0, 2, f"attempt 1 ({outcome}): because")]


def test_time_limits_have_a_budget_of_their_own():
    retry = RetryConfig(max_errors=0, max_timeouts=2)
    late, fine = (replica(ended(Outcome.TIMED_OUT), times=times) for times in (3, 2))
    (failed,) = actions(late, retry=retry)
    assert isinstance(failed, Stop) and failed.status == "failed" and "reached its time limit 3 times" in failed.why
    assert actions(fine, retry=retry) == [Launch(0, 2, "attempt 1 (timed out): because")]


def test_a_replica_without_machine_waits_longer_and_longer():
    assert actions(replica(ended(Outcome.NO_CAPACITY), times=2), now=1019.9) == []
    assert len(actions(replica(ended(Outcome.NO_CAPACITY), times=2), now=1020.0)) == 1


def test_a_replica_without_a_machine_is_asked_for_every_ten_minutes_while_the_quorum_stands():
    alone, other = replica(ended(Outcome.NO_CAPACITY), times=101), replica(replace(RUNNING, beat=Beat(1, 1500.0)), 1)
    assert actions(alone, other, quorum=1, now=1599.0) == []
    assert actions(alone, other, quorum=1, now=1601.0) == [Launch(0, 2, "attempt 1 (no capacity): because")]
    (failed,) = actions(alone, other, quorum=2, now=1599.0)
    assert isinstance(failed, Stop) and failed.status == "failed" and "retry.max_no_capacity" in failed.why


def test_one_budget_is_not_spent_on_another():
    endings: Mapping[Outcome, int] = {Outcome.PREEMPTED: 3, Outcome.TIMED_OUT: 900, Outcome.ERROR: 1}
    view = ReplicaView(0, 904, ended(Outcome.ERROR), endings)
    assert actions(view, now=1004.0) == [Launch(0, 905, "attempt 904 (error): because")]


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("reason", ["oom", "", "a (strange): reason\nof two lines"])
def test_an_intent_names_the_end_that_it_follows(outcome, reason):
    for took_part in (False, True):
        why = named(7, Ended(outcome, 0.0, reason, took_part))
        assert named_in(why, 7) == Replaced(outcome, reason, took_part) and named_in(why, 8) == Replaced()


@pytest.mark.parametrize("why", ["start of the leg", "attempt 7: oom", "attempt 7 (bored): oom", ""])
def test_an_intent_in_other_words_names_nothing(why):
    assert named_in(why, 7) == Replaced()


# -- attempts that hang or never come up ------------------------------------------------------------------------------


def test_a_replica_without_heartbeat_is_replaced_once():
    assert actions(replica(RUNNING), now=1181.0) == [Cancel(0, 1, "hung: no heartbeat for 181 s", keeps_output=True)]
    assert actions(replica(RUNNING), now=1180.0) == []
    assert actions(replica(CANCELLING), now=1181.0) == []


def test_silence_before_the_coordinator_could_read_again_does_not_count():
    """After an outage of the store the newest heartbeat is an hour old, and the next has not been written yet."""
    view = FleetView([replica(RUNNING)], None, watched_since=4600.0)
    assert decide(view, 4700.0, POLICY, RETRY, 1) == []
    assert decide(view, 4781.0, POLICY, RETRY, 1) == [Cancel(0, 1, "hung: no heartbeat for 181 s", keeps_output=True)]


BEATEN = Beat(1, 1000.0)
SILENCE = [
    # state, how long it is silent at 1100, at 1500 and at 2000 (the start-up timeout is 300)
    pytest.param(Running(0.0, None, HANDLE), (0, 0, 0), id="waits for a machine"),
    pytest.param(Running(0.0, None, HANDLE, running_since=1000.0), (0, 500, 1000), id="runs, no heartbeat yet"),
    pytest.param(Running(0.0, None, HANDLE, 1000.0, pending=True), (0, 500, 1000), id="its machine cannot start it"),
    pytest.param(Running(0.0, None, HANDLE, blind_since=1000.0), (0, 500, 1000), id="unknown, no heartbeat yet"),
    pytest.param(Running(0.0, None, HANDLE, 1300.0, 1000.0), (0, 0, 700), id="ran before it became unknown"),
    pytest.param(Running(0.0, BEATEN, HANDLE), (100, 500, 1000), id="has sent heartbeats"),
    pytest.param(Unreachable(1000.0, None, "other executor"), (0, 500, 1000), id="elsewhere, no heartbeat yet"),
    pytest.param(Unreachable(0.0, BEATEN, "other executor"), (100, 500, 1000), id="elsewhere"),
    pytest.param(Unreachable(1000.0, None, "claim lost"), (100, 500, 1000), id="claimed, so it is up"),
    pytest.param(Reserved(0.0, None, 5.0), (0, 0, 0), id="reserved"),
    pytest.param(Reserved(0.0, BEATEN, 5.0), (100, 500, 1000), id="reserved, though it runs"),
    pytest.param(Launching(0.0, BEATEN), (100, 500, 1000), id="launching, though it runs"),
    pytest.param(CANCELLING, (0, 0, 0), id="cancelling"),
    pytest.param(ended(Outcome.ERROR), (0, 0, 0), id="ended"),
    pytest.param(Unlaunched(), (0, 0, 0), id="unlaunched"),
]


@pytest.mark.parametrize(("state", "expected"), SILENCE)
def test_silence_is_counted_from_the_last_heartbeat_or_the_time_it_should_have_come_up(state, expected):
    assert tuple(silence_s(state, now, POLICY) for now in (1100.0, 1500.0, 2000.0)) == expected


def test_a_halt_waits_for_who_is_coming_up_and_for_nobody_who_never_does():
    starting = Running(1000.0, None, HANDLE)
    assert can_take_part(starting, 1120.0, POLICY) and not can_take_part(starting, 1120.1, POLICY)
    assert can_take_part(replace(starting, beat=BEATEN), 1e9, POLICY)
    assert not can_take_part(CANCELLING, 900.0, POLICY) and not can_take_part(ended(Outcome.DONE), 1000.0, POLICY)


# -- giving up, failing, halting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (replica(ended(Outcome.PERMANENT), 1), "replica 1 cannot take part: because"),
        (
            replica(ended(Outcome.ERROR), 1, times=3),
            "failed 3 times, 2 relaunches are allowed (retry.max_errors): because",
        ),
        (replica(ended(Outcome.PREEMPTED), 1, times=4), "replica 1 was preempted 4 times"),
        (replica(GivenUp("is lost"), 1), "replica 1 is lost"),
    ],
)
def test_a_replica_that_cannot_be_had_again_fails_the_run_and_nothing_else_is_started(lost, words):
    found = actions(replica(Unlaunched(), 0, attempt=0), lost, now=1e9)
    assert len(found) == 1 and isinstance(found[0], Stop) and found[0].status == "failed" and words in found[0].why


def test_a_quorum_goes_on_without_those_who_cannot_be_had_again():
    lost, fine = replica(ended(Outcome.PERMANENT), 1), replica(RUNNING, 2)
    assert actions(replica(Unlaunched(), 0, attempt=0), lost, fine, quorum=2) == [
        Launch(0, 1, "start of the leg"),
        GiveUp(1, 1, "cannot take part: because"),
    ]
    assert actions(replica(RUNNING), replica(GivenUp("lost"), 1), fine, quorum=2) == []
    both = actions(lost, replica(ended(Outcome.ERROR), 3, times=3), fine, quorum=2)
    assert len(both) == 1 and isinstance(both[0], Stop) and both[0].status == "failed"
    assert "replica 1 cannot" in both[0].why and "replica 3 failed 3 times" in both[0].why


def test_what_several_replicas_failed_for_is_told_once():
    four = [replica(ended(Outcome.PERMANENT), i) for i in range(4)]
    found = actions(*four, replica(GivenUp("was lost"), 4), quorum=5)
    assert found == [Stop("failed", "replicas 0-3: cannot take part: because; replica 4 was lost")]


def test_a_halt_relaunches_nobody_and_is_committed_here_if_too_few_are_able_to():
    dead = [replica(ended(Outcome.ERROR), 0), replica(ended(Outcome.PREEMPTED), 1)]
    alive = [replica(replace(RUNNING, beat=Beat(2, 1e9)), i) for i in (2, 3)]
    assert actions(*dead, now=1e9, halt="lunch", quorum=1) == [Stop("halted", "halt requested: lunch")]
    assert actions(*dead, *alive, now=1e9, halt="lunch", quorum=3) == [Stop("halted", "halt requested: lunch")]
    assert actions(*dead, *alive, now=1e9, halt="lunch", quorum=2) == []


def test_after_a_stop_nobody_is_relaunched_and_leftovers_are_cancelled_in_time():
    states = [ended(Outcome.ERROR), RUNNING, ended(Outcome.DONE), CANCELLING, Unlaunched()]
    fleet = [replica(state, i) for i, state in enumerate(states)]
    assert actions(*fleet, now=1000 + POLICY.leftover_s - 1, stopped_at=1000.0) == []
    assert actions(*fleet, now=1000 + POLICY.leftover_s, stopped_at=1000.0) == [Cancel(1, 1, "the run is over")]


def test_after_a_stop_an_attempt_that_waits_for_a_machine_is_cancelled_at_once():
    """An offer that no machine has taken, a pod or a job in a queue: it has nothing to finish."""
    waiting = Running(0.0, None, HANDLE, pending=True)
    states = [waiting, replace(waiting, pending=False), RUNNING]  # nobody has asked yet whether the second runs
    fleet = [replica(state, i) for i, state in enumerate(states)]
    assert actions(*fleet, now=1000.0, stopped_at=1000.0) == [Cancel(0, 1, "the run is over")]


def test_an_attempt_that_does_not_start_is_stuck_for_the_reason_that_its_provider_gives():
    waiting = Running(0.0, None, HANDLE, waits_for="its pod is refused: exceeded quota")
    assert "no heartbeat at all" in stuck_reason(waiting, 1e6, POLICY)
    assert stuck_reason(waiting, 1e6, POLICY).endswith("(its pod is refused: exceeded quota)")
