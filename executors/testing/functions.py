"""The contract of `launch_replicas` and `collect`: arguments arrive, results and errors are returned."""

import pytest

from diloco_orchestrator.executors.contract import CollectTimeout, ReplicaFailed, ReplicaState, ServerlessExecutor
from diloco_orchestrator.executors.testing.base import ContractBase
from diloco_orchestrator.executors.testing.rig import PATIENCE_S, RUN_ID, STAY, request_of, wait_until


class FunctionsContract(ContractBase):
    """Tests of functions that are called in several processes."""

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
