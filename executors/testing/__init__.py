"""The executor contract as a test suite, for every executor, those of other packages included.

    class TestMyExecutor(ExecutorContract):
        @pytest.fixture
        def rig(self, tmp_path):
            with my_service() as service:
                yield MyRig(service)

Needs pytest. Each part of the contract has a file; the fake or real service around an executor is in `rig`.
"""

from diloco_orchestrator.executors.testing.credentials import CredentialsContract
from diloco_orchestrator.executors.testing.ending import EndingContract
from diloco_orchestrator.executors.testing.functions import FunctionsContract
from diloco_orchestrator.executors.testing.launching import LaunchingContract
from diloco_orchestrator.executors.testing.polling import PollingContract
from diloco_orchestrator.executors.testing.rig import PATIENCE_S, SECRET, Rig, ended_state, request_of, wait_until

__all__ = ["PATIENCE_S", "SECRET", "ExecutorContract", "Rig", "ended_state", "request_of", "wait_until"]


class ExecutorContract(LaunchingContract, PollingContract, EndingContract, FunctionsContract, CredentialsContract):
    """The whole contract. Subclass it and provide the fixture `rig`; attempts that a test launches are cancelled."""
