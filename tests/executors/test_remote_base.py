"""What `RemoteExecutor` and `CommandLine` give to every executor, those of other packages included."""

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from executors import (
    CollectTimeout,
    CommandLine,
    ExecutorDenied,
    ExecutorError,
    Failure,
    LaunchRequest,
    MissingSdk,
    RemoteExecutor,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
    attempt_labels,
    ended_status,
    in_order,
    limited,
)
from executors import command_line as command_line_module
from executors.testing import request_of

RUNNING = ReplicaStatus(ReplicaState.RUNNING)


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class Scripted(RemoteExecutor):
    """Raises `error` when it is asked for statuses, if there is one; else all have `status`."""

    name = "scripted"

    def __init__(self, error: ExecutorError | None = None, status: ReplicaStatus = RUNNING) -> None:
        super().__init__(clock=Clock())
        self.error, self.status = error, status

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        return {}

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        return self.handle_of(request.run_id, attempt_labels(request), "it")

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        if self.error is not None:
            raise self.error
        return [self.status for _ in handles]

    def cancel(self, handle: ReplicaHandle) -> None:
        self._cancelled.add(handle.native_id)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        yield from ()

    def find(self, run_id: str) -> list[ReplicaHandle]:
        return []


def test_a_collect_that_takes_too_long_says_what_replicas_wait_for():
    executor = Scripted(status=ReplicaStatus(ReplicaState.PENDING, message="0/3 nodes have a GPU"))
    with pytest.raises(CollectTimeout, match=r"replicas \[0\] still run .* Replica 0 is pending: 0/3 nodes have a GPU"):
        executor.collect([executor.launch(request_of(""))], timeout=900.0)


def test_what_passes_by_itself_is_unknown_and_what_does_not_is_raised():
    handle = Scripted().launch(request_of(""))
    assert Scripted().poll(handle) == RUNNING
    for error in (Unavailable("away"), ExecutorError("odd")):
        states = [(status.state, status.message) for status in Scripted(error).poll_many([handle, handle])]
        assert states == [(ReplicaState.UNKNOWN, str(error))] * 2
    for error in (ExecutorDenied("no"), MissingSdk("none")):
        with pytest.raises(type(error)):
            Scripted(error).poll(handle)
    assert Scripted(ExecutorDenied("nobody is asked")).poll_many([]) == []


def test_an_attempt_that_is_gone_is_lost_unless_this_object_cancelled_it():
    executor = Scripted()
    handle = executor.launch(request_of(""))
    assert executor.gone("it", "the machine is gone").state is ReplicaState.PREEMPTED
    executor.cancel(handle)
    assert executor.gone("it", "the machine is gone").state is ReplicaState.CANCELLED
    assert Scripted().gone("it", "the machine is gone").reason == "lost"


def test_a_handle_comes_from_labels_and_not_from_what_somebody_else_made():
    request = request_of("", replica_id=3, attempt=2)
    handle = Scripted().launch(request)
    assert (handle.executor, handle.replica_id, handle.attempt, handle.native_id) == ("scripted", 3, 2, "it")
    for labels in (None, {}, {**attempt_labels(request), "diloco-attempt": "newest"}):
        with pytest.raises(ExecutorDenied, match="something else made it"):
            Scripted().handle_of(request.run_id, labels, "it")
    others = [Scripted().launch(request_of("", replica_id=r, attempt=a)) for r, a in ((1, 2), (0, 1), (1, 1))]
    assert [(each.replica_id, each.attempt) for each in in_order(others)] == [(0, 1), (1, 1), (1, 2)]


def test_a_wait_ends_with_an_error_that_may_be_tried_again():
    passes = 0
    with pytest.raises(Unavailable, match="waited 60 s for the Job to be listed"):
        for _ in Scripted().tries("the Job to be listed"):
            passes += 1
    assert passes > 100


@pytest.mark.parametrize(
    ("code", "given", "state", "reason"),
    [
        (0, {}, ReplicaState.SUCCEEDED, "exit"),
        (0, {"cancelled": True, "oom": True}, ReplicaState.SUCCEEDED, "exit"),
        (75, {}, ReplicaState.PREEMPTED, "exit"),
        (75, {"cancelled": True}, ReplicaState.CANCELLED, "user"),
        (78, {}, ReplicaState.FAILED, "permanent"),
        (124, {}, ReplicaState.FAILED, "exit"),
        (124, {"timed": True}, ReplicaState.TIMED_OUT, "deadline"),
        (137, {"timed": True}, ReplicaState.TIMED_OUT, "deadline"),
        (137, {"timed": True, "oom": True}, ReplicaState.FAILED, "oom"),
        (143, {}, ReplicaState.PREEMPTED, "exit"),
        (-15, {}, ReplicaState.PREEMPTED, "exit"),
        (-9, {}, ReplicaState.FAILED, "exit"),
    ],
)
def test_an_end_becomes_a_status(code: int, given: dict[str, bool], state: ReplicaState, reason: str):
    status = ended_status(code, "exited", **given)
    assert (status.state, status.reason, status.exit_code, status.native_state) == (state, reason, code, "exited")


def test_a_time_limit_is_kept_by_timeout():
    assert limited(["python", "-c", "1"], None) == ["python", "-c", "1"]
    assert limited(["python"], 90.5) == ["timeout", "--foreground", "--kill-after=60", "90.5", "python"]


# -- command line tools -----------------------------------------------------------------------------------------------


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    path = tmp_path / "cloudctl"
    path.write_text('#!/bin/sh\neval "$1"\n')
    path.chmod(0o755)
    return path


FAILURES = (
    Failure(Unavailable, ["is away"], "the cloud does not answer ({said}). Try again."),
    Failure(ExecutorDenied, ["denied", "no such project"], "refused ({said}). Ask for the right."),
)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("access denied", ExecutorDenied),
        ("the server is away; access denied", Unavailable),  # the first row that fits
        ("no such machine", ExecutorError),
    ],
)
def test_a_failure_is_sorted_by_the_table(tool: Path, said: str, kind: type[ExecutorError]):
    with pytest.raises(ExecutorError, match=said) as caught:
        CommandLine(str(tool), failures=FAILURES).run(f"echo '{said}' >&2; exit 1", what="listing")
    assert type(caught.value) is kind and str(caught.value).startswith("listing")


def test_a_known_failure_is_an_answer(tool: Path):
    cloud = CommandLine(str(tool), failures=FAILURES)
    assert cloud.run("echo '[1]'; echo no such machine >&2; exit 1", known=["no such machine"]) == "[1]\n"


def test_a_tool_gets_its_input_and_secrets_over_its_environment(tool: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLAIN", "here")
    assert CommandLine(str(tool)).run("cat; echo $PLAIN $KEY", given="in ", secrets={"KEY": "k"}) == "in here k\n"
    empty = CommandLine(str(tool), environment=lambda: {"PATH": os.environ["PATH"]})
    assert empty.run("echo $PLAIN $KEY") == "\n"


def test_a_tool_for_which_this_machine_has_no_room_may_be_called_again(tool: Path):
    """As on a login node, where a user's processes and files are limited."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(Unavailable, match=r"listing: this machine says .*Too many open files"):
            CommandLine(str(tool)).run("echo it", what="listing")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    (tool.parent / "no-program").write_bytes(b"\0")
    (tool.parent / "no-program").chmod(0o700)
    with pytest.raises(ExecutorError, match="Exec format error") as failed:
        CommandLine(str(tool.parent / "no-program")).run("it", what="listing")
    assert type(failed.value) is ExecutorError


def test_a_tool_that_is_not_there_or_hangs_says_so(tool: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MissingSdk, match=r"no-such-tool is not on the PATH\. Install the cloud's tools"):
        CommandLine("no-such-tool", missing="Install the cloud's tools.").run("ls")
    monkeypatch.setattr(command_line_module, "PATIENCE_S", 0.05)
    with pytest.raises(Unavailable, match=r"no answer for 0\.05 s"):
        CommandLine(str(tool)).run("exec sleep 600")


def test_lines_come_as_they_are_printed_and_the_tool_ends_with_its_reader(tool: Path, tmp_path: Path):
    ended = tmp_path / "ended"
    lines = CommandLine(str(tool)).lines(
        f"trap 'touch {ended}; exit' TERM; echo one; echo two >&2; while :; do sleep 0.01; done"
    )
    assert [next(lines), next(lines)] == ["one", "two"]
    lines.close()  # type: ignore[attr-defined]
    assert ended.exists()


def test_a_tool_that_fails_while_its_lines_are_read_is_an_error(tool: Path):
    lines = CommandLine(str(tool), failures=FAILURES).lines("echo one; echo the server is away; exit 1")
    assert [next(lines), next(lines)] == ["one", "the server is away"]
    with pytest.raises(Unavailable, match="the server is away"):
        next(lines)
