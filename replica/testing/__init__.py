"""Checks of a training function: whether a user's `train(ctx)` is a sound replica.

    from diloco_orchestrator.replica.testing import check_replica

    report = check_replica("my_package.train:train", args={"lr": 1e-3})
    print(report)                    # one row per claim, with what to do
    report.raise_if_unsound()

`ReplicaContract` is the same as a pytest class, with a test for each row; it is imported at first use, because it needs
pytest.
"""

from typing import TYPE_CHECKING

from diloco_orchestrator.replica.testing.check import check_replica
from diloco_orchestrator.replica.testing.report import ConformanceReport, Finding, ReplicaUnsound

__all__ = ["ConformanceReport", "Finding", "ReplicaContract", "ReplicaUnsound", "check_replica"]

if TYPE_CHECKING:
    from diloco_orchestrator.replica.testing.contract import ReplicaContract as ReplicaContract
else:

    def __getattr__(name: str) -> object:
        if name == "ReplicaContract":
            from diloco_orchestrator.replica.testing.contract import ReplicaContract

            return ReplicaContract
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
