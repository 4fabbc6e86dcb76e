"""The executor contract on a loopback Kubernetes, and what is special to Jobs."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import kubernetes_validate
import pytest
from loopback_kubernetes import TOKEN, LoopbackKubernetes, running_kubernetes

from executors.contract import (
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    MissingSdk,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
)
from executors.kubernetes_jobs import KubernetesExecutor
from executors.kubernetes_objects import PodOptions, job_body, runs, selector, status_of, telling_pods, warnings
from executors.remote_base import run_label
from executors.testing import ExecutorContract, Rig, ended_state, request_of, wait_until

_STAY = (
    "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('here', flush=True); "
    "signal.sigwait([signal.SIGTERM]); print('published', flush=True); sys.exit(75)"
)
SCHEMAS = ("1.32", "1.34")
NAME = "dl-contract-run-r0-a1"


class KubernetesRig(Rig):
    credentials = (TOKEN,)

    def __init__(self, cluster: LoopbackKubernetes, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._options = {"kubeconfig": cluster.write_kubeconfig(folder / "kubeconfig"), "image": "python:3.12"}
        self.construct = (
            f"from executors.kubernetes_jobs import KubernetesExecutor as K; executor = K(**{self._options!r})"
        )

    def executor(self, **options: Any) -> KubernetesExecutor:
        return KubernetesExecutor(**{**self._options, **options})

    def denied(self) -> KubernetesExecutor:
        kubeconfig = self.cluster.write_kubeconfig(self._folder / "denied", token="wrong")
        return self.executor(kubeconfig=kubeconfig)

    def preempt(self, handle: ReplicaHandle) -> None:
        self.cluster.preempt(handle.native["job"])

    def hold(self, on: bool) -> None:
        self.cluster.holding = on

    def no_capacity(self, on: bool) -> None:
        self.cluster.no_capacity = on

    def failing(self, on: bool) -> None:
        self.cluster.failing = 500 if on else 0

    def forget(self, handle: ReplicaHandle) -> None:
        self.cluster.forget(handle.native["job"])

    def refuse(self, replica_id: int) -> None:
        self.cluster.refused_replicas.add(replica_id)

    def machines(self, run_id: str) -> int:
        return self.cluster.machines(run_label(run_id))


@pytest.fixture
def cluster() -> Iterator[LoopbackKubernetes]:
    with running_kubernetes() as cluster:
        yield cluster


@pytest.fixture
def rig(cluster: LoopbackKubernetes, tmp_path: Path) -> KubernetesRig:
    return KubernetesRig(cluster, tmp_path)


class TestKubernetes(ExecutorContract):
    @pytest.mark.slow  # two processes that import the SDK; local processes show the same in less time
    def test_two_processes_that_launch_the_same_attempt_get_the_same_one(self, rig, executor):
        super().test_two_processes_that_launch_the_same_attempt_get_the_same_one(rig, executor)


# -- the request ------------------------------------------------------------------------------------------------------


def test_the_job_of_an_attempt_compared_whole():
    request = LaunchRequest(
        "run-7",
        2,
        3,
        ["python", "-c", "print('$(HOME)')"],
        env={"A": "1"},
        secrets={"KEY": "hidden"},
        timeout_s=90.5,
    )
    body = job_body(
        request,
        PodOptions("replicas:1", gpu=1, cpu=4, memory="16Gi", service_account="trainer", spot=True, queue="gpus"),
    )
    labels = {"diloco-run": "run-7", "diloco-replica": "2", "diloco-attempt": "3"}
    assert body == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "dl-run-7-r2-a3", "labels": {**labels, "kueue.x-k8s.io/queue-name": "gpus"}},
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "ttlSecondsAfterFinished": 604800,
            "suspend": True,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 110,
                    "activeDeadlineSeconds": 91,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "serviceAccountName": "trainer",
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 10001,
                        "runAsGroup": 10001,
                        "fsGroup": 10001,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {
                                "nodeSelectorTerms": [
                                    {
                                        "matchExpressions": [
                                            {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]}
                                        ]
                                    },
                                    {
                                        "matchExpressions": [
                                            {
                                                "key": "eks.amazonaws.com/capacityType",
                                                "operator": "In",
                                                "values": ["SPOT"],
                                            }
                                        ]
                                    },
                                ]
                            }
                        }
                    },
                    "containers": [
                        {
                            "name": "replica",
                            "image": "replicas:1",
                            "command": ["python", "-c", "print('$$(HOME)')"],
                            "env": [{"name": "A", "value": "1"}, {"name": "HOME", "value": "/tmp"}],
                            "envFrom": [{"secretRef": {"name": "dl-run-7-r2-a3"}}],
                            "resources": {
                                "requests": {"cpu": "4", "memory": "16Gi"},
                                "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
                            },
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": ["ALL"]},
                                "readOnlyRootFilesystem": True,
                            },
                            "volumeMounts": [
                                {"name": "shared-memory", "mountPath": "/dev/shm"},
                                {"name": "scratch", "mountPath": "/tmp"},
                            ],
                        }
                    ],
                    "volumes": [
                        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                        {"name": "scratch", "emptyDir": {}},
                    ],
                },
            },
        },
    }
    for version in SCHEMAS:
        kubernetes_validate.validate(body, version, strict=True)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"spot": True}, {"gpu": 1, "queue": "q", "gpu_types": ["H100", "A100"]}, {"cpu": "500m"}),
        *({"memory": "1Gi"}, {"ranks_per_machine": 1}),
    ],
)
def test_what_is_sent_keeps_to_the_official_schemas(rig: KubernetesRig, cluster: LoopbackKubernetes, options: Any):
    request = replace(request_of("print()", secrets={"KEY": "value"}, timeout_s=60), ranks=2)
    rig.executor(**options).launch(request)
    bodies = [body for method, _, body in cluster.requests if method == "POST"]
    of_several = ["Service"] if "ranks_per_machine" in options else []
    assert [body["kind"] for body in bodies] == ["Job", "Secret", *of_several]
    for body in bodies:
        for version in SCHEMAS:
            kubernetes_validate.validate(body, version, strict=True)


def test_image_and_machine_are_the_executors(rig: KubernetesRig):
    plan = rig.executor(image="other:2", gpu=1, memory="8Gi").plan(request_of(""))
    (container,) = plan["job"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "other:2"
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": "1"}


def test_bad_options_are_refused_with_what_would_be_right():
    with pytest.raises(ValueError, match="16Gi"):
        KubernetesExecutor(memory="16GB")
    with pytest.raises(ValueError, match=r"gpu=-1 is no number of GPUs: write 1, for one for each rank"):
        KubernetesExecutor(gpu=-1)
    with pytest.raises(ValueError, match="namespace"):
        KubernetesExecutor(namespace="No Such")


def test_dollars_arrive_as_they_were_written(rig: KubernetesRig):
    executor = rig.executor()
    code = "import os; print('$(HOME) $$ $x', os.environ['PRICE'])"
    handle = executor.launch(request_of(code, env={"PRICE": "$$5 $(HOME)"}))
    ended_state(executor, handle)
    assert list(executor.logs(handle)) == ["$(HOME) $$ $x $$5 $(HOME)"]


# -- the reply --------------------------------------------------------------------------------------------------------


def _job(*conditions: tuple[str, str], **parts: Any) -> dict[str, Any]:
    told = [{"type": kind, "status": "True", "reason": reason} for kind, reason in conditions]
    return {"metadata": {"annotations": parts.pop("annotations", None)}, "spec": parts, "status": {"conditions": told}}


def _pod(phase: str, *, waiting: Any = None, terminated: Any = None, **status: Any) -> dict[str, Any]:
    state = {"waiting": waiting} if waiting else {"terminated": terminated} if terminated else {}
    containers = [{"name": "a-sidecar", "state": {"running": {}}}, {"name": "replica", "state": state}]
    return {"metadata": {}, "status": {"phase": phase, "containerStatuses": containers, **status}}


_COMPLETE, _FAILED = ("Complete", "CompletionsReached"), ("Failed", "BackoffLimitExceeded")
_NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
_ON_NODE = {"type": "PodScheduled", "status": "True"}
_CREATING, _INITIALIZING = {"reason": "ContainerCreating"}, {"reason": "PodInitializing"}
_INIT = {"initContainerStatuses": [{"name": "corpus", "state": {"waiting": {"reason": "ErrImagePull"}}}]}
_EVICTED = _pod("Failed", reason="Evicted", message='Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ')
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
_NODE_FULL = "The node was low on resource: memory. "
_OOM = {"exitCode": 137, "reason": "OOMKilled"}
_NOTED = {"diloco-cancelled": "true"}


@pytest.mark.parametrize(
    ("job", "pod", "state", "reason", "native"),
    [
        (_job(), None, "pending", "", ""),
        (_job(suspend=True), None, "pending", "", "Suspended"),
        (_job(suspend=True, annotations=_NOTED), None, "cancelled", "user", "Suspended"),
        (_job(), _pod("Pending"), "pending", "", "Pending"),
        (_job(), _pod("Pending", conditions=[_NO_NODE]), "pending", "", "Unschedulable"),
        (_job(), _pod("Pending", waiting=_CREATING), "pending", "", "ContainerCreating"),
        (_job(), _pod("Pending", waiting=_CREATING, conditions=[_ON_NODE]), "pending", "start", "ContainerCreating"),
        (_job(), _pod("Pending", conditions=[_ON_NODE]), "pending", "start", "Pending"),
        (_job(), _pod("Pending", waiting=_INITIALIZING, **_INIT), "pending", "image", "ErrImagePull"),
        (_job(), _pod("Pending", waiting={"reason": "ImagePullBackOff"}), "pending", "image", "ImagePullBackOff"),
        (_job(), _pod("Pending", waiting={"reason": "ErrImagePull"}), "pending", "image", "ErrImagePull"),
        (_job(), _pod("Pending", waiting={"reason": "InvalidImageName"}), "failed", "image", "InvalidImageName"),
        (_job(), _pod("Pending", waiting={"reason": "NeverHeardOf"}), "pending", "start", "NeverHeardOf"),
        (_job(), _pod("Running"), "running", "", "Running"),
        (_job(annotations=_NOTED), _pod("Running"), "running", "", "Running"),
        (_job(), _pod("Failed"), "running", "", "Failed"),
        (_job(), _pod("Dreaming"), "unknown", "", "Dreaming"),
        (_job(_COMPLETE), None, "succeeded", "exit", "Complete"),
        (_job(_COMPLETE, annotations=_NOTED), None, "succeeded", "exit", "Complete"),
        (_job(_FAILED), _pod("Failed", terminated={"exitCode": 1}), "failed", "exit", "BackoffLimitExceeded"),
        (_job(_FAILED), _pod("Failed", terminated={"exitCode": 75}), "preempted", "exit", "BackoffLimitExceeded"),
        (_job(_FAILED), _pod("Failed", terminated={"exitCode": 76}), "failed", "superseded", "BackoffLimitExceeded"),
        (_job(_FAILED), _pod("Failed", terminated={"exitCode": 78}), "failed", "permanent", "BackoffLimitExceeded"),
        (_job(_FAILED), _pod("Failed", terminated=_OOM), "failed", "oom", "OOMKilled"),
        (_job(_FAILED), _pod("Failed", reason="OutOfcpu"), "failed", "no_capacity", "OutOfcpu"),
        (_job(_FAILED), _pod("Failed", reason="DeadlineExceeded"), "timed_out", "deadline", "DeadlineExceeded"),
        (_job(_FAILED), _pod("Failed", conditions=[_DISRUPTED]), "preempted", "lost", "DisruptionTarget"),
        (_job(_FAILED), _pod("Failed", reason="Evicted"), "preempted", "lost", "DisruptionTarget"),  # an old server
        (_job(_FAILED), _pod("Failed", reason="Evicted", message=_NODE_FULL), "preempted", "lost", "DisruptionTarget"),
        (_job(_FAILED), _EVICTED, "failed", "disk", "Evicted"),
        (_job(("Failed", "PodFailurePolicy")), _EVICTED, "failed", "disk", "Evicted"),
        (_job(_FAILED), None, "preempted", "lost", "BackoffLimitExceeded"),
        (_job(_FAILED, annotations=_NOTED), _pod("Failed"), "cancelled", "user", "BackoffLimitExceeded"),
        (_job(("Failed", "DeadlineExceeded")), None, "timed_out", "deadline", "DeadlineExceeded"),
        (_job(("Failed", "PodFailurePolicy")), None, "preempted", "lost", "DisruptionTarget"),
    ],
)  # fmt: skip
def test_what_job_and_pod_say_becomes_a_state(job: Any, pod: Any, state: str, reason: str, native: str):
    status = status_of(job, pod)
    assert (status.state, status.reason, status.native_state) == (state, reason, native)


def test_a_signal_is_a_negative_exit_code():
    assert status_of(_job(_FAILED), _pod("Failed", terminated={"exitCode": 139})).exit_code == -11


@pytest.mark.parametrize(
    ("image", "state", "word"), [("missing/image:1", "pending", "pulling"), ("NOT an image", "failed", "apply default")]
)
def test_an_image_that_cannot_be_had_is_named(rig: KubernetesRig, image: str, state: str, word: str):
    executor = rig.executor(image=image)
    handle = executor.launch(request_of(_STAY))
    wait_until(lambda: executor.poll(handle).reason == "image", "the image is complained about")
    assert executor.poll(handle).state == state and word in executor.poll(handle).message


def test_why_no_node_takes_it_is_told(rig: KubernetesRig, cluster: LoopbackKubernetes):
    cluster.holding = True
    executor = rig.executor()
    handle = executor.launch(request_of(_STAY))
    wait_until(lambda: "Insufficient nvidia.com/gpu" in executor.poll(handle).message, "the reason is told")


def test_a_pod_that_its_node_cannot_start_has_a_machine_and_says_why(rig: KubernetesRig, cluster: LoopbackKubernetes):
    cluster.unmounted = 'MountVolume.SetUp failed for volume "corpus" : claim is being used by another node'
    executor = rig.executor()
    handle = executor.launch(request_of(_STAY))
    wait_until(lambda: "FailedMount: MountVolume.SetUp failed" in executor.poll(handle).message, "the reason is told")
    status = executor.poll(handle)
    assert (status.state, status.has_machine) == (ReplicaState.PENDING, True)
    cluster.may_list_events = False  # a launcher with the rights of before
    assert executor.poll(handle).message == "its container starts on node-0"
    cluster.unmounted = ""
    wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it runs")


def test_a_warning_that_is_repeated_is_the_same_and_one_about_scheduling_is_over():
    def event(reason: str, message: str, at: str) -> dict[str, Any]:
        return {"reason": reason, "message": message, "lastTimestamp": at, "involvedObject": {"uid": "pod"}}

    def told(sandbox: str) -> dict[str, str]:
        words = f'Failed to create pod sandbox: plugin type="aws-cni" failed for sandbox "{sandbox * 64}"'
        late = event("FailedScheduling", "0/3 nodes are available", "2026-11-28T10:02:00Z")
        return warnings([late, event("FailedCreatePodSandBox", words, "2026-11-28T10:01:00Z")])

    assert told("a") == told("b") and told("a")["pod"].startswith(
        "FailedCreatePodSandBox: Failed to create pod sandbox"
    )


def test_a_container_that_the_cluster_adds_is_not_taken_for_the_replica(
    rig: KubernetesRig, cluster: LoopbackKubernetes
):
    cluster.sidecar = "a-mesh"
    executor = rig.executor(image="python@sha256:" + "0" * 64)
    handle = executor.launch(request_of(_STAY))
    wait_until(lambda: list(executor.logs(handle)) == ["here"], "its output is read")
    assert executor.poll(handle).image == "docker.io/library/python@sha256:" + "0" * 64


_NO_ROOM = 'pods "dl-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 8, limited: 8'
_RESTRICTED = 'pods "dl-x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
_NO_ACCOUNT = 'pods "dl-x" is forbidden: error looking up service account diloco/trainer: "trainer" not found'


@pytest.mark.parametrize(
    ("words", "reason"), [(_NO_ROOM, "no_capacity"), (_RESTRICTED, "refused"), (_NO_ACCOUNT, "refused")]
)
def test_what_refuses_a_pod_is_told_and_passes(
    rig: KubernetesRig, cluster: LoopbackKubernetes, words: str, reason: str
):
    executor = rig.executor()
    cluster.refused_pods = words
    handle = executor.launch(request_of(_STAY))
    other = executor.launch(request_of(_STAY, replica_id=1))
    both = [handle, other]
    wait_until(lambda: {each.native_state for each in executor.poll_many(both)} == {"FailedCreate"}, "both are refused")
    for status in executor.poll_many(both):
        assert (status.state, status.reason) == (ReplicaState.PENDING, reason) and words in status.message
    cluster.may_list_events = False  # a launcher with the rights of before
    assert executor.poll(handle).message == "has no pod yet"
    cluster.refused_pods = ""
    wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it runs")


def test_a_job_beyond_the_quota_has_no_capacity(rig: KubernetesRig, cluster: LoopbackKubernetes):
    words = f'jobs.batch "{NAME}" is forbidden: exceeded quota: jobs, requested: count/jobs.batch=1, limited: 4'
    cluster.refused["jobs", NAME] = (403, "Forbidden", words)
    with pytest.raises(NoCapacity, match="limited: 4"):
        rig.executor().launch(request_of(_STAY))


# -- secrets, queues, endings ----------------------------------------------------------------------------------------


def test_a_secret_goes_with_its_job(rig: KubernetesRig, cluster: LoopbackKubernetes):
    handle = rig.executor().launch(request_of(_STAY, secrets={"KEY": "value"}))
    (secret,) = cluster.objects("secrets")
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", NAME, handle.native["uid"])


def test_a_launch_that_died_before_the_secret_is_completed_by_the_next(rig: KubernetesRig, cluster: LoopbackKubernetes):
    request = request_of("import os; print(os.environ['KEY'])", secrets={"KEY": "value"})
    executor = rig.executor()
    cluster.create("default", "jobs", dict(executor.plan(request)["job"]), False)  # as far as it came
    (waiting,) = executor.find("contract-run")
    wait_until(lambda: executor.poll(waiting).native_state == "CreateContainerConfigError", "it waits for its Secret")
    assert executor.poll(waiting).state is ReplicaState.PENDING
    assert executor.launch(request).native_id == waiting.native_id
    assert ended_state(executor, waiting) is ReplicaState.SUCCEEDED
    assert list(executor.logs(waiting)) == ["value"]


@pytest.mark.parametrize(
    ("status", "word", "kind"), [(403, "secrets is forbidden", ExecutorDenied), (500, "leader changed", ExecutorError)]
)
def test_a_launch_whose_secret_cannot_be_made_leaves_no_job(
    rig: KubernetesRig, cluster: LoopbackKubernetes, status: int, word: str, kind: type[ExecutorError]
):
    """Its pod would hold a node and wait for ever."""
    cluster.refused["secrets", NAME] = (status, "Forbidden", word)
    with pytest.raises(kind, match=word):
        rig.executor().launch(request_of(_STAY, secrets={"KEY": "value"}))
    assert cluster.objects("jobs") == []


def test_a_queued_job_waits_until_the_queue_lets_it_go(rig: KubernetesRig, cluster: LoopbackKubernetes):
    executor = rig.executor(queue="gpus")
    handle = executor.launch(request_of("print('let go')"))
    assert (executor.poll(handle).state, executor.poll(handle).native_state) == (ReplicaState.PENDING, "Suspended")
    cluster.unsuspend(NAME)
    assert ended_state(executor, handle) is ReplicaState.SUCCEEDED


def test_a_server_too_old_to_hold_a_job_for_a_queue_is_denied(rig: KubernetesRig, cluster: LoopbackKubernetes):
    """As Kubernetes 1.20 does; Kueue would never be asked."""
    cluster.drops = {"suspend", "podFailurePolicy", "podReplacementPolicy"}
    with pytest.raises(ExecutorDenied, match=r"queue 'gpus'.* 1\.22"):
        rig.executor(queue="gpus").launch(request_of(_STAY))
    assert cluster.objects("jobs") == []
    assert rig.executor().launch(request_of(_STAY)).native["job"] == NAME


def test_a_job_cancelled_in_its_queue_is_cancelled_for_everybody(rig: KubernetesRig, cluster: LoopbackKubernetes):
    handle = rig.executor(queue="gpus").launch(request_of(_STAY))
    rig.executor().cancel(handle)
    assert rig.executor().poll(handle).state is ReplicaState.CANCELLED
    assert cluster.machines("contract-run") == 0


def test_a_job_that_its_queue_suspended_again_leaves_the_queue_to_the_next_attempt(
    rig: KubernetesRig, cluster: LoopbackKubernetes
):
    """As Kueue preempts: its pod is told to end. Were the Job let in again, its pod would only find itself replaced."""
    executor = rig.executor(queue="gpus")
    first, other = executor.launch(request_of(_STAY)), executor.launch(request_of(_STAY, replica_id=1))
    cluster.unsuspend(first.native["job"])
    wait_until(lambda: "here" in list(executor.logs(first)), "it has started")
    cluster.unsuspend(first.native["job"], back=True)
    second = executor.launch(request_of(_STAY, attempt=2))
    left = [each.native["job"] for each in executor.find("contract-run")]
    assert left == [second.native["job"], other.native["job"]]
    cluster.unsuspend(second.native["job"])
    wait_until(lambda: executor.poll(second).state is ReplicaState.RUNNING, "the second runs")
    executor.launch(request_of(_STAY, attempt=3))
    assert len(executor.find("contract-run")) == 3  # one that runs is not ended by a launch


def test_a_job_cancelled_before_a_node_was_found_ends(rig: KubernetesRig, cluster: LoopbackKubernetes):
    cluster.holding = True
    handle = rig.executor().launch(request_of(_STAY))
    rig.executor().cancel(handle)
    assert ended_state(rig.executor(), handle) is ReplicaState.CANCELLED


def test_a_cancelled_replica_may_finish_its_last_words_and_every_process_sees_it_cancelled(rig: KubernetesRig):
    executor = rig.executor()
    handle = executor.launch(request_of(_STAY))
    wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
    executor.cancel(handle)
    assert ended_state(rig.executor(), handle) is ReplicaState.CANCELLED
    assert list(rig.executor().logs(handle)) == ["here", "published"]


def test_another_job_of_the_same_name_is_not_ours(rig: KubernetesRig):
    executor = rig.executor()
    first = executor.launch(request_of(_STAY))
    rig.forget(first)
    second = executor.launch(request_of(_STAY))
    assert executor.poll(first).reason == "lost"
    executor.cancel(first)
    wait_until(lambda: executor.poll(second).state is ReplicaState.RUNNING, "the second is untouched")


def test_a_fleet_is_polled_with_one_listing_while_all_run_and_with_those_that_it_needs_else(
    rig: KubernetesRig, cluster: LoopbackKubernetes
):
    executor = rig.executor()
    handles = [executor.launch(request_of(_STAY, replica_id=replica_id)) for replica_id in range(2)]

    def listed(state: ReplicaState) -> list[str]:
        cluster.requests.clear()
        assert [status.state for status in executor.poll_many(handles)][-1] is state
        return [path.partition("?")[0].rpartition("/")[2] for _, path, _ in cluster.requests]

    wait_until(lambda: {each.state for each in executor.poll_many(handles)} == {ReplicaState.RUNNING}, "both run")
    assert listed(ReplicaState.RUNNING) == ["pods"]
    cluster.holding = True
    handles.append(executor.launch(request_of(_STAY, replica_id=2)))
    wait_until(lambda: executor.poll(handles[2]).native_state == "Unschedulable", "it has a pod")
    assert listed(ReplicaState.PENDING) == ["pods", "jobs"]
    executor.cancel(handles[2])
    ended_state(executor, handles[2])
    assert listed(ReplicaState.CANCELLED) == ["pods", "jobs", "pods"]  # the end of a Job and that of its pod


def test_attempts_that_have_ended_are_not_listed_again(rig: KubernetesRig, cluster: LoopbackKubernetes):
    executor = rig.executor()
    for number in (1, 2):
        ended_state(executor, executor.launch(request_of("pass", attempt=number)))
    handles = [executor.launch(request_of(_STAY, replica_id=i, attempt=3 + i)) for i in range(2)]
    wait_until(lambda: {each.state for each in executor.poll_many(handles)} == {ReplicaState.RUNNING}, "both run")
    asked = parse_qs(urlparse(cluster.requests[-1][1]).query)["labelSelector"]
    _, listed = cluster.list_all("default", "pods", *asked)
    assert {each["metadata"]["labels"]["diloco-attempt"] for each in listed["items"]} == {"3", "4"}


def test_a_large_fleet_is_chosen_by_what_fits_into_a_url():
    handles = [ReplicaHandle("kubernetes", "run", replica_id, 1, "x") for replica_id in range(2000)]
    assert selector(*handles) == "diloco-run=run,diloco-attempt=1"
    assert selector(*handles[:2]) == "diloco-run=run,diloco-replica in (0,1),diloco-attempt=1"


@pytest.mark.parametrize(
    ("phase", "deleted_at", "told"),
    [("Running", None, True), ("Running", "2026-01-01T00:00:00Z", False), ("Pending", None, False)],
)
def test_a_pod_that_is_being_deleted_or_waits_does_not_count_as_running(phase: str, deleted_at: Any, told: bool):
    """Such as that of a Job past its deadline: then the Job is looked at."""
    metadata = {} if deleted_at is None else {"deletionTimestamp": deleted_at}
    assert runs({"metadata": metadata, "status": {"phase": phase}}) is told
    assert not runs(None)


def test_of_two_pods_of_one_second_the_one_that_is_being_deleted_is_the_older():
    """Servers before 1.26 replace a drained pod before it has ended."""
    about = {"creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [{"uid": "job"}]}
    drained, replacement = {"metadata": {**about, "deletionTimestamp": "2026-01-01T00:00:09Z"}}, {"metadata": about}
    for pods in ([drained, replacement], [replacement, drained]):
        assert telling_pods(pods, {}) == {"job": replacement}


def test_following_a_log_survives_a_broken_connection(rig: KubernetesRig, cluster: LoopbackKubernetes):
    cluster.breaks_logs = True
    executor = rig.executor()
    handle = executor.launch(request_of("for i in range(3000): print('line', i)"))
    ended_state(executor, handle)
    assert list(executor.logs(handle, follow=True)) == [f"line {i}" for i in range(3000)]
    assert not cluster.breaks_logs


def test_an_invalid_request_is_denied_in_the_servers_words(rig: KubernetesRig, cluster: LoopbackKubernetes):
    cluster.refused["jobs", NAME] = (422, "Invalid", "spec.template.spec: unheard-of")
    with pytest.raises(ExecutorDenied, match="unheard-of"):
        rig.executor().launch(request_of(_STAY))


def test_an_api_that_is_away_is_no_failure_of_a_replica(rig: KubernetesRig, cluster: LoopbackKubernetes):
    executor = rig.executor()
    handle = executor.launch(request_of(_STAY))
    cluster.close()
    away = rig.executor()
    assert away.poll(handle).state is ReplicaState.UNKNOWN
    for call in (away.cancel, lambda each: list(away.logs(each))):
        with pytest.raises(ExecutorError, match="did not answer"):
            call(handle)


def test_a_cluster_that_is_not_configured_is_said_plainly(tmp_path: Path):
    with pytest.raises(ExecutorDenied, match="no Kubernetes cluster is configured"):
        KubernetesExecutor(kubeconfig=str(tmp_path / "none")).find("run")


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(MissingSdk, match=r"diloco-orchestrator\[eks\]"):
        KubernetesExecutor(image="x").launch(request_of(""))


def test_a_handle_says_where_its_job_is(rig: KubernetesRig):
    handle = rig.executor().launch(request_of(""))
    assert handle.native_id == f"default/{NAME}"
    assert {**handle.native, "uid": ""} == {
        "cluster": None,
        "region": None,
        "context": None,
        "namespace": "default",
        "job": NAME,
        "uid": "",
    }
    assert json.loads(json.dumps(handle.to_json())) == handle.to_json()
