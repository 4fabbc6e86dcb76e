"""For tests of code that uses this package: `MockManager`, and the contract of executors as a test suite.

`ExecutorContract` and `Rig` come from `diloco_orchestrator.executors.testing` and are imported at first use, because
they need pytest.
"""

from typing import TYPE_CHECKING

from diloco_orchestrator.replica.interop.mock_manager import MockManager as MockManager

__all__ = ["ExecutorContract", "MockManager", "Rig"]

if TYPE_CHECKING:
    from diloco_orchestrator.executors.testing import ExecutorContract as ExecutorContract
    from diloco_orchestrator.executors.testing import Rig as Rig
else:

    def __getattr__(name: str) -> object:
        if name in ("ExecutorContract", "Rig"):
            from diloco_orchestrator.executors import testing

            return getattr(testing, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
