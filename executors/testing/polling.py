"""The contract of `poll`: states as the provider reports them, UNKNOWN if the provider does not answer."""

import json

import pytest

from diloco_orchestrator.executors.contract import ReplicaHandle, ReplicaState, ServerlessExecutor
from diloco_orchestrator.executors.testing.base import ContractBase
from diloco_orchestrator.executors.testing.rig import STAY, Rig, ended_state, request_of, wait_until


class PollingContract(ContractBase):
    """Tests of the states of attempts, and how they ended."""

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
