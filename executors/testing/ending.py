"""The contract of `cancel`, `find`, `close` and `logs`."""

from itertools import islice

from diloco_orchestrator.executors.contract import ReplicaState, ServerlessExecutor
from diloco_orchestrator.executors.testing.base import ContractBase
from diloco_orchestrator.executors.testing.rig import RUN_ID, STAY, Rig, ended_state, request_of, wait_until


class EndingContract(ContractBase):
    """Tests of cancelled attempts, and of the output of attempts that run or have ended."""

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
