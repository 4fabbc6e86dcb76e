"""What a provider says about an attempt that does not start, as far as the run's records and the coordinator's log."""

import logging
from pathlib import Path

import pytest
from held_services import OnThisMachine, beat
from loopback_hf import LoopbackHF
from loopback_kubernetes import running_kubernetes
from loopback_modal import STATUS, LoopbackModal
from scripted import STAMP, Scene

from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from executors.contract import ReplicaState, ReplicaStatus, ServerlessExecutor, Unavailable
from executors.hf_jobs import HFJobsExecutor
from executors.hf_objects import Job, status_of
from executors.kubernetes_jobs import KubernetesExecutor
from executors.modal_sandboxes import ModalExecutor
from executors.testing import wait_until

NO_START = "Image failed to start:\n exec /usr/bin/python: exec format error"
QUOTA = 'pods "dl-x" is forbidden: exceeded quota: gpus, requested: 1, used: 8, limited: 8'


def scene_of(executor: ServerlessExecutor) -> Scene:
    scene = Scene(retry={"max_errors": 3, "backoff_s": 1.0})
    scene.executor = OnThisMachine(executor)
    return scene


def why(coordinator: Coordinator, attempt: int) -> str:
    intent = coordinator.reader.attempts.intent(0, attempt)
    return "" if intent is None else intent.why


def test_why_a_sandbox_never_started_is_in_the_record_of_the_next_attempt():
    """Modal gives it the exit code 0, which is no success."""
    with LoopbackModal() as server:
        server.page_size = 100
        server.hold(True)
        scene = scene_of(ModalExecutor("tests", client=server.client()))
        coordinator = scene.coordinator()
        scene.steps(coordinator, 2.0)
        (first,) = server.sandboxes_of(**{"diloco-replica": "0"})
        first.result, first.words = STATUS.GENERIC_STATUS_INIT_FAILURE, NO_START
        scene.steps(coordinator, 120.0, every=20.0)
        told = "Modal says INIT_FAILURE: Image failed to start: exec /usr/bin/python: exec format error"
        assert why(coordinator, 2) == f"attempt 1 (error): {told}"


def test_what_hugging_face_says_about_a_job_that_never_started_is_passed_on():
    job: Job = {
        "id": "1",
        "createdAt": "2026-11-01T00:00:00Z",
        "startedAt": None,
        "finishedAt": "2026-11-01T00:01:00Z",
        "labels": {},
        "status": {"stage": "ERROR", "message": "ErrImagePull: nothing/here"},
    }
    never = status_of(job)
    assert (never.state, never.reason) == (ReplicaState.FAILED, "lost")
    assert never.message == "the job never started (image, hardware or capacity): ErrImagePull: nothing/here"
    ran = status_of({**job, "startedAt": "2026-11-01T00:00:30Z"})
    assert ran.message == "ErrImagePull: nothing/here"


def test_what_hugging_face_says_is_in_the_record_of_the_next_attempt():
    with LoopbackHF(page_size=100) as service:
        service.hold(True)
        scene = scene_of(HFJobsExecutor(endpoint=service.endpoint, token=service.token))
        coordinator = scene.coordinator()
        scene.steps(coordinator, 2.0)
        (first,) = service.carrying({"diloco-replica": "0"})
        first.told = ("ERROR", "Unschedulable: no a100 left")
        scene.steps(coordinator, 120.0, every=20.0)
        told = "the job never started (image, hardware or capacity): Unschedulable: no a100 left"
        assert why(coordinator, 2) == f"attempt 1 (error): {told}"


def test_why_a_pod_is_refused_is_logged_once_and_ends_no_attempt(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with running_kubernetes() as cluster:
        cluster.refused_pods = QUOTA
        executor = KubernetesExecutor(kubeconfig=cluster.write_kubeconfig(tmp_path / "kubeconfig"), image="any")
        scene = scene_of(executor)
        coordinator = scene.coordinator()
        scene.steps(coordinator, 2.0)
        wait_until(lambda: len(cluster.objects("events")) == 2, "both pods are refused")
        scene.steps(coordinator, 600.0, every=60.0)
        assert coordinator.alive() == [0, 1] and scene.executor.cancelled == []
        words = f"replica 0, attempt 1: it has not started yet: its pod is refused: Error creating: {QUOTA}"
        assert [record.getMessage() for record in caplog.records].count(words) == 1
        rows = RunReader(scene.fleet.store).status().replicas
        assert [row.words() for row in rows] == [f"launching: its pod is refused: Error creating: {QUOTA}"] * 2


def test_what_a_provider_says_of_a_launch_that_it_refuses_is_in_the_status_until_it_runs():
    scene = Scene()
    overloaded = Unavailable("overloaded, says the provider")
    scene.executor.refuse_launch = {(0, 1): overloaded, (1, 1): overloaded}
    coordinator = scene.coordinator()
    scene.steps(coordinator, 2.0)
    reader = RunReader(scene.fleet.store)
    assert {row.words() for row in reader.status().replicas} == {"launching: overloaded, says the provider"}
    scene.executor.refuse_launch.clear()
    scene.steps(coordinator, 300.0, every=5.0)
    beat(scene, 0, counter=1)
    assert next(row.words() for row in reader.status().replicas) == "training"


def test_what_a_provider_says_of_its_queue_is_in_the_status_until_the_attempt_has_a_machine():
    scene = Scene()
    coordinator, reader = scene.coordinator(), RunReader(scene.fleet.store)

    def status_after_a_minute(status: ReplicaStatus) -> set[str]:
        scene.executor.states = dict.fromkeys([(0, 1), (1, 1)], status)
        scene.steps(coordinator, 60.0, every=15.0)
        return {row.words() for row in reader.status().replicas}

    for words in ("position 7 in the queue", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"):
        told = ReplicaStatus(ReplicaState.PENDING, native_state="QUEUED", message=words)
        assert status_after_a_minute(told) == {f"launching: {words}"}
    assert status_after_a_minute(ReplicaStatus(ReplicaState.PENDING, native_state="QUEUED")) == {"launching: QUEUED"}
    (words,) = status_after_a_minute(ReplicaStatus(ReplicaState.RUNNING, native_state="UP"))
    assert words.startswith("launching: no heartbeat yet")


def test_a_providers_words_are_recorded_without_the_secrets_that_it_was_sent():
    scene = Scene(retry={"max_errors": 1, "backoff_s": 1.0})
    secrets = {"WANDB_API_KEY": "0123456789abcdef-of-the-user"}
    coordinator = Coordinator(RunReader(scene.fleet.store), Means(scene.executor, scene.clock, STAMP, secrets=secrets))
    scene.steps(coordinator, 1.0)
    said = f"cannot start with WANDB_API_KEY={secrets['WANDB_API_KEY']}"
    scene.executor.states[0, 1] = ReplicaStatus(ReplicaState.FAILED, "image", message=said)
    scene.steps(coordinator, 10.0)
    recorded = why(coordinator, 2)
    assert recorded.startswith("attempt 1 (error): cannot start with WANDB_API_KEY=")
    assert secrets["WANDB_API_KEY"] not in recorded
