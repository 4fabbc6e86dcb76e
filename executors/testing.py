"""The executor contract as tests, for every executor, third parties' included.

    class TestMyExecutor(ExecutorContract):
        @pytest.fixture
        def rig(self, tmp_path):
            with my_service() as service:
                yield MyRig(service)

A *rig* is the world around an executor: it makes executors as different processes would, and misbehaves on request.
Needs pytest. What a rig cannot do is skipped, and the skip says so.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import pytest

from executors.contract import (
    CollectTimeout,
    ExecutorDenied,
    LaunchError,
    LaunchRequest,
    NoCapacity,
    ReplicaFailed,
    ReplicaHandle,
    ReplicaState,
    ServerlessExecutor,
)

PATIENCE_S = 60.0
SECRET = "s3cr3t-of-the-user-91827364"
_WORKLOAD = """
import os, signal, sys, time

def greet(name, punctuation="!"):
    print("rank", os.environ["REPLICA_RANK"], "of", os.environ["REPLICA_WORLD_SIZE"], flush=True)
    return f"hello {name}{punctuation}"

def fail(words):
    print("about to fail", flush=True)
    raise RuntimeError(words)
"""
# Runs until it is asked to leave, which it does as a replica would.
_STAY = """import signal, sys; print('here', flush=True); signal.sigwait([signal.SIGTERM])
print('DILOCO_EXIT {"code": 75}', flush=True); sys.exit(75)"""
_STAY = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); {_STAY}"
_LAUNCHER = """
import json, os, sys, time
from executors.contract import LaunchRequest
given = json.loads(sys.argv[1])
scope = {}
exec(given["construct"], scope)
print("ready", flush=True)
sys.stdin.readline()
handle = scope["executor"].launch(LaunchRequest(**given["request"]))
print(json.dumps(handle.to_json()), flush=True)
"""


class Rig:
    """The world around an executor. Override what it can do; the rest is skipped."""

    construct: str = ""
    """Python that binds `executor`, for another process with `environ`; it imports what it needs."""
    environ: Mapping[str, str] = {}
    """Added to the environment of that process."""
    credentials: tuple[str, ...] = ()
    """The vendor's own secrets in use, which no text may show."""

    def executor(self) -> ServerlessExecutor:
        """A new object, as another process would make it."""
        raise NotImplementedError

    def denied(self) -> ServerlessExecutor:
        """An executor whose credentials the service refuses."""
        _cannot("refuse credentials")

    def preempt(self, handle: ReplicaHandle) -> None:
        """The provider takes the machine back."""
        _cannot("preempt")

    def hold(self, on: bool) -> None:
        """While on, what is launched waits for a machine."""
        _cannot("keep a launch waiting")

    def no_capacity(self, on: bool) -> None:
        """While on, there is no machine to be had."""
        _cannot("run out of machines")

    def failing(self, on: bool) -> None:
        """While on, every call meets a passing error, such as HTTP 500."""
        _cannot("fail for a while")

    def forget(self, handle: ReplicaHandle) -> None:
        """The provider forgets the attempt (it has ended, or is ended now)."""
        _cannot("forget")

    def refuse(self, replica_id: int) -> None:
        """From now on launches of this replica are refused."""
        _cannot("refuse one launch")

    def machines(self, run_id: str) -> int:
        """How many processes the service started for the run, ever."""
        _cannot("count machines")


def _cannot(what: str) -> NoReturn:
    pytest.skip(f"this rig cannot {what}")


def request_of(code: str, **changes: Any) -> LaunchRequest:
    """Replica 0, attempt 1 of a run, running Python `code`."""
    request = LaunchRequest("contract-run", 0, 1, ["python", "-u", "-c", code])
    return replace(request, **changes)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look again and again; fails after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened in {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.05)


def ended_state(executor: ServerlessExecutor, handle: ReplicaHandle) -> ReplicaState:
    wait_until(lambda: executor.poll(handle).state.ended, "the attempt's end")
    return executor.poll(handle).state


class ExecutorContract:
    """Subclass, and provide the fixture `rig`. Executors leave nothing running that the tests started."""

    may_double = False
    """True where the service has no idempotency key: two processes that launch the same attempt at the same time must
    still end up with the same one, but another may have lived for a moment."""
    tells_exit_codes = True

    @pytest.fixture
    def executor(self, rig: Rig) -> Iterator[ServerlessExecutor]:
        executor = rig.executor()
        yield executor
        for handle in rig.executor().find("contract-run"):
            executor.cancel(handle)
        executor.close()

    @pytest.fixture
    def code(self, tmp_path: Path) -> str:
        folder = tmp_path / "users_code"
        folder.mkdir()
        (folder / "contract_workload.py").write_text(_WORKLOAD)
        return str(folder)

    # -- launching -----------------------------------------------------------------------------------------------

    def test_a_command_runs_with_the_environment_and_the_secrets_of_its_request(
        self, executor: ServerlessExecutor
    ) -> None:
        code = "import os; print(os.environ['PLAIN'], len(os.environ['HIDDEN']))"
        handle = executor.launch(request_of(code, env={"PLAIN": "plain value"}, secrets={"HIDDEN": SECRET}))
        assert ended_state(executor, handle) is ReplicaState.SUCCEEDED
        assert f"plain value {len(SECRET)}" in list(executor.logs(handle))

    def test_a_machine_elsewhere_sees_nothing_of_the_launchers_environment(
        self, executor: ServerlessExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if executor.shares_machine:
            pytest.skip("its replicas share this machine")
        monkeypatch.setenv("LAUNCHERS_OWN", "private")
        handle = executor.launch(request_of("import os; print(os.environ.get('LAUNCHERS_OWN', 'nothing'))"))
        assert ended_state(executor, handle) is ReplicaState.SUCCEEDED
        assert "nothing" in list(executor.logs(handle))

    def test_launching_the_same_attempt_again_adopts_it(self, rig: Rig, executor: ServerlessExecutor) -> None:
        first = executor.launch(request_of(_STAY))
        again, elsewhere = executor.launch(request_of(_STAY)), rig.executor().launch(request_of(_STAY))
        assert first.native_id == again.native_id == elsewhere.native_id
        assert rig.machines("contract-run") == 1

    def test_an_attempt_that_has_ended_is_adopted_too(self, rig: Rig, executor: ServerlessExecutor) -> None:
        first = executor.launch(request_of("print('once')"))
        ended_state(executor, first)
        again = rig.executor().launch(request_of("print('once')"))
        assert (again.native_id, rig.machines("contract-run")) == (first.native_id, 1)

    def test_two_processes_that_launch_the_same_attempt_get_the_same_one(
        self, rig: Rig, executor: ServerlessExecutor
    ) -> None:
        given = {"construct": rig.construct, "request": vars(request_of(_STAY))}
        launchers = [
            subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, json.dumps(given)],
                env={**os.environ, **rig.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for launcher in launchers:
            assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
        for launcher in launchers:
            assert launcher.stdin is not None
            launcher.stdin.write("go\n")
            launcher.stdin.flush()
        answers = [launcher.communicate(timeout=PATIENCE_S)[0] for launcher in launchers]
        handles = [ReplicaHandle.from_json(json.loads(answer)) for answer in answers]
        assert handles[0].native_id == handles[1].native_id
        assert executor.launch(request_of(_STAY)).native_id == handles[0].native_id
        assert self.may_double or rig.machines("contract-run") == 1

    def test_other_attempts_and_other_replicas_are_launched(self, rig: Rig, executor: ServerlessExecutor) -> None:
        requests = [request_of(_STAY), request_of(_STAY, replica_id=1), request_of(_STAY, attempt=2)]
        handles = [executor.launch(request) for request in requests]
        assert len({handle.native_id for handle in handles}) == 3
        found = [(handle.replica_id, handle.attempt) for handle in rig.executor().find("contract-run")]
        assert found == [(0, 1), (0, 2), (1, 1)]

    def test_a_partial_failure_names_what_was_launched_and_what_was_not(
        self, rig: Rig, executor: ServerlessExecutor, code: str
    ) -> None:
        rig.refuse(1)
        with pytest.raises(LaunchError) as caught:
            executor.launch_replicas(
                3, "contract_workload:greet", {"name": "you"}, run_id="contract-run", code=code
            )  # fmt: skip
        assert [handle.replica_id for handle in caught.value.launched] == [0, 2]
        assert list(caught.value.failed) == [1] and caught.value.failed[1]
        executor.collect(caught.value.launched, timeout=PATIENCE_S)

    def test_no_capacity_is_told_apart(self, rig: Rig, executor: ServerlessExecutor) -> None:
        rig.no_capacity(True)
        try:
            handle = executor.launch(request_of(_STAY))
        except NoCapacity:
            pass
        else:
            ended_state(executor, handle)
            assert executor.poll(handle).reason == "no_capacity"
        rig.no_capacity(False)
        assert executor.launch(request_of(_STAY, attempt=2)).attempt == 2

    # -- watching ------------------------------------------------------------------------------------------------

    def test_a_launch_that_waits_for_a_machine_is_pending(self, rig: Rig, executor: ServerlessExecutor) -> None:
        rig.hold(True)
        handle = executor.launch(request_of(_STAY))
        assert executor.poll(handle).state is ReplicaState.PENDING
        rig.hold(False)
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it runs")

    def test_an_attempt_runs_and_its_handle_serves_any_process(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY))
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it runs")
        read_back = ReplicaHandle.from_json(json.loads(json.dumps(handle.to_json())))
        assert rig.executor().poll(read_back).state is ReplicaState.RUNNING
        assert [status.state for status in executor.poll_many([read_back, handle])] == [ReplicaState.RUNNING] * 2

    @pytest.mark.parametrize(
        ("code", "state", "reason"),
        [
            (0, ReplicaState.SUCCEEDED, "exit"),
            (3, ReplicaState.FAILED, "exit"),
            (75, ReplicaState.PREEMPTED, "exit"),
            (78, ReplicaState.FAILED, "permanent"),
        ],
    )
    def test_an_exit_code_becomes_a_state(
        self, executor: ServerlessExecutor, code: int, state: ReplicaState, reason: str
    ) -> None:
        handle = executor.launch(request_of(f"import sys; sys.exit({code})"))
        ended_state(executor, handle)
        status = executor.poll(handle)
        if self.tells_exit_codes:
            assert (status.state, status.reason, status.exit_code) == (state, reason, code)
        else:
            assert status.state is (ReplicaState.SUCCEEDED if code == 0 else ReplicaState.FAILED)

    def test_a_passing_error_is_unknown_and_passes(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY))
        rig.failing(True)
        assert executor.poll(handle).state is ReplicaState.UNKNOWN
        rig.failing(False)
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it is seen again")

    def test_a_time_limit_is_told_apart(self, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY, timeout_s=1.0))
        assert ended_state(executor, handle) is ReplicaState.TIMED_OUT

    def test_a_preemption_is_told_apart(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY))
        wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
        rig.preempt(handle)
        assert ended_state(executor, handle) is ReplicaState.PREEMPTED
        assert ended_state(rig.executor(), handle) is ReplicaState.PREEMPTED

    def test_what_the_vendor_forgot_counts_as_preempted(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY))
        rig.forget(handle)
        status = rig.executor().poll(handle)
        assert (status.state, status.reason) == (ReplicaState.PREEMPTED, "lost")

    # -- ending --------------------------------------------------------------------------------------------------

    def test_cancelling_is_repeatable_and_harms_nothing_that_is_gone(
        self, rig: Rig, executor: ServerlessExecutor
    ) -> None:
        handle = executor.launch(request_of(_STAY))
        executor.cancel(handle)
        executor.cancel(handle)
        assert ended_state(executor, handle) is ReplicaState.CANCELLED
        executor.cancel(handle)
        rig.executor().cancel(handle)
        done = executor.launch(request_of("print('done')", replica_id=1))
        ended_state(executor, done)
        executor.cancel(done)
        assert executor.poll(done).state is ReplicaState.SUCCEEDED

    def test_cancelling_what_the_vendor_forgot_does_nothing(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY))
        rig.forget(handle)
        executor.cancel(handle)
        assert executor.poll(handle).state.ended

    def test_an_attempt_is_found_by_its_run_when_its_launcher_died(
        self, rig: Rig, executor: ServerlessExecutor
    ) -> None:
        handle = executor.launch(request_of(_STAY))
        found = rig.executor().find("contract-run")
        assert [(each.native_id, each.replica_id, each.attempt) for each in found] == [(handle.native_id, 0, 1)]
        wait_until(lambda: rig.executor().poll(found[0]).state is ReplicaState.RUNNING, "it is seen")
        assert rig.executor().find("another-run") == []

    def test_closing_ends_no_replica(self, rig: Rig, executor: ServerlessExecutor) -> None:
        other = rig.executor()
        handle = other.launch(request_of(_STAY))
        wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
        other.close()
        assert executor.poll(handle).state is ReplicaState.RUNNING

    # -- output --------------------------------------------------------------------------------------------------

    def test_logs_are_there_while_it_runs_and_after_it_ended(self, executor: ServerlessExecutor) -> None:
        code = f"print('first'); print('second'); {_STAY}"
        handle = executor.launch(request_of(code))
        assert list(islice(executor.logs(handle, follow=True), 3)) == ["first", "second", "here"]
        executor.cancel(handle)
        assert list(executor.logs(handle, follow=True))[:3] == ["first", "second", "here"]
        done = executor.launch(request_of("print('one'); print('two'); print('three')", replica_id=1))
        ended_state(executor, done)
        assert list(executor.logs(done)) == ["one", "two", "three"]
        assert list(executor.logs(done, tail=2)) == ["two", "three"]

    # -- the low-level form --------------------------------------------------------------------------------------

    def test_arguments_and_results_of_the_low_level_form_arrive(self, executor: ServerlessExecutor, code: str) -> None:
        handles = executor.launch_replicas(
            2, "contract_workload:greet", {"name": "Ada", "punctuation": "?"}, run_id="contract-run", code=code
        )
        results = executor.collect(handles, timeout=PATIENCE_S)
        assert [result.value for result in results] == ["hello Ada?", "hello Ada?"]
        assert [handle.replica_id for handle in handles] == [0, 1]
        assert "rank 1 of 2" in list(executor.logs(handles[1]))

    def test_an_error_of_the_low_level_form_arrives_with_its_traceback(
        self, executor: ServerlessExecutor, code: str
    ) -> None:
        handles = executor.launch_replicas(
            1, "contract_workload:fail", {"words": "the moon is full"}, run_id="contract-run", code=code
        )
        with pytest.raises(ReplicaFailed, match="RuntimeError: the moon is full"):
            executor.collect(handles, timeout=PATIENCE_S)
        (result,) = executor.collect(handles, timeout=PATIENCE_S, check=False)
        assert result.status.state is ReplicaState.FAILED and "about to fail" in list(executor.logs(handles[0]))

    def test_running_out_of_time_while_collecting_cancels_nothing(self, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY))
        with pytest.raises(CollectTimeout) as caught:
            executor.collect([handle], timeout=0.1)
        assert caught.value.running == [0]
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it still runs")

    def test_an_unknown_option_is_refused_with_the_nearest(self, executor: ServerlessExecutor) -> None:
        with pytest.raises(TypeError, match="did you mean 'run_id'"):
            executor.launch_replicas(1, "contract_workload:greet", {}, runid="x")

    # -- secrets -------------------------------------------------------------------------------------------------

    def test_wrong_credentials_are_a_clear_error_at_once(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(_STAY))
        denied = rig.denied()
        calls: list[Callable[[], Any]] = [
            lambda: denied.launch(request_of(_STAY, attempt=2)),
            lambda: denied.poll(handle),
            lambda: denied.find("contract-run"),
            lambda: denied.cancel(handle),
            lambda: list(denied.logs(handle)),
        ]
        for call in calls:
            with pytest.raises(ExecutorDenied) as caught:
                call()
            assert not any(secret in str(caught.value) for secret in rig.credentials)

    def test_no_secret_is_in_a_plan_a_handle_a_log_or_an_error(self, rig: Rig, executor: ServerlessExecutor) -> None:
        request = request_of("raise SystemExit(3)", secrets={"API_KEY": SECRET})
        handle = executor.launch(request)
        texts = [repr(request), repr(executor.plan(request)), json.dumps(handle.to_json()), repr(executor)]
        with pytest.raises(ReplicaFailed) as caught:
            executor.collect([handle], timeout=PATIENCE_S)
        texts += [str(caught.value), *executor.logs(handle), repr(executor.poll(handle))]
        for secret in (SECRET, *rig.credentials):
            assert not any(secret in text for text in texts)
        assert "API_KEY" in repr(executor.plan(request))  # that it travels is no secret

    def test_a_plan_is_json_and_sends_nothing(self, rig: Rig, executor: ServerlessExecutor) -> None:
        request = request_of("print(1)", env={"A": "b"})
        assert json.loads(json.dumps(executor.plan(request))) == executor.plan(request)
        assert rig.machines("contract-run") == 0
