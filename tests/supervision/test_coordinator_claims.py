"""Whose word counts when an attempt ends, what is charged to which budget, and what a coordinator leaves alone."""

from scripted import STAMP, Scene, ScriptedExecutor

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Cancel, Heartbeat
from diloco_orchestrator.protocol.records import Halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from executors.contract import ReplicaHandle, ReplicaState


def beat(scene: Scene, replica_id: int, attempt: int, counter: int) -> None:
    record = Heartbeat(
        **STAMP(), replica_id=replica_id, attempt=attempt, counter=counter, phase="training", round=1, inner_step=0
    )
    scene.fleet.store.put(keys.heartbeat(replica_id, attempt), record.to_bytes())


def test_an_attempts_own_exit_record_goes_before_its_providers_word():
    """The provider saw a process fail; the process knew that it had been asked to leave."""
    scene = Scene(retry={"max_errors": 0, "max_preemptions": 5})
    coordinator = scene.coordinator()
    coordinator.step()
    scene.exit(0, 1, 75)
    scene.ends(0, 1, ReplicaState.FAILED, code=1)
    scene.steps(coordinator, 3)
    assert (0, 2) in scene.executor.launched and coordinator.reader.log.result(1) is None


def test_a_permanent_error_that_the_replica_tells_is_believed_though_its_machine_was_preempted():
    scene = Scene(quorum=1, retry={"max_preemptions": 5})
    coordinator = scene.coordinator()
    coordinator.step()
    scene.exit(0, 1, 78)
    scene.ends(0, 1, ReplicaState.PREEMPTED)
    scene.steps(coordinator, 60)
    assert scene.executor.launched == [(0, 1), (1, 1)]


class Remembering(ScriptedExecutor):
    """Notes at each cancel whether its record was there, and ends the attempt as a preempted one."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene, self.recorded = scene, {}

    def cancel(self, handle: ReplicaHandle) -> None:
        super().cancel(handle)
        who = handle.replica_id, handle.attempt
        key = keys.cancel(*who)
        self.recorded[who] = Cancel.from_bytes(self.scene.fleet.store.get(key), key).reason
        self.scene.ends(*who, ReplicaState.PREEMPTED, code=75)
        self.scene.exit(*who, 75)


def hanging(**settings: object) -> tuple[Scene, Remembering]:
    """Replica 0 stops sending heartbeats and is cancelled; replica 1 lives on."""
    scene = Scene(retry={"hung_after_s": 30.0, "backoff_s": 0.0, **settings})
    scene.executor = executor = Remembering(scene)
    coordinator = scene.coordinator()
    coordinator.step()
    beat(scene, 0, 1, 1)
    for second in range(60):
        beat(scene, 1, 1, second)
        scene.steps(coordinator, 1)
    return scene, executor


def test_the_record_of_a_cancel_is_written_before_the_cancel_and_says_why():
    _, executor = hanging(max_errors=5)
    assert executor.recorded[0, 1].startswith("hung: no heartbeat for 3")


def test_an_attempt_that_was_cancelled_counts_as_an_error_though_it_leaves_as_if_preempted():
    scene, executor = hanging(max_errors=0, max_preemptions=100)
    assert executor.launched == [(0, 1), (1, 1)]
    result = RunLog(scene.fleet.store).result(1)
    assert result is not None and result.status == "failed" and "replica 0 failed 1 times" in result.reason


def test_each_leg_has_budgets_of_its_own():
    scene = Scene(rounds=9, retry={"max_errors": 1, "backoff_s": 0.0})
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(0, 1, ReplicaState.FAILED)
    scene.steps(coordinator, 2)
    assert scene.executor.launched[-1] == (0, 2)
    halt = Halt(**STAMP(), leg=1, by="test", reason="lunch")
    scene.fleet.store.create(keys.halt(1), halt.to_bytes())
    scene.complete()
    for who in ((0, 2), (1, 1)):
        scene.ends(*who, ReplicaState.SUCCEEDED, code=0)
    assert scene.steps(coordinator, 2)
    begin_next_leg(RunLog(scene.fleet.store), rounds=3, from_round=None, by="test", why="go on", stamp=STAMP)
    scene.coordinator().step()
    assert sorted(scene.executor.launched[3:]) == [(0, 3), (1, 2)]
    scene.ends(0, 3, ReplicaState.FAILED)
    scene.steps(scene.coordinator(), 2)
    assert scene.executor.launched[-1] == (0, 4)


def test_nothing_is_deleted_after_the_stop_because_the_next_leg_may_start_anywhere():
    scene = Scene(rounds=6, snapshot_every=1, retention={"payloads": "needed", "snapshots": 2})
    scene.complete(rounds=7)
    before = {info.key for info in scene.engine.list("")}
    coordinator = scene.coordinator()
    scene.steps(coordinator, 200)
    gone = before - {info.key for info in scene.engine.list("")}
    assert gone == set()


def test_while_the_leg_goes_on_what_retention_allows_is_deleted():
    scene = Scene(rounds=20, snapshot_every=1, retention={"payloads": "needed", "snapshots": 2})
    scene.complete(rounds=7)
    coordinator = scene.coordinator()
    scene.steps(coordinator, 5)
    left = [info.key for info in scene.engine.list("rounds/") if "/payload/" in info.key]
    assert left and min(left) >= "rounds/00000006"
