"""Kubernetes objects of an attempt, as plain data: the Job and its Secret, and what a Job and its pod say in return.

Pure: `executors.kubernetes_jobs` sends and fetches them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from executors.contract import BY_EXIT_CODE, EXIT_DONE, LaunchRequest, ReplicaHandle, ReplicaState, ReplicaStatus
from executors.remote_base import LABEL_ATTEMPT, LABEL_REPLICA, LABEL_RUN, attempt_labels, attempt_name, run_label

CANCELLED = "diloco-cancelled"  # annotation of a Job; tells every process what it ended of
GPU = "nvidia.com/gpu"
_KEPT_S = 7 * 24 * 3600  # a Job, its log and its Secret after the end
_GRACE_S = 110  # a spot notice comes two minutes ahead
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")


# -- the request ------------------------------------------------------------------------------------------------------


def job_body(
    request: LaunchRequest,
    *,
    image: str,
    machine: Mapping[str, Any],
    service_account: str | None = None,
    spot: bool = False,
    queue: str | None = None,
) -> dict[str, Any]:
    """The Job of an attempt."""
    name, labels = attempt_name(request), attempt_labels(request)
    container: dict[str, Any] = {
        "name": "replica",
        "image": image,
        "command": [_literal(word) for word in request.command],
        "env": [{"name": key, "value": _literal(value)} for key, value in request.env.items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if request.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}}]
    if resources := container_resources(machine):
        container["resources"] = resources
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # else every service of the namespace appears in the environment
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    if request.timeout_s is not None:
        # The pod's, not the Job's: waiting for a node does not count, and the log survives.
        pod["activeDeadlineSeconds"] = max(1, math.ceil(request.timeout_s))
    if machine["gpu"]:
        pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if service_account is not None:
        pod["serviceAccountName"] = service_account
    if spot:
        pod["affinity"] = _spot_nodes()
    spec: dict[str, Any] = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,  # who comes again is another attempt
        "podReplacementPolicy": "Failed",
        # Makes the Job's reason "PodFailurePolicy", which then means a disruption even if the pod is gone. Hence no
        # rule for exit codes: with backoffLimit 0 it would change nothing but that.
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    if queue is not None:
        spec["suspend"] = True  # Kueue lets it go
    job_labels = labels if queue is None else {**labels, "kueue.x-k8s.io/queue-name": queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": job_labels},
        "spec": spec,
    }


def secret_body(request: LaunchRequest, values: Mapping[str, str], job_uid: str) -> dict[str, Any]:
    """The Secret of an attempt; it goes when its Job goes."""
    name = attempt_name(request)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": name,
            "labels": attempt_labels(request),
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}],
        },
        "stringData": dict(values),
    }


def _literal(text: str) -> str:
    """Kubernetes replaces $(NAME) in commands and values, and $$ by $; nothing of ours is meant so."""
    return text.replace("$", "$$")


def container_resources(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError for a size that Kubernetes does not read."""
    gpu = machine["gpu"]
    if isinstance(gpu, bool) or not isinstance(gpu, int) or gpu < 0:
        raise ValueError(f"gpu={gpu!r}: say how many, 0 or more.")
    sizes = {key: str(machine[key]) for key in ("cpu", "memory") if machine[key] is not None}
    for key, size in sizes.items():
        if not _QUANTITY.fullmatch(size):
            raise ValueError(f"{key}={size!r} is no size that Kubernetes reads. Write it like 4, '500m' or '16Gi'.")
    limits = {key: sizes[key] for key in ("memory",) if key in sizes}  # of CPU, what is idle may be used
    limits.update({GPU: str(gpu)} if gpu else {})
    return {**({"requests": sizes} if sizes else {}), **({"limits": limits} if limits else {})}


def _spot_nodes() -> dict[str, Any]:
    """Spot nodes of Karpenter (EKS Auto Mode too) or of an EKS node group: either will do."""
    marks = [("karpenter.sh/capacity-type", "spot"), ("eks.amazonaws.com/capacityType", "SPOT")]
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]} for key, value in marks]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def selector(handle: ReplicaHandle) -> str:
    run = run_label(handle.run_id)
    return f"{LABEL_RUN}={run},{LABEL_REPLICA}={handle.replica_id},{LABEL_ATTEMPT}={handle.attempt}"


# -- the reply --------------------------------------------------------------------------------------------------------

# Of a pod whose Job has not ended. A pod that has: the Job says so in a moment.
_BY_PHASE = {
    "Pending": ReplicaState.PENDING,
    "Running": ReplicaState.RUNNING,
    "Succeeded": ReplicaState.RUNNING,
    "Failed": ReplicaState.RUNNING,
}
# Why a container does not start yet. Kubernetes goes on trying; only a name that is none never works.
_BY_WAITING = {
    "ErrImagePull": (ReplicaState.PENDING, "image"),
    "ImagePullBackOff": (ReplicaState.PENDING, "image"),
    "InvalidImageName": (ReplicaState.FAILED, "image"),
}


def status_of(job: Mapping[str, Any], pod: Mapping[str, Any] | None) -> ReplicaStatus:
    """What a Job and its newest pod say."""
    end = condition(job, "Complete", "Failed")
    if end is not None and end["type"] == "Complete":
        return ReplicaStatus(ReplicaState.SUCCEEDED, "exit", EXIT_DONE, "Complete")
    cancelled = CANCELLED in (job["metadata"].get("annotations") or {})
    if end is not None:
        status = _failed_status(end, pod)
        if cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", status.exit_code, status.native_state, "cancelled")
        return status
    if job["spec"].get("suspend"):
        if cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", None, "Suspended", "cancelled before it started")
        return ReplicaStatus(ReplicaState.PENDING, "", None, "Suspended", "waits in its queue")
    if pod is None:
        return ReplicaStatus(ReplicaState.PENDING, "", None, "", "has no pod yet")
    phase = str(pod.get("status", {}).get("phase", ""))
    state = _BY_PHASE.get(phase, ReplicaState.UNKNOWN)
    return _waiting_status(pod) if state is ReplicaState.PENDING else ReplicaStatus(state, native_state=phase)


def _waiting_status(pod: Mapping[str, Any]) -> ReplicaStatus:
    waiting = container_state(pod, "waiting")
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        state, reason = _BY_WAITING.get(waiting["reason"], (ReplicaState.PENDING, ""))
        return ReplicaStatus(state, reason, None, waiting["reason"], waiting.get("message") or waiting["reason"])
    unscheduled = condition(pod, "PodScheduled", status="False")
    if unscheduled is not None:
        words = unscheduled.get("message") or "no node takes it"
        return ReplicaStatus(ReplicaState.PENDING, "", None, unscheduled.get("reason") or "Pending", words)
    return ReplicaStatus(ReplicaState.PENDING, "", None, waiting.get("reason") or "Pending", "its container starts")


def _failed_status(end: Mapping[str, Any], pod: Mapping[str, Any] | None) -> ReplicaStatus:
    """Why a Job failed: it tells of deadlines and disruptions, its pod of the rest."""
    why = str(end.get("reason", ""))
    about = (pod or {}).get("status", {})
    ended = container_state(pod or {}, "terminated")
    code = _signal_or_code(ended.get("exitCode"))
    pod_why = str(about.get("reason") or "")
    words = about.get("message") or end.get("message") or why
    if why == "DeadlineExceeded" or pod_why == "DeadlineExceeded":
        return ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", code, "DeadlineExceeded", words)
    if why == "PodFailurePolicy" or (pod is not None and condition(pod, "DisruptionTarget")):
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", code, "DisruptionTarget", words)
    if pod is None:
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", None, why, "its pod was deleted; nobody here cancelled it")
    if pod_why.startswith("OutOf"):  # OutOfcpu, OutOfnvidia.com/gpu: another pod was faster on this node
        return ReplicaStatus(ReplicaState.FAILED, "no_capacity", code, pod_why, words)
    if ended.get("reason") == "OOMKilled":
        return ReplicaStatus(ReplicaState.FAILED, "oom", code, "OOMKilled", "it took more memory than it may")
    if code is None:
        return ReplicaStatus(ReplicaState.FAILED, "exit", None, pod_why or why, words)
    state, reason = BY_EXIT_CODE.get(code, (ReplicaState.FAILED, "exit"))
    state = ReplicaState.FAILED if code == EXIT_DONE else state
    return ReplicaStatus(state, reason, code, pod_why or why, f"exit code {code}")


def condition(item: Mapping[str, Any], *types: str, status: str = "True") -> Mapping[str, Any] | None:
    conditions = item.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] in types and each["status"] == status), None)


def container_state(pod: Mapping[str, Any], state: str) -> Mapping[str, Any]:
    """That state of the pod's one container, or nothing."""
    containers = pod.get("status", {}).get("containerStatuses") or [{}]
    return (containers[0].get("state") or {}).get(state) or {}


def _signal_or_code(code: int | None) -> int | None:
    """Container runtimes report a signal as 128 and its number."""
    return 128 - code if code is not None and 128 < code <= 192 else code


def newest_by_owner(pods: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pods by the uid of their Job."""
    in_order = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    return {owner["uid"]: pod for pod in in_order for owner in pod["metadata"].get("ownerReferences") or []}
