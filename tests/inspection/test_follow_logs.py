"""The output of all replicas merged, attempt after attempt, until the run stops."""

from collections.abc import Iterator

import pytest
from long_history import LongRun
from scripted import STAMP, Scene, ScriptedExecutor

from diloco_orchestrator.clock import ManualClock, NoBackground
from diloco_orchestrator.inspection.logs import LogFollower, LogLine
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, Intent
from diloco_orchestrator.protocol.records import Result
from diloco_orchestrator.run_log.append import request_halt
from executors.contract import ExecutorError, ReplicaHandle, ReplicaState, ReplicaStatus


class Stage:
    """Two replicas, whose outputs are what `printed` says."""

    def __init__(self) -> None:
        self.scene = Scene(replicas=2)
        self.printed: dict[tuple[int, int], list[str]] = {(0, 1): ["a", "b"], (1, 1): ["c"]}
        self.scene.executor.logs = self.logs  # type: ignore[method-assign]
        self.coordinator = self.scene.coordinator()
        self.coordinator.step()

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        assert follow
        lines = self.printed[handle.replica_id, handle.attempt]
        if lines == ["!"]:
            raise ExecutorError("the provider is away")
        return iter(lines)

    def stop(self) -> None:
        request_halt(self.coordinator.reader.log, "test", "enough", STAMP)
        result = Result(**STAMP(), leg=1, status="halted", round=0, outer_steps=0, reason="enough")
        self.coordinator.reader.store.create(keys.result(1), result.to_bytes())

    def follow(self, *replicas: int) -> Iterator[LogLine]:
        reader, executor = self.coordinator.reader, self.scene.executor
        return LogFollower(reader, replicas or (0, 1), self.scene.clock, NoBackground(), executor=executor).lines()


def test_the_lines_of_all_replicas_are_merged_until_the_run_stops():
    stage = Stage()
    stage.stop()
    assert list(stage.follow()) == [LogLine(0, 1, "a"), LogLine(0, 1, "b"), LogLine(1, 1, "c")]
    assert list(stage.follow(1)) == [LogLine(1, 1, "c")]


def test_the_next_attempt_of_a_replica_is_followed_too():
    stage = Stage()
    lines = stage.follow(0)
    assert [next(lines).text, next(lines).text] == ["a", "b"]
    ended = Exit(**STAMP(), replica_id=0, attempt=1, code=75, reason="preempted", round=0)
    stage.coordinator.reader.store.create(keys.exit_record(0, 1), ended.to_bytes())
    stage.printed[0, 2] = ["again"]
    stage.scene.executor.states[0, 1] = ReplicaStatus(ReplicaState.PREEMPTED, "exit", 75)
    stage.scene.steps(stage.coordinator, 30.0)
    assert next(lines) == LogLine(0, 2, "again")
    stage.stop()
    assert list(lines) == []


def test_an_output_that_cannot_be_read_is_one_line_and_the_others_go_on():
    stage = Stage()
    stage.printed[0, 1] = ["!"]
    stage.stop()
    first, second = stage.follow()
    assert "cannot be read: the provider is away" in first.text and second == LogLine(1, 1, "c")


def test_attempts_that_never_had_a_machine_are_looked_for_once():
    """A provider without machines for a night leaves a thousand of them, at two requests each every two seconds."""

    class AMinute(ManualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            for attempt in range(2, 6):  # after the first, which had one
                intent = Intent(**STAMP(), replica_id=0, attempt=attempt, leg=1, executor="scripted", why="no machine")
                run.store.create(keys.intent(0, attempt), intent.to_bytes())
            if self.now() > 60.0:
                raise TimeoutError

    run = LongRun(2)
    executor = ScriptedExecutor()
    executor.logs = lambda *_, **__: iter(())  # type: ignore[method-assign]
    follower = LogFollower(RunReader(run.store), [0], AMinute(), NoBackground(), executor=executor)
    with pytest.raises(TimeoutError):
        list(follower.lines())
    asked = [run.store.gets.count(keys.handle(0, attempt)) for attempt in (2, 3, 4, 5)]
    assert asked[:3] == [1, 1, 1] and asked[3] > 10
