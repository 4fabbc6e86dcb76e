"""The executor contract as a test suite, for every executor, those of other packages included.

    class TestMyExecutor(ExecutorContract):
        @pytest.fixture
        def rig(self, tmp_path):
            with my_service() as service:
                yield MyRig(service)

Needs pytest. The fake or real service around an executor is in `rig`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from diloco_orchestrator.executors.contract import (
    CollectTimeout,
    ExecutorDenied,
    LaunchError,
    NoCapacity,
    ReplicaFailed,
    ReplicaHandle,
    ReplicaState,
    ServerlessExecutor,
    Unavailable,
)
from diloco_orchestrator.executors.registry import recreate, spec_of
from diloco_orchestrator.executors.testing.rig import (
    PATIENCE_S,
    RUN_ID,
    SECRET,
    STAY,
    Rig,
    ended_state,
    request_of,
    wait_until,
)

__all__ = ["PATIENCE_S", "SECRET", "ExecutorContract", "Rig", "ended_state", "request_of", "wait_until"]

_WORKLOAD = """
import os

def greet(name, punctuation="!"):
    print("rank", os.environ["REPLICA_RANK"], "of", os.environ["REPLICA_WORLD_SIZE"], flush=True)
    return f"hello {name}{punctuation}"

def fail(words):
    print("about to fail", flush=True)
    raise RuntimeError(words)
"""
_LAUNCHER = """
import json, os, sys, time
from diloco_orchestrator.executors.contract import LaunchRequest
given = json.loads(sys.argv[1])
scope = {}
exec(given["construct"], scope)
print("ready", flush=True)
sys.stdin.readline()
handle = scope["executor"].launch(LaunchRequest(**given["request"]))
print(json.dumps(handle.to_json()), flush=True)
"""
_DIGEST = "sha256:" + "0a" * 32


def _images(node: Any) -> Iterator[str]:
    """Container images in a provider's request."""
    for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if isinstance(value, Mapping | list | tuple):
            yield from _images(value)
        elif name == "image" and isinstance(value, str):
            yield value


class ExecutorContract:
    """The whole contract. Subclass it and provide the fixture `rig`; attempts that a test launches are cancelled."""

    may_double = False
    """True for a service without idempotency key: of two processes that launch an attempt at once both get the same
    handle, but a second job may have run for a moment.
    """
    tells_exit_codes = True
    """False for a service that reports success and failure, but no exit code."""

    @pytest.fixture
    def executor(self, rig: Rig) -> Iterator[ServerlessExecutor]:
        """A new executor; after the test every attempt of the test's run is cancelled."""
        executor = rig.executor()
        yield executor
        for handle in rig.executor().find(RUN_ID):
            executor.cancel(handle)
        executor.close()

    @pytest.fixture
    def code(self, tmp_path: Path) -> str:
        """A folder with a module whose functions `launch_replicas` calls."""
        folder = tmp_path / "users_code"
        folder.mkdir()
        (folder / "contract_workload.py").write_text(_WORKLOAD)
        return str(folder)

    # -- `plan` and `launch`: an attempt runs once, whoever launches it and however often -----------------------------

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

    def test_an_image_that_the_request_pins_goes_by_its_digest(self, executor: ServerlessExecutor) -> None:
        request = request_of(STAY)
        named = list(_images(executor.plan(request)))
        if not named:
            pytest.skip("its requests name no image, or not as `image`")
        pinned = replace(request, images=dict.fromkeys(named, _DIGEST))
        assert [each.partition("@")[2] for each in _images(executor.plan(pinned))] == [_DIGEST] * len(named)
        assert list(_images(executor.plan(request))) == named

    def test_launching_the_same_attempt_again_adopts_it(self, rig: Rig, executor: ServerlessExecutor) -> None:
        first = executor.launch(request_of(STAY))
        again, elsewhere = executor.launch(request_of(STAY)), rig.executor().launch(request_of(STAY))
        assert first.native_id == again.native_id == elsewhere.native_id
        assert rig.machines(RUN_ID) == 1

    def test_an_attempt_that_has_ended_is_adopted_too(self, rig: Rig, executor: ServerlessExecutor) -> None:
        first = executor.launch(request_of("print('once')"))
        ended_state(executor, first)
        again = rig.executor().launch(request_of("print('once')"))
        assert (again.native_id, rig.machines(RUN_ID)) == (first.native_id, 1)

    def test_two_processes_that_launch_the_same_attempt_get_the_same_one(
        self, rig: Rig, executor: ServerlessExecutor
    ) -> None:
        given = {"construct": rig.construct, "request": vars(request_of(STAY))}
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
        assert executor.launch(request_of(STAY)).native_id == handles[0].native_id
        assert self.may_double or rig.machines(RUN_ID) == 1

    def test_other_attempts_and_other_replicas_are_launched(self, rig: Rig, executor: ServerlessExecutor) -> None:
        requests = [request_of(STAY), request_of(STAY, replica_id=1), request_of(STAY, attempt=2)]
        handles = [executor.launch(request) for request in requests]
        assert len({handle.native_id for handle in handles}) == 3
        found = [(handle.replica_id, handle.attempt) for handle in rig.executor().find(RUN_ID)]
        assert found == [(0, 1), (0, 2), (1, 1)]

    def test_a_partial_failure_names_what_was_launched_and_what_was_not(
        self, rig: Rig, executor: ServerlessExecutor, code: str
    ) -> None:
        rig.refuse(1)
        with pytest.raises(LaunchError) as caught:
            executor.launch_replicas(
                3, "contract_workload:greet", {"name": "you"}, run_id=RUN_ID, code=code
            )  # fmt: skip
        assert [handle.replica_id for handle in caught.value.launched] == [0, 2]
        assert list(caught.value.failed) == [1] and caught.value.failed[1]
        executor.collect(caught.value.launched, timeout=PATIENCE_S)

    def test_an_executor_is_made_again_from_its_record(self, executor: ServerlessExecutor) -> None:
        spec = spec_of(executor)
        if spec is None or "withheld" in spec:
            pytest.skip("it is not registered, or has arguments that no record may hold")
        again = recreate(json.loads(json.dumps(spec)))
        assert again.plan(request_of(STAY)) == executor.plan(request_of(STAY))

    def test_a_launch_while_the_provider_is_down_may_be_repeated(self, rig: Rig, executor: ServerlessExecutor) -> None:
        rig.failing(True)
        with pytest.raises(Unavailable):
            executor.launch(request_of(STAY))
        rig.failing(False)
        assert executor.launch(request_of(STAY)).attempt == 1

    def test_no_capacity_is_told_apart(self, rig: Rig, executor: ServerlessExecutor) -> None:
        rig.no_capacity(True)
        try:
            handle = executor.launch(request_of(STAY))
        except (NoCapacity, Unavailable):  # some providers answer both in one way
            pass
        else:
            ended_state(executor, handle)
            assert executor.poll(handle).reason == "no_capacity"
        rig.no_capacity(False)
        assert executor.launch(request_of(STAY, attempt=2)).attempt == 2

    # -- `poll`: states as the provider reports them, UNKNOWN if it does not answer -----------------------------------

    def test_a_launch_that_waits_for_a_machine_is_pending(self, rig: Rig, executor: ServerlessExecutor) -> None:
        rig.hold(True)
        handle = executor.launch(request_of(STAY))
        assert executor.poll(handle).state is ReplicaState.PENDING
        rig.hold(False)
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it runs")

    def test_an_attempt_runs_and_its_handle_serves_any_process(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(STAY))
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
        handle = executor.launch(request_of(STAY))
        rig.failing(True)
        assert executor.poll(handle).state is ReplicaState.UNKNOWN
        rig.failing(False)
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it is seen again")

    def test_a_time_limit_is_told_apart(self, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(STAY, timeout_s=1.0))
        assert ended_state(executor, handle) is ReplicaState.TIMED_OUT

    def test_a_preemption_is_told_apart(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(STAY))
        wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
        rig.preempt(handle)
        assert ended_state(executor, handle) is ReplicaState.PREEMPTED
        assert ended_state(rig.executor(), handle) is ReplicaState.PREEMPTED

    def test_what_the_vendor_forgot_counts_as_preempted(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(STAY))
        rig.forget(handle)
        status = rig.executor().poll(handle)
        assert (status.state, status.reason) == (ReplicaState.PREEMPTED, "lost")

    # -- `cancel`, `find`, `close` and `logs` -------------------------------------------------------------------------

    def test_cancelling_is_repeatable_and_harms_nothing_that_is_gone(
        self, rig: Rig, executor: ServerlessExecutor
    ) -> None:
        handle = executor.launch(request_of(STAY))
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
        handle = executor.launch(request_of(STAY))
        rig.forget(handle)
        executor.cancel(handle)
        assert executor.poll(handle).state.ended

    def test_an_attempt_is_found_by_its_run_when_its_launcher_died(
        self, rig: Rig, executor: ServerlessExecutor
    ) -> None:
        handle = executor.launch(request_of(STAY))
        found = rig.executor().find(RUN_ID)
        assert [(each.native_id, each.replica_id, each.attempt) for each in found] == [(handle.native_id, 0, 1)]
        wait_until(lambda: rig.executor().poll(found[0]).state is ReplicaState.RUNNING, "it is seen")
        assert rig.executor().find("another-run") == []

    def test_closing_ends_no_replica(self, rig: Rig, executor: ServerlessExecutor) -> None:
        other = rig.executor()
        handle = other.launch(request_of(STAY))
        wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
        other.close()
        assert executor.poll(handle).state is ReplicaState.RUNNING

    def test_logs_are_there_while_it_runs_and_after_it_ended(self, executor: ServerlessExecutor) -> None:
        code = f"print('first'); print('second'); {STAY}"
        handle = executor.launch(request_of(code))
        assert list(islice(executor.logs(handle, follow=True), 3)) == ["first", "second", "here"]
        executor.cancel(handle)
        assert list(executor.logs(handle, follow=True))[:3] == ["first", "second", "here"]
        done = executor.launch(request_of("print('one'); print('two'); print('three')", replica_id=1))
        ended_state(executor, done)
        assert list(executor.logs(done)) == ["one", "two", "three"]
        assert list(executor.logs(done, tail=2)) == ["two", "three"]

    # -- `launch_replicas` and `collect`: arguments arrive, results and errors are returned ---------------------------

    def test_arguments_and_results_of_the_low_level_form_arrive(self, executor: ServerlessExecutor, code: str) -> None:
        handles = executor.launch_replicas(
            2, "contract_workload:greet", {"name": "Ada", "punctuation": "?"}, run_id=RUN_ID, code=code
        )
        results = executor.collect(handles, timeout=PATIENCE_S)
        assert [result.value for result in results] == ["hello Ada?", "hello Ada?"]
        assert [handle.replica_id for handle in handles] == [0, 1]
        assert "rank 1 of 2" in list(executor.logs(handles[1]))

    def test_an_error_of_the_low_level_form_arrives_with_its_traceback(
        self, executor: ServerlessExecutor, code: str
    ) -> None:
        handles = executor.launch_replicas(
            1, "contract_workload:fail", {"words": "the moon is full"}, run_id=RUN_ID, code=code
        )
        with pytest.raises(ReplicaFailed, match="RuntimeError: the moon is full"):
            executor.collect(handles, timeout=PATIENCE_S)
        (result,) = executor.collect(handles, timeout=PATIENCE_S, check=False)
        assert result.status.state is ReplicaState.FAILED and "about to fail" in list(executor.logs(handles[0]))

    def test_running_out_of_time_while_collecting_cancels_nothing(self, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(STAY))
        with pytest.raises(CollectTimeout) as caught:
            executor.collect([handle], timeout=0.1)
        assert caught.value.running == [0]
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it still runs")

    def test_an_unknown_option_is_refused_with_the_nearest(self, executor: ServerlessExecutor) -> None:
        with pytest.raises(TypeError, match="did you mean 'run_id'"):
            executor.launch_replicas(1, "contract_workload:greet", {}, runid="x")

    # -- credentials: wrong ones raise a clear error, and no secret is shown ------------------------------------------

    def test_wrong_credentials_are_a_clear_error_at_once(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(STAY))
        denied = rig.denied()
        calls: list[Callable[[], Any]] = [
            lambda: denied.launch(request_of(STAY, attempt=2)),
            lambda: denied.poll(handle),
            lambda: denied.find(RUN_ID),
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
        assert rig.machines(RUN_ID) == 0
