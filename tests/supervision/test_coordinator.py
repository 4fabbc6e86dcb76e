"""The coordinator against an executor that follows a script: crashes between its lines, providers that fail."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from scripted import STAMP, Scene, ScriptedExecutor

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Cancel, Heartbeat, Intent
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.coordinator import Coordinator
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from diloco_orchestrator.supervision.vendor import Vendor
from executors.contract import ExecutorDenied, ExecutorError, MissingSdk, NoCapacity, ReplicaState, ReplicaStatus

PATIENT = {"poll_s": 0.01, "round_timeout_s": 20.0, "startup_timeout_s": 300.0}


def test_the_kind_of_an_ending_decides_about_the_relaunch():
    scene = Scene(retry={"max_errors": 1, "max_preemptions": 5, "backoff_s": 4.0})
    coordinator = scene.coordinator()
    for attempt, (state, reason) in enumerate(
        [
            (ReplicaState.PREEMPTED, ""),
            (ReplicaState.TIMED_OUT, "deadline"),
            (ReplicaState.PREEMPTED, ""),
            (ReplicaState.FAILED, "no_capacity"),
            (ReplicaState.FAILED, "oom"),
        ],
        start=1,
    ):
        scene.ends(1, attempt, state, reason)
        scene.steps(coordinator, 12)
        assert (1, attempt + 1) in scene.executor.launched
    scene.ends(1, 6, ReplicaState.FAILED, "oom")
    scene.steps(coordinator, 1)
    result = coordinator.reader.log.result(1)
    assert result is not None and result.status == "failed"
    assert "replica 1 failed 2 times, 1 relaunches are allowed (retry.max_errors): oom" in result.reason


def test_a_replica_that_cannot_take_part_is_recorded_as_out_and_no_coordinator_launches_it_again():
    scene = Scene(replicas=3, quorum=1)
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(2, 1, ReplicaState.FAILED, "exit", code=78)
    scene.steps(coordinator, 2)
    out = coordinator.reader.log.out(1)
    assert list(out) == [2] and out[2].attempt == 1 and out[2].reason.startswith("cannot take part: ")
    scene.ends(2, 1, ReplicaState.PREEMPTED, "lost")  # its provider has forgotten how it ended
    again = scene.coordinator()
    scene.steps(again, 120)
    assert scene.executor.launched == [(0, 1), (1, 1), (2, 1)] and again.alive() == [0, 1]


def test_with_a_quorum_of_all_the_run_ends_with_the_reason_of_the_replica_that_cannot_take_part():
    scene = Scene(quorum="all")
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(1, 1, ReplicaState.FAILED, "exit", code=78)
    scene.exit(1, 1, 78)
    scene.steps(coordinator, 2)
    result = coordinator.reader.log.result(1)
    assert result is not None and (result.status, result.reason) == (
        "failed",
        "replica 1 cannot take part: told (exit code 78)",
    )


def test_a_cause_that_several_attempts_end_for_is_in_the_log_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    scene = Scene(replicas=3, quorum=1, retry={"max_errors": 1, "backoff_s": 0.0})
    coordinator = scene.coordinator()
    coordinator.step()
    cause = "ValueError: the data set is not on this machine"
    for attempt in (1, 2):
        for replica_id in (0, 1):
            scene.ends(replica_id, attempt, ReplicaState.FAILED, cause)
        scene.steps(coordinator, 3)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(cause in line for line in lines) == 1, lines
    assert "replica 0, attempt 1: ended (error): ValueError: the data set is not on this machine" in lines
    assert "replica 1, attempt 2: ended (error): for the same reason as replica 0, attempt 1" in lines
    assert "replica 0: launching attempt 2 (attempt 1 (error): as said above)" in lines
    assert any("the run goes on without its replica, which failed 2 times" in line for line in lines)


def test_an_error_that_no_relaunch_mends_is_in_the_log_once_with_its_kind_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    scene = Scene(replicas=3, quorum=1)
    coordinator = scene.coordinator()
    coordinator.step()
    cause = "ConfigError: held-out items 3 and 5 are the same"
    for replica_id in (0, 1):
        scene.ends(replica_id, 1, ReplicaState.FAILED, f"permanent: {cause}", code=78)
    scene.steps(coordinator, 3)
    lines = [record.getMessage() for record in caplog.records if "attempt 1" in record.getMessage()]
    away = "attempt 1: the run goes on without its replica, which cannot take part:"
    assert sorted(lines) == [
        f"replica 0, attempt 1: ended (permanent): {cause}",
        f"replica 0, {away} as said above",
        "replica 1, attempt 1: ended (permanent): for the same reason as replica 0, attempt 1",
        f"replica 1, {away} for the same reason as replica 0, attempt 1",
    ]


def test_the_error_of_all_replicas_is_not_repeated_as_the_run_stops_for_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    scene = Scene(replicas=2)
    coordinator = scene.coordinator()
    coordinator.step()
    cause = "ConfigError: held-out items 3 and 5 are the same"
    for replica_id in (0, 1):
        scene.ends(replica_id, 1, ReplicaState.FAILED, f"permanent: {cause}", code=78)
    scene.steps(coordinator, 3)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(cause in line for line in lines) == 1, lines
    assert "the run is stopped (failed): replicas 0 and 1: cannot take part: as said above" in lines
    result = coordinator.reader.log.result(1)
    assert result is not None and cause in result.reason


def test_an_unknown_state_is_never_a_reason_to_act():
    scene = Scene()
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(0, 1, ReplicaState.UNKNOWN)
    for minute in range(60):
        beat(scene, 0, 1, minute), beat(scene, 1, 1, minute)
        scene.steps(coordinator, 60, every=60)
    assert scene.executor.launched == [(0, 1), (1, 1)] and scene.executor.cancelled == []


def test_the_output_of_a_hung_replica_is_kept_before_it_is_cancelled_without_credentials():
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0})
    scene.executor.output = [
        "Timeout (0:00:15)!",
        '  File "train.py", line 7 in forward',
        "with key s3cr3t-key-of-ours",
    ]
    scene.secrets = {"TOKEN": "s3cr3t-key-of-ours"}
    coordinator = scene.coordinator()
    coordinator.step()
    beat(scene, 0, 1, 1), beat(scene, 1, 1, 1)
    for second in range(80):
        beat(scene, 1, 1, 2 + second)
        scene.steps(coordinator, 1)
    records = AttemptRecords(scene.fleet.store)
    assert scene.executor.cancelled == [(0, 1)] and records.cancel(0, 1).reason.startswith("hung")
    assert records.log_text(0, 1).splitlines()[1] == '  File "train.py", line 7 in forward'
    assert records.log_text(1, 1) is None
    assert "s3cr3t-key-of-ours" not in records.log_text(0, 1)


@pytest.mark.parametrize("beats", [True, False])
def test_a_replica_that_nobody_can_see_or_end_is_replaced_when_its_heartbeat_stops(beats):
    """Its machine is gone, or was another host: the provider can neither report its status nor cancel it."""
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0})
    coordinator = scene.coordinator()
    coordinator.step()
    if beats:
        beat(scene, 0, 1, 1)
    scene.ends(0, 1, ReplicaState.UNKNOWN)
    scene.executor.refuse_cancel = 10**6
    scene.steps(coordinator, 120)
    assert (0, 2) not in scene.executor.launched, "the provider may be away for two minutes"
    scene.steps(coordinator, 120)
    assert (0, 2) in scene.executor.launched
    coordinator.stop("halted", "enough")
    for replica_id, attempt in ((0, 2), (1, 1)):
        scene.ends(replica_id, attempt, ReplicaState.UNKNOWN)
    assert scene.steps(coordinator, 200)


def test_two_coordinators_that_cannot_adopt_from_each_other_launch_once_and_spend_one_error():
    """As on two hosts: each executor knows only its own processes; attempt 1 crashes, and tells so."""
    scene = Scene(retry={"backoff_s": 0.0, "max_errors": 1})
    elsewhere = ScriptedExecutor()
    one = scene.coordinator()
    one.step()
    scene.executor, here = elsewhere, scene.executor
    for who in ((0, 1), (1, 1), (0, 2)):
        elsewhere.states[who] = ReplicaStatus(ReplicaState.UNKNOWN)
    other = scene.coordinator()
    scene.exit(0, 1, 1)
    here.states[0, 1] = ReplicaStatus(ReplicaState.FAILED, "exit", 1)
    for second in range(60):
        for who in ((0, 2), (1, 1)):
            beat(scene, *who, second)
        scene.steps(one, 1)
        scene.steps(other, 1)
    assert here.launched == [(0, 1), (1, 1), (0, 2)] and elsewhere.launched == []
    assert one.reader.log.result(1) is None


def test_an_attempt_that_was_superseded_is_no_error():
    scene = Scene(retry={"backoff_s": 0.0, "max_errors": 0})
    coordinator = scene.coordinator()
    coordinator.step()
    written_intent(scene, 0, 2)
    scene.ends(0, 1, ReplicaState.FAILED, "superseded", code=76)
    scene.steps(coordinator, 20)
    assert coordinator.reader.log.result(1) is None and scene.executor.launched[-1] == (0, 2)


def test_an_attempts_own_exit_record_counts_where_the_vendor_cannot_tell():
    scene = Scene(retry={"backoff_s": 0.0})
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(0, 1, ReplicaState.UNKNOWN)
    scene.exit(0, 1, 1)
    scene.steps(coordinator, 2)
    assert (0, 2) in scene.executor.launched


def test_a_launch_that_the_vendor_refuses_is_an_error_like_others():
    scene = Scene(retry={"max_errors": 3, "backoff_s": 1.0})
    scene.executor.refuse_launch[1, 1] = "no room"
    coordinator = scene.coordinator()
    scene.steps(coordinator, 5)
    assert scene.executor.launched == [(0, 1), (1, 2)]
    again = scene.coordinator()  # must not launch attempt 1 beside attempt 2
    scene.steps(again, 5)
    assert scene.executor.launched == [(0, 1), (1, 2)]


def test_a_coordinator_that_dies_between_launch_and_handle_is_followed_by_one_that_adopts():
    scene = Scene()
    scene.coordinator().step()
    scene.fleet.store.delete(keys.handle(1, 1))
    again = scene.coordinator()
    scene.steps(again, 6)
    assert scene.executor.launched == [(0, 1), (1, 1)]
    assert again.reader.attempts.handle(1, 1) is not None
    scene.ends(1, 1, ReplicaState.PREEMPTED)
    scene.steps(again, 2)
    assert (1, 2) in scene.executor.launched


def beat(scene: Scene, replica_id: int, attempt: int, counter: int) -> None:
    record = Heartbeat(
        **STAMP(), replica_id=replica_id, attempt=attempt, counter=counter, phase="training", round=1, inner_step=0
    )
    scene.fleet.store.put(keys.heartbeat(replica_id, attempt), record.to_bytes())


def test_a_replica_whose_heartbeat_stops_is_replaced_and_one_that_never_sent_one_is_waited_for():
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0}, timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    for second in range(90):
        beat(scene, 0, 1, counter=min(second, 20))
        scene.steps(coordinator, 1)
    assert scene.executor.cancelled == [(0, 1)]  # replica 1 is still starting
    scene.ends(0, 1, ReplicaState.CANCELLED, "user")
    scene.steps(coordinator, 2)
    assert (0, 2) in scene.executor.launched
    scene.steps(coordinator, 600)
    assert (1, 1) in scene.executor.cancelled  # its machine runs, and nothing ever came of it


def test_an_unknown_answer_costs_no_replica_that_waits_for_a_machine():
    scene = Scene(timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    for state in (ReplicaState.PENDING, ReplicaState.UNKNOWN, ReplicaState.PENDING, ReplicaState.UNKNOWN):
        scene.ends(0, 1, state), scene.ends(1, 1, state)
        scene.steps(coordinator, 250 if state is ReplicaState.UNKNOWN else 3600, every=50)
    assert scene.executor.cancelled == [] and coordinator.alive() == [0, 1]


def test_a_cancelled_replica_that_is_never_seen_to_end_is_replaced():
    """Its node is lost: the vendor takes the cancel and goes on saying that it runs."""
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0}, timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    beat(scene, 0, 1, 1), beat(scene, 1, 1, 1)
    scene.steps(coordinator, 200)
    assert {(0, 2), (1, 2)} <= set(scene.executor.launched)


def test_what_another_coordinator_launched_after_us_is_not_judged_by_our_clocks():
    scene = Scene(retry={"backoff_s": 0.0}, timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    for minute in range(20):
        beat(scene, 0, 1, minute), beat(scene, 1, 1, minute)
        scene.steps(coordinator, 60, every=20)
    written_intent(scene, 0, 2)
    scene.ends(0, 1, ReplicaState.FAILED, code=76)
    scene.steps(coordinator, 60)
    assert scene.executor.cancelled == [] and coordinator.alive() == [0, 1]
    assert (0, 3) not in scene.executor.launched


def test_a_restarted_coordinator_charges_no_error_for_a_superseded_attempt():
    scene = Scene(retry={"max_errors": 1, "backoff_s": 0.0})
    scene.coordinator().step()
    scene.exit(0, 1, code=76)
    written_intent(scene, 0, 2)
    scene.exit(0, 2, code=1)
    coordinator = scene.coordinator()
    scene.steps(coordinator, 5)
    assert (0, 3) in scene.executor.launched and coordinator.alive() == [0, 1]


def test_a_launch_that_is_refused_for_good_gives_the_replica_up_though_others_can_be_seen():
    scene = Scene(retry={"backoff_s": 0.0}, quorum=1)
    scene.executor.refuse_launch[1, 2] = ExecutorDenied("no credit left")
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(1, 1, ReplicaState.PREEMPTED)
    for second in range(0, 900, 10):
        beat(scene, 0, 1, second)
        scene.steps(coordinator, 10, every=5)
    assert coordinator.alive() == [0] and coordinator.reader.log.result(1) is None


def test_one_that_waits_for_a_machine_is_waited_for():
    scene = Scene(timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(0, 1, ReplicaState.PENDING), scene.ends(1, 1, ReplicaState.PENDING)
    scene.steps(coordinator, 7200, every=60)
    assert scene.executor.cancelled == [] and scene.executor.launched == [(0, 1), (1, 1)]


def test_a_halt_does_not_wait_for_replicas_that_never_come_up():
    """An image that cannot be pulled is pending for ever, and its machine may be paid for."""
    scene = Scene(timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(0, 1, ReplicaState.PENDING)
    request_halt(coordinator.reader.log, "test", "enough", STAMP)
    scene.steps(coordinator, 60)
    assert coordinator.reader.log.result(1) is None
    scene.steps(coordinator, 120)
    result = coordinator.reader.log.result(1)
    assert result is not None and result.status == "halted"
    assert sorted(scene.executor.cancelled) == [(0, 1), (1, 1)]


def test_an_attempt_of_another_vendor_is_followed_by_its_records_and_replaced_here():
    scene = Scene(retry={"backoff_s": 0.0})
    scene.coordinator().step()
    scene.executor.name = "another"
    coordinator = scene.coordinator()
    scene.ends(0, 1, ReplicaState.FAILED)  # would be believed if it were asked
    scene.steps(coordinator, 10)
    assert coordinator.alive() == [0, 1] and scene.executor.cancelled == []
    scene.exit(0, 1, code=1)
    scene.steps(coordinator, 10)
    assert scene.executor.launched == [(0, 1), (1, 1), (0, 2)]


def test_refused_credentials_are_tolerated_for_a_while():
    scene = Scene()
    coordinator = scene.coordinator()
    coordinator.step()

    def supervise(minutes: int) -> None:
        for _ in range(minutes):
            beat(scene, 0, 1, int(scene.clock.now())), beat(scene, 1, 1, int(scene.clock.now()))
            scene.steps(coordinator, 60)

    scene.executor.denied = ExecutorDenied("the token has expired")
    supervise(minutes=9)
    scene.executor.denied = None
    supervise(minutes=30)
    scene.executor.denied = ExecutorDenied("the token has expired")
    supervise(minutes=9)
    with pytest.raises(ExecutorDenied, match="lasts for 10 minutes"):
        supervise(minutes=5)
    assert scene.executor.launched == [(0, 1), (1, 1)] and scene.executor.cancelled == []


def test_what_nobody_needs_any_more_is_looked_for_and_not_launched():
    """A coordinator died while it launched, and the run was cancelled."""
    scene = Scene()
    scene.executor.refuse_launch[0, 1] = ExecutorError("the vendor is away")
    scene.coordinator().step()
    for replica_id in (0, 1):
        record = Cancel(**STAMP(), replica_id=replica_id, attempt=1, reason="the run is over")
        scene.fleet.store.create(keys.cancel(replica_id, 1), record.to_bytes())
    launched = list(scene.executor.launched)
    scene.steps(scene.coordinator(), 4)
    assert scene.executor.launched == launched


def test_a_coordinator_that_dies_between_the_cancel_record_and_the_cancel_is_followed_by_one_that_cancels():
    scene = Scene()
    scene.coordinator().step()
    record = Cancel(**STAMP(), replica_id=1, attempt=1, reason="hung: no heartbeat for 200 s")
    scene.fleet.store.create(keys.cancel(1, 1), record.to_bytes())
    scene.coordinator()
    assert scene.executor.cancelled == [(1, 1)]


def test_a_cancel_that_the_vendor_refuses_is_tried_again():
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0}, timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    beat(scene, 0, 1, 1)
    scene.executor.refuse_cancel = 3
    scene.steps(coordinator, 80)
    assert scene.executor.cancelled == [(0, 1)]


def test_a_machine_that_cannot_start_an_attempt_is_not_paid_for_ever():
    """As by a misspelt image: each of its pods holds a node with GPUs."""
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0}, timing={"startup_timeout_s": 300.0})
    coordinator = scene.coordinator()
    words = 'Back-off pulling image "trian:7"'
    queued, backs_off = (ReplicaStatus(ReplicaState.PENDING, each, message=words) for each in ("", "image"))
    scene.executor.states = {(0, 1): queued, (1, 1): backs_off}
    scene.steps(coordinator, 400)
    assert scene.executor.cancelled == [(1, 1)]
    cancel = AttemptRecords(scene.fleet.store).cancel(1, 1)
    assert cancel is not None and cancel.reason.startswith("hung: ") and words in cancel.reason


def test_a_hung_replica_is_ended_though_its_provider_is_away_for_a_minute_just_then():
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0}, timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    beat(scene, 0, 1, 1)
    scene.ends(0, 1, ReplicaState.UNKNOWN)
    scene.executor.refuse_cancel = 5
    scene.steps(coordinator, 100)
    assert scene.executor.cancelled == [(0, 1)] and (0, 2) not in scene.executor.launched


def test_a_refused_cancel_is_not_repeated_at_every_step():
    scene = Scene()
    coordinator = scene.coordinator()
    coordinator.step()
    scene.executor.refuse_cancel = 10**6
    coordinator.cancel_all("nobody needs it")
    scene.steps(coordinator, 60)
    assert 10**6 - scene.executor.refuse_cancel == 2 * 6 + 2


def test_leftovers_of_a_finished_run_are_cancelled_and_then_it_is_over():
    scene = Scene()
    coordinator = scene.coordinator()
    coordinator.step()
    scene.complete()
    assert not scene.steps(coordinator, 100)
    assert scene.executor.cancelled == []
    scene.steps(coordinator, 60)
    assert sorted(scene.executor.cancelled) == [(0, 1), (1, 1)]
    for replica_id in (0, 1):
        scene.ends(replica_id, 1, ReplicaState.CANCELLED)
    assert scene.steps(coordinator, 1)


def test_an_offer_that_no_machine_took_does_not_hold_the_end_of_a_run():
    scene = Scene()
    scene.executor.states[1, 1] = ReplicaStatus(ReplicaState.PENDING, native_state="offered")
    coordinator = scene.coordinator()
    scene.steps(coordinator, 2)
    scene.complete()
    scene.ends(0, 1, ReplicaState.SUCCEEDED)
    scene.steps(coordinator, 1)
    assert scene.executor.cancelled == [(1, 1)]
    scene.ends(1, 1, ReplicaState.CANCELLED)
    assert scene.steps(coordinator, 1)


def test_a_coordinator_elsewhere_sees_a_finished_run_end_by_its_records():
    scene = Scene()
    scene.coordinator().step()
    scene.complete()
    for replica_id in (0, 1):
        scene.ends(replica_id, 1, ReplicaState.UNKNOWN)
        scene.exit(replica_id, 1, 0)
    assert scene.steps(scene.coordinator(), 1)


# -- what another coordinator did -------------------------------------------------------------------------------------


def written_intent(scene: Scene, replica_id: int, attempt: int, leg: int = 1, why: str = "another coordinator") -> None:
    intent = Intent(**STAMP(), replica_id=replica_id, attempt=attempt, leg=leg, executor="scripted", why=why)
    scene.fleet.store.create(keys.intent(replica_id, attempt), intent.to_bytes())


def test_attempts_of_an_earlier_leg_are_counted_on_and_cost_no_budget():
    scene = Scene(retry={"max_errors": 0})
    for replica_id, attempt in ((0, 1), (0, 2), (1, 1)):
        written_intent(scene, replica_id, attempt)
        scene.exit(replica_id, attempt, 1)
    scene.fleet.join(0, attempt=2)  # brings the model
    run_log = RunLog(scene.fleet.store)
    EndOfLeg(run_log, run_log.newest_begin(), STAMP).commit_stop("failed", "nobody is left")
    begin_next_leg(run_log, rounds=None, from_round=None, by="test", why="go on", stamp=STAMP)
    coordinator = scene.coordinator()
    scene.steps(coordinator, 3)
    assert scene.executor.launched == [(0, 3), (1, 2)] and coordinator.leg == 2
    assert coordinator.reader.log.result(2) is None


def test_whoever_loses_the_race_for_an_intent_follows_the_winners_attempt():
    scene = Scene(retry={"backoff_s": 0.0}, timing=PATIENT)
    coordinator = scene.coordinator()
    coordinator.step()
    written_intent(scene, 0, 2, why="attempt 1 (preempted): its node was taken")
    scene.exit(0, 1, 1)
    scene.ends(0, 1, ReplicaState.FAILED)
    scene.steps(coordinator, 3)
    assert scene.executor.launched == [(0, 1), (1, 1)] and coordinator.alive() == [0, 1]
    scene.steps(coordinator, 3)  # its handle does not come: the winner has died
    assert scene.executor.launched == [(0, 1), (1, 1), (0, 2)]


def test_a_restarted_coordinator_charges_a_lack_of_machines_to_its_own_budget():
    scene = Scene(retry={"max_errors": 0, "max_no_capacity": 5})
    for attempt in (1, 2, 3):
        scene.executor.refuse_launch[0, attempt] = NoCapacity("no A100 today")
        coordinator = scene.coordinator()  # its predecessor died while it waited
        scene.steps(coordinator, 70.0, every=5.0)
    assert coordinator.alive() == [0, 1] and coordinator.reader.log.result(1) is None


@pytest.mark.parametrize("known", [True, False])
def test_after_the_stop_an_attempt_without_handle_is_searched_for_and_not_launched(known):
    """A coordinator died between the launch and the handle, and the run ended meanwhile."""
    scene = Scene()
    scene.coordinator().step()
    scene.fleet.store.delete(keys.handle(1, 1))
    scene.complete()
    scene.ends(0, 1, ReplicaState.SUCCEEDED)
    if not known:
        scene.executor.launched.remove((1, 1))
    coordinator = scene.coordinator()
    assert not scene.steps(coordinator, 4)
    assert scene.steps(coordinator, 20) is not known
    assert (coordinator.reader.attempts.handle(1, 1) is not None) is known
    assert not scene.steps(coordinator, 90) or not known
    assert scene.steps(coordinator, 20) is not known and scene.executor.cancelled == ([(1, 1)] if known else [])
    assert len(scene.executor.launched) == 1 + known


# -- providers that fail ----------------------------------------------------------------------------------------------


def test_a_failed_call_for_statuses_ends_no_supervision():
    scene = Scene(retry={"backoff_s": 0.0})
    coordinator = scene.coordinator()
    coordinator.step()
    scene.executor.denied = ExecutorError("502 Bad Gateway")
    scene.exit(0, 1, 1)
    scene.steps(coordinator, 15 * 60, every=60)
    assert (0, 2) in scene.executor.launched
    scene.executor.denied = MissingSdk("pip install 'diloco-orchestrator[modal]'")
    with pytest.raises(MissingSdk):
        coordinator.step()


def test_a_search_that_the_provider_rejects_holds_nobody_up_for_long():
    scene = Scene()
    scene.coordinator().step()
    scene.fleet.store.delete(keys.handle(1, 1))
    scene.complete()
    scene.exit(0, 1, 0)
    coordinator = scene.coordinator()
    scene.executor.denied = ExecutorDenied("the token has expired")
    assert not scene.steps(coordinator, 200.0)
    assert scene.steps(coordinator, 60.0) and len(scene.executor.launched) == 2


def test_a_launch_call_that_broke_is_made_again():
    scene = Scene()
    coordinator = scene.coordinator()
    scene.executor.refuse_launch[0, 1] = RuntimeError("a bug of the provider's library")
    with pytest.raises(RuntimeError):
        coordinator.step()
    del scene.executor.refuse_launch[0, 1]
    scene.steps(coordinator, 2)
    assert scene.executor.launched == [(1, 1), (0, 1)]
    assert coordinator.reader.attempts.handle(0, 1) is not None


def test_nothing_is_written_before_it_is_known_that_a_request_can_be_made():
    scene = Scene()
    scene.executor.shares_machine = False
    with pytest.raises(ConfigError, match="its code was never sent"):
        scene.coordinator().step()
    run_log = RunLog(scene.fleet.store)
    run = run_log.run.model_copy(update={"secret_names": ("WANDB",)}).to_bytes()
    begin = run_log.newest_begin().record.model_copy(update={"previous": sha256_hex(run)})
    scene.engine.put(keys.RUN, run)
    scene.engine.put(keys.begin(1), begin.to_bytes())
    scene.executor.shares_machine = True
    with pytest.raises(ConfigError, match="need the secrets WANDB"):
        scene.coordinator().step()
    assert not list(scene.fleet.store.list(keys.REPLICAS)) and scene.executor.launched == []


def test_a_provider_of_other_machines_is_polled_four_times_a_minute_and_at_once_after_the_stop():
    scene = Scene(timing={"poll_s": 0.01, "heartbeat_s": 10.0})
    coordinator = scene.coordinator()
    scene.steps(coordinator, 1)
    scene.executor.shares_machine = False
    scene.executor.polls = 0
    scene.steps(coordinator, 60)
    assert scene.executor.polls == 4
    coordinator.stop("halted", "enough")
    scene.executor.polls = 0
    scene.steps(coordinator, 5)
    assert scene.executor.polls >= 5


# -- requests ---------------------------------------------------------------------------------------------------------


def calls_of(scene: Scene, coordinator: Coordinator, seconds: int) -> dict[str, int]:
    scene.engine.calls.clear()
    for _ in range(seconds):
        scene.clock.advance(1.0)
        coordinator.step()
    return dict(scene.engine.calls)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # before the first commit: every twenty seconds at most the open commit, the result of the leg, two heartbeats
        ({}, {"GET": 46}),
        # retention asks for the same commit
        ({"retention": {"payloads": "needed"}}, {"GET": 46}),
        # so do the costs, which need a LIST and exit records too
        ({"max_hours": 9.0}, {"GET": 66, "LIST": 10}),
    ],
)
def test_a_quiet_step_asks_little_of_the_bucket(settings, expected):
    scene = Scene(timing={"heartbeat_s": 10.0}, **settings)
    coordinator = scene.coordinator()
    coordinator.step()
    for replica_id in (0, 1):
        scene.fleet.join(replica_id, attempt=1)  # the first one brings the model
        beat(scene, replica_id, 1, 1)
    calls_of(scene, coordinator, 10)
    assert calls_of(scene, coordinator, 100) == expected


def test_after_the_stop_nothing_is_asked_but_how_attempts_end():
    scene = Scene(timing={"heartbeat_s": 1000.0}, retention={"payloads": "needed"}, max_hours=9.0)
    coordinator = scene.coordinator()
    coordinator.step()
    scene.complete()
    scene.steps(coordinator, 1)  # within a second it looks again
    assert calls_of(scene, coordinator, 50) == {}


class Later:
    """A background whose calls begin when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def start(self, call: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self.calls.append(lambda: future.set_result(call()))
        return future


def test_a_machine_that_comes_after_its_launch_was_given_up_is_cancelled_until_its_provider_obeys():
    scene, later = Scene(), Later()
    coordinator = scene.coordinator()
    requests, policy = coordinator._requests, coordinator._policy
    vendor = Vendor(scene.executor, requests, later, scene.clock, policy)  # type: ignore[arg-type]
    vendor.launch((0, 1), "")
    vendor.abandon_launch((0, 1))
    scene.executor.refuse_cancel = 2
    later.calls.pop()()
    tried = []
    for _ in range(31):
        vendor.answered_launches()
        tried.append(2 - scene.executor.refuse_cancel + len(scene.executor.cancelled))
        scene.clock.advance(1.0)
    assert tried == [1] * 10 + [2] * 10 + [3] * 11 and scene.executor.cancelled == [(0, 1)]
