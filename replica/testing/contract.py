"""`ReplicaContract`: the rows of `check_replica` as pytest tests. Needs pytest.

from diloco_orchestrator.replica.testing import ReplicaContract

class TestMyTraining(ReplicaContract):
    train = "my_package.train:train"
    settings = {"args": {"lr": 1e-3}, "sync_every": 4}
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from diloco_orchestrator.replica.testing.check import check_replica
from diloco_orchestrator.replica.testing.report import ConformanceReport
from diloco_orchestrator.replica.testing.rows import NAMES


class ReplicaContract:
    """pytest tests of a training function: set `train`, and `settings`, the keyword arguments of `check_replica`."""

    train: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture(scope="class")
    def report(self) -> ConformanceReport:
        return check_replica(self.train, **self.settings)

    @pytest.mark.parametrize("row", NAMES)
    def test_row(self, row: str, report: ConformanceReport) -> None:
        finding = report[row]
        if finding.outcome == "not applicable":
            pytest.skip(finding.detail)
        assert finding.outcome == "passed", "\n".join(finding.lines())
