"""The doctor's findings: GPUs, torch, clocks, and a launch that it refuses before anything is paid for."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection import doctor
from diloco_orchestrator.inspection.doctor import gpu_finding
from diloco_orchestrator.launching.trial_replica import clock_finding, examine_over_there
from executors import (
    HFJobsExecutor,
    LaunchRequest,
    RemoteExecutor,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    attempt_labels,
)

H100 = "NVIDIA H100 80GB HBM3, 580.95.05, 81559 MiB"


class Failing(RemoteExecutor):
    """Every attempt has failed when it is asked for."""

    name = "failing"

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        return {}

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        return self.handle_of(request.run_id, attempt_labels(request), "it")

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return [ReplicaStatus(ReplicaState.FAILED, "image", native_state="InvalidImageName") for _ in handles]

    def cancel(self, handle: ReplicaHandle) -> None: ...

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        yield from ()

    def find(self, run_id: str) -> list[ReplicaHandle]:
        return []


def test_an_attempt_that_has_failed_is_not_waited_for():
    clock = ManualClock()
    found = doctor._is_cancelled(Failing(), "doctor-1", clock)
    assert not found.ok and "failed (InvalidImageName)" in found.detail and clock.now() < 1.0


def test_a_gpu_is_wanted_where_it_is_paid_for():
    assert gpu_finding([], wanted=False).ok and not gpu_finding([], wanted=True).ok
    one = gpu_finding([H100], wanted=True)
    assert one.ok and one.todo == "" and one.detail.startswith("1 x NVIDIA H100 80GB HBM3, 580.95.05")
    assert "launch more replicas" in gpu_finding([H100, H100], wanted=True).todo


def test_a_torch_that_sees_no_gpu_is_a_failure_where_there_is_one():
    pytest.importorskip("torch")
    found = doctor._torch(has_gpu=True, wanted=False)
    if "sees no GPU" in found.detail:
        assert not found.ok and "built for the CUDA version" in found.todo
    assert doctor._torch(has_gpu=False, wanted=False).ok


def test_apples_gpu_is_named_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch):
    assert "MPS" not in doctor._torch(has_gpu=False, wanted=False).detail
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert doctor._torch(has_gpu=False, wanted=False).detail.endswith("threads; it sees Apple's GPU (MPS)")


@pytest.mark.parametrize(
    ("at", "ok", "words"),
    [(1005.0, True, "agrees"), (975.0, True, "agrees"), (900.0, True, "100 s behind"), (2010.0, False, "990 s ahead")],
)
def test_a_clock_is_judged_by_what_lies_outside_the_time_that_the_examination_took(at: float, ok: bool, words: str):
    found = clock_finding("it", at, began_at=1000.0, ended_at=1020.0)
    assert found.ok is ok and words in found.detail


def test_nothing_is_launched_that_would_have_no_credentials(monkeypatch: pytest.MonkeyPatch):
    executor = HFJobsExecutor(endpoint="http://127.0.0.1:1", token="hf_none")  # a launch would raise another error
    (found,) = examine_over_there(executor, "s3://bucket/x", ManualClock())
    assert not found.ok and "would have no credentials" in found.detail and "secrets={…}" in found.todo


@pytest.mark.parametrize(("image", "named"), [("python:3.12", True), (f"python@sha256:{'a' * 64}", False)])
def test_an_image_by_tag_is_named(image: str, named: bool, tmp_path: Path):
    executor = HFJobsExecutor(image=image, endpoint="http://127.0.0.1:1", token="hf_none")
    found = next(examine_over_there(executor, str(tmp_path), ManualClock()))
    assert (found.name.endswith(": image") and found.ok and "by tag" in found.detail) is named
    assert ("diloco lock --image" in found.todo) is named


def test_a_little_memory_is_not_enough(tmp_path: Path):
    assert doctor._memory(16 * 2**30).ok
    little = doctor._memory(2**30)
    assert not little.ok and "memory=" in little.todo
    assert "num_workers=0" in doctor._shared_memory(str(tmp_path / "absent")).todo
