"""Kubernetes objects of an attempt as plain data: its Job and Secret, and the status from a Job and its pod.

`kubernetes_api` makes the calls.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_orchestrator.executors.answers import odd_reply
from diloco_orchestrator.executors.clock import new_secret
from diloco_orchestrator.executors.contract import (
    BY_EXIT_CODE,
    Identity,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    check_ranks_per_machine,
)
from diloco_orchestrator.executors.kubernetes_template import CONTAINER, container_of, env_names, gpu_affinity, merged
from diloco_orchestrator.executors.process_contract import (
    ENV_MACHINE,
    ENV_MACHINES,
    ENV_MEETING,
    ENV_MEETING_KEY,
    EXIT_DONE,
)
from diloco_orchestrator.executors.remote_base import (
    LABEL_ATTEMPT,
    LABEL_REPLICA,
    LABEL_RUN,
    attempt_labels,
    attempt_name,
    run_label,
)

FAILED_CREATE = "FailedCreate"  # reason of a Job's event: the API server refused its pod
_FAILED_SCHEDULING = "FailedScheduling"  # reason of a pod's event, which its condition says too, as long as it holds
QUOTA = "exceeded quota"  # in the words of a refusal for which a ResourceQuota has no room
CANCELLED = "diloco-cancelled"  # annotation of a Job that was cancelled, for every process to see
GPU = "nvidia.com/gpu"
OF_SEVERAL = (
    "diloco-pods"  # label of pods that train one replica together; infra/eks/network-policy.yaml lets them talk
)
_INDEX = "batch.kubernetes.io/job-completion-index"  # annotation of the pods of an Indexed Job
_MOST_NUMBERS = 200  # in a selector: some 1.5 KB of a URL, of which proxies take 8
_PORT = 29500  # of machine 0 of a replica on several pods, each of which has a network of its own
_KEPT_S = 7 * 24 * 3600  # seconds that a Job, its log and its Secret stay after the end
_GRACE_S = 110  # seconds from SIGTERM to SIGKILL; a spot notice comes two minutes ahead
_SHARED_MEMORY = "/dev/shm"
_KUEUE = "kueue.x-k8s.io/"  # begins the labels that Kueue reads
_POD_DEFAULTS: Mapping[str, Any] = {  # what a template may set otherwise
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,  # else every service of the namespace appears in the environment
    # With the container's own, what the Pod Security Standard "restricted" asks for. The user is that of infra/image.
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,  # so that this user can write to volumes
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
_SCRATCH = "/tmp"  # the one folder that a replica can write to; its home too
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")


@dataclass(frozen=True)
class PodOptions:
    """The user's settings for each replica's pod. Raises ValueError for a size that Kubernetes cannot parse."""

    image: str
    gpu: int = 0
    cpu: int | float | str | None = None
    memory: int | str | None = None
    service_account: str | None = None
    spot: bool = False
    queue: str | None = None  # Kueue's local queue, which starts the Job
    gpu_types: Sequence[str] = ()
    instance_type: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # as `kubernetes_template.read_template` returns it
    ranks_per_machine: int | None = None  # of a pod, at the most

    def __post_init__(self) -> None:
        if isinstance(self.gpu, bool) or not isinstance(self.gpu, int) or self.gpu < 0:
            raise ValueError(f"gpu={self.gpu!r} is no number of GPUs: write 1, for one for each rank, or 0.")
        check_ranks_per_machine(self.ranks_per_machine)
        for key, size in self._sizes().items():
            if not _QUANTITY.fullmatch(size):
                raise ValueError(f"{key}={size!r} is no size that Kubernetes reads. Write it like 4, '500m' or '16Gi'.")

    def _sizes(self) -> dict[str, str]:
        given = {"cpu": self.cpu, "memory": self.memory}
        return {key: str(size) for key, size in given.items() if size is not None}

    def resources(self, request: LaunchRequest) -> dict[str, dict[str, str]]:
        """Requests and limits of the container. CPU has no limit, so that a replica may use idle cores.

        Raises ValueError for another number of GPUs than ranks in the pod.
        """
        machines = request.machines(self.ranks_per_machine)
        sizes, gpus = self._sizes(), request.gpus(self.gpu, f"gpu={self.gpu}", machines)
        limits = {key: sizes[key] for key in ("memory",) if key in sizes} | ({GPU: str(gpus)} if gpus else {})
        return {**({"requests": sizes} if sizes else {}), **({"limits": limits} if limits else {})}


# -- the request ------------------------------------------------------------------------------------------------------


def job_body(request: LaunchRequest, options: PodOptions) -> dict[str, Any]:
    """The body that creates an attempt's Job. Raises ValueError for a pod template that sets the same fields.

    The Job of a replica on several machines is Indexed: it has that many pods, whose names in DNS its Service gives.
    """
    pods = request.machines(options.ranks_per_machine)
    labels = {**attempt_labels(request), **({OF_SEVERAL: str(pods)} if pods > 1 else {})}
    template = merged(options.template, {"metadata": {"labels": labels}, "spec": _pod(request, options, pods)})
    spec: dict[str, Any] = {
        **({"completionMode": "Indexed"} if pods > 1 else {}),
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,  # a retry is another attempt, which the coordinator decides
        "podReplacementPolicy": "Failed",
        # Gives the Job the reason "PodFailurePolicy" after a disruption, even if the pod is gone. A rule for exit codes
        # would give it the same reason, and with backoffLimit 0 change nothing else.
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": {**template, "spec": _completed(template["spec"], request)},
    }
    given = ((options.template.get("metadata") or {}).get("labels") or {}).items()
    for_kueue = {label: value for label, value in given if label.startswith(_KUEUE)}  # which reads the Job's
    job_labels = {**for_kueue, **labels}
    if options.queue is not None:
        spec["suspend"] = True  # Kueue starts it
        job_labels[f"{_KUEUE}queue-name"] = options.queue
    metadata = {"name": attempt_name(request), "labels": job_labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _pod(request: LaunchRequest, options: PodOptions, pods: int) -> dict[str, Any]:
    """The spec of each of an attempt's `pods`, without the user's template."""
    theirs = container_of(options.template)
    container = _container(request, options, pods)
    # Kubernetes gives 64 MiB of shared memory, which worker processes of a DataLoader, and NCCL between ranks, fill at
    # once. It counts as the pod's memory.
    folders = {_SHARED_MEMORY: ("shared-memory", {"medium": "Memory"}), _SCRATCH: ("scratch", {})}
    mounted = {each.get("mountPath") for each in theirs.get("volumeMounts") or []}
    made = {path: volume for path, volume in folders.items() if path not in mounted}
    container["volumeMounts"] = [{"name": name, "mountPath": path} for path, (name, _) in made.items()]
    if "HOME" not in request.env and "HOME" not in env_names(theirs):
        container["env"].append({"name": "HOME", "value": _SCRATCH})
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [{"name": name, "emptyDir": kind} for name, kind in made.values()],
    }
    if request.timeout_s is not None:
        # The pod's, not the Job's: waiting for a node does not count, and the log survives.
        pod["activeDeadlineSeconds"] = max(1, math.ceil(request.timeout_s))
    if options.gpu:
        pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    if options.instance_type is not None:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": options.instance_type}
    if affinity := merged(gpu_affinity(options.gpu_types), _spot_nodes() if options.spot else {}, "gpu_types"):
        pod["affinity"] = affinity
    if pods > 1:
        pod["subdomain"] = attempt_name(request)
    return pod


def _container(request: LaunchRequest, options: PodOptions, pods: int) -> dict[str, Any]:
    """The container of each of an attempt's `pods`: image, command, environment and resources."""
    name = attempt_name(request)
    env: list[dict[str, Any]] = [{"name": key, "value": _literal(value)} for key, value in request.env.items()]
    if pods > 1:
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
        env += [
            {"name": ENV_MACHINES, "value": str(pods)},
            {"name": ENV_MACHINE, "valueFrom": index},
            {"name": ENV_MEETING, "value": f"{name}-0.{name}:{_PORT}"},
        ]
    resources = options.resources(request)
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": [_literal(word) for word in request.command],
        "env": env,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **({"envFrom": [{"secretRef": {"name": name}}]} if request.secrets else {}),
        **({"resources": resources} if resources else {}),
    }


def _completed(spec: Mapping[str, Any], request: LaunchRequest) -> dict[str, Any]:
    """A pod's spec with `_POD_DEFAULTS` where the user's template sets nothing else, and with pinned images."""
    found = dict(spec)
    for part, value in _POD_DEFAULTS.items():
        given = spec.get(part)
        found[part] = {**value, **(given or {})} if isinstance(value, dict) else value if given is None else given
    for kind in ("initContainers", "containers"):
        if containers := spec.get(kind):  # as new objects, since the template is the user's
            found[kind] = [_pinned(each, request) for each in containers]
    # What a template may set otherwise, for an image that writes beside its volumes.
    found["containers"][0]["securityContext"].setdefault("readOnlyRootFilesystem", True)
    return found


def _pinned(container: Mapping[str, Any], request: LaunchRequest) -> dict[str, Any]:
    image = container.get("image")
    return {**container, **({"image": request.pinned(image)} if image else {})}


def identity_of(options: PodOptions) -> Identity:
    """The means by which a pod gets credentials for the bucket, as far as its template and service account show."""
    advice = "service_account=… of one with a role for the bucket (IRSA, Pod Identity; else the nodes' role)"
    account = options.service_account or (options.template.get("spec") or {}).get("serviceAccountName")
    container = container_of(options.template)
    source = f"service account {account!r}" if account else ""
    if container.get("envFrom"):
        source = "envFrom of the pod template"
    return Identity(frozenset(env_names(container)), source, advice=advice)


def secret_body(request: LaunchRequest, values: Mapping[str, str], job_uid: str) -> dict[str, Any]:
    """The Secret of an attempt, as the body of a create call. Its Job owns it, so that both are deleted together.

    `values`: the secret variables. `job_uid`: of the Job.
    """
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


def service_body(request: LaunchRequest, job_uid: str) -> dict[str, Any]:
    """The headless Service of an attempt on several pods, by which DNS knows them, as the body of a create call.

    Pods are named in DNS before they are ready, since machine 0 is not ready without the others.
    """
    secret = secret_body(request, {}, job_uid)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": secret["metadata"],
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": attempt_labels(request),
            "ports": [{"name": "meeting", "port": _PORT}],
        },
    }


def with_meeting_key(request: LaunchRequest, options: PodOptions) -> LaunchRequest:
    """The request with a new secret by which the pods of a replica know each other, if it has several."""
    if request.machines(options.ranks_per_machine) == 1:
        return request
    return replace(request, secrets={**request.secrets, ENV_MEETING_KEY: new_secret()})


def _literal(text: str) -> str:
    """`text` escaped, because Kubernetes replaces $(NAME) and $$ in commands and values."""
    return text.replace("$", "$$")


def _spot_nodes() -> dict[str, Any]:
    """Node affinity to spot nodes, of Karpenter (EKS Auto Mode too) or of an EKS node group."""
    marks = [("karpenter.sh/capacity-type", "spot"), ("eks.amazonaws.com/capacityType", "SPOT")]
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]} for key, value in marks]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def selector(*handles: ReplicaHandle) -> str:
    """The label selector for Jobs and pods of attempts of one run, of which it excludes most others.

    All Jobs of a run stay for a week, each with the text of its replica's program: megabytes after some preemptions.
    """
    replicas, attempts = ({handle.replica_id for handle in handles}, {handle.attempt for handle in handles})
    return f"{LABEL_RUN}={run_label(handles[0].run_id)}{_of(LABEL_REPLICA, replicas)}{_of(LABEL_ATTEMPT, attempts)}"


def _of(label: str, numbers: set[int]) -> str:
    """The part of a selector for objects with one of these numbers; empty, for any, where a URL would be too long."""
    several = ",".join(map(str, sorted(numbers)))
    return (
        ""
        if len(numbers) > _MOST_NUMBERS
        else f",{label}={several}"
        if len(numbers) == 1
        else f",{label} in ({several})"
    )


# -- the reply --------------------------------------------------------------------------------------------------------


def object_of(reply: Any, kind: str, what: str) -> dict[str, Any]:
    """An object, or a list of objects, in a reply of the API server. Raises `Unavailable` for a reply of another form.

    `kind`: such as "Job" or "JobList"; "Status" for the reply to a deletion, which may be the object itself. `what`:
    the action, for errors.
    """
    fits = isinstance(reply, dict) and (reply.get("kind") == kind or (kind == "Status" and reply.get("kind") in _PARTS))
    if fits and kind.endswith("List"):
        items = reply.get("items") or []
        fits = isinstance(items, list) and all(_is_object(each, kind.removesuffix("List")) for each in items)
    elif fits and kind != "Status":
        fits = _is_object(reply, kind)
    if not fits:
        raise odd_reply(what, f"a {kind}", reply)
    return dict(reply)


# What is read of each kind; the metadata's name, namespace and uid of all but events.
_PARTS = {"Job": ("spec",), "Pod": (), "Secret": (), "Service": (), "Event": ("involvedObject",)}


def _is_object(item: Any, kind: str) -> bool:
    if not (isinstance(item, dict) and isinstance(item.get("metadata"), dict)):
        return False
    named = kind == "Event" or all(isinstance(item["metadata"].get(key), str) for key in ("name", "namespace", "uid"))
    status = item.get("status", {})
    return named and isinstance(status, dict) and all(isinstance(item.get(part), dict) for part in _PARTS[kind])


# State of an attempt by its pod's phase while the Job has not ended; the Job ends a moment after its pod.
_BY_PHASE = {
    "Pending": ReplicaState.PENDING,
    "Running": ReplicaState.RUNNING,
    "Succeeded": ReplicaState.RUNNING,
    "Failed": ReplicaState.RUNNING,
}
# State of an attempt by the reason why its container waits. Kubernetes retries all but an invalid name.
_BY_WAITING = {
    "ErrImagePull": (ReplicaState.PENDING, "image"),
    "ImagePullBackOff": (ReplicaState.PENDING, "image"),
    "InvalidImageName": (ReplicaState.FAILED, "image"),
}


# Reasons why a container waits that pass by themselves: None: its node has not reported it yet.
_BEGINS = (None, "ContainerCreating", "PodInitializing")

# The form of an image that was pulled. One that was loaded on its node has an id without a name.
_IMAGE_ID = re.compile(r"[A-Za-z0-9._:/@-]{1,400}@sha256:[0-9a-f]{64}")

# Reasons of a pod that its node or scheduler ended, on servers before 1.26, which drop podFailurePolicy and know no
# condition DisruptionTarget.
_DISRUPTED = ("Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated")
# The id of a sandbox or container in an event: another at each try, so that the same failure would read as a new one.
_NEW_ID = re.compile(r"\b[0-9a-f]{32,}\b")
# In the words of a kubelet that evicts a pod for its own use of a disk (eviction/helpers.go): the next attempt would
# use as much. Other evictions are for want of a node's memory or disk.
_OWN_USE = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")


def status_of(job: Mapping[str, Any], pod: Mapping[str, Any] | None, said: str = "") -> ReplicaStatus:
    """The status of an attempt, from its Job and its newest pod (None if it has none).

    `said`: the words from `warnings` about the pod, or about the Job of a pod that the API server refused, or "".
    """
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
        if not said:
            return ReplicaStatus(ReplicaState.PENDING, "", None, "", "has no pod yet")
        reason = "no_capacity" if QUOTA in said else "refused"
        return ReplicaStatus(ReplicaState.PENDING, reason, None, FAILED_CREATE, f"its pod is refused: {said}")
    phase = str(pod.get("status", {}).get("phase", ""))
    state = _BY_PHASE.get(phase, ReplicaState.UNKNOWN)
    if state is ReplicaState.PENDING:
        return _waiting_status(pod, said)
    return ReplicaStatus(state, native_state=phase, image=image_of(pod))


def warnings(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The last warning about each Job and pod, by its uid: why its pod was refused, or its container does not start.

    Controllers and nodes keep trying: a quota may be freed, a missing service account, claim or Secret created.
    """
    in_order = sorted(events, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""))
    found: dict[str, str] = {}
    for each in in_order:
        reason, words = str(each.get("reason") or ""), " ".join(str(each.get("message") or "").split())
        words = _NEW_ID.sub("…", words)
        if reason != _FAILED_SCHEDULING:
            found[str(each["involvedObject"].get("uid"))] = words if reason == FAILED_CREATE else f"{reason}: {words}"
    return found


def waits_for_pod(job: Mapping[str, Any], pod: Mapping[str, Any] | None) -> bool:
    """Whether a Job has no pod (`pod` is None) although it has not ended and no queue suspends it.

    The API server may have refused to create the pod.
    """
    return pod is None and not job["spec"].get("suspend") and condition(job, "Complete", "Failed") is None


def runs(pod: Mapping[str, Any] | None) -> bool:
    if pod is None or pod["metadata"].get("deletionTimestamp"):
        return False
    return bool((pod.get("status") or {}).get("phase") == "Running")


def starts_on_node(pod: Mapping[str, Any] | None) -> bool:
    """Whether a pod has a node, on which its containers do not run yet."""
    return pod is not None and pod.get("status", {}).get("phase") == "Pending" and bool(condition(pod, "PodScheduled"))


def _waiting_status(pod: Mapping[str, Any], said: str) -> ReplicaStatus:
    before = pod.get("status", {}).get("initContainerStatuses") or []
    waits = [(each.get("state") or {}).get("waiting") or {} for each in before] + [container_state(pod, "waiting")]
    waiting = next((each for each in waits if each.get("reason") not in _BEGINS), waits[-1])
    if waiting.get("reason") not in _BEGINS:
        state, reason = _BY_WAITING.get(waiting["reason"], (ReplicaState.PENDING, "start"))
        return ReplicaStatus(state, reason, None, waiting["reason"], waiting.get("message") or waiting["reason"])
    unscheduled = condition(pod, "PodScheduled", status="False")
    if unscheduled is not None:
        words = unscheduled.get("message") or "no node takes it"
        return ReplicaStatus(ReplicaState.PENDING, "", None, unscheduled.get("reason") or "Pending", words)
    # From here on the pod holds its node, which costs money though its volumes, network or image may never come.
    reason, node = "start" if starts_on_node(pod) else "", (pod.get("spec") or {}).get("nodeName")
    words = (said if reason else "") or f"its container starts{f' on {node}' if node else ''}"
    return ReplicaStatus(ReplicaState.PENDING, reason, None, waiting.get("reason") or "Pending", words)


def _failed_status(end: Mapping[str, Any], pod: Mapping[str, Any] | None) -> ReplicaStatus:
    """The status of a failed Job: by the Job's reason for deadlines and disruptions, else by the pod's."""
    why = str(end.get("reason", ""))
    about = (pod or {}).get("status", {})
    ended = container_state(pod or {}, "terminated")
    code = _signal_or_code(ended.get("exitCode"))
    pod_why = str(about.get("reason") or "")
    words = about.get("message") or end.get("message") or why
    if why == "DeadlineExceeded" or pod_why == "DeadlineExceeded":
        return ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", code, "DeadlineExceeded", words)
    if pod_why == "Evicted" and _OWN_USE.search(words):
        return ReplicaStatus(ReplicaState.FAILED, "disk", code, "Evicted", words)
    if why == "PodFailurePolicy" or (pod is not None and condition(pod, "DisruptionTarget")) or pod_why in _DISRUPTED:
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", code, "DisruptionTarget", words)
    if pod is None:
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", None, why, "its pod was deleted; nobody here cancelled it")
    if pod_why.startswith("OutOf"):  # OutOfcpu, OutOfnvidia.com/gpu: another pod took this node's last
        return ReplicaStatus(ReplicaState.FAILED, "no_capacity", code, pod_why, words)
    if ended.get("reason") == "OOMKilled":
        return ReplicaStatus(ReplicaState.FAILED, "oom", code, "OOMKilled", "it took more memory than it may")
    if code is None:
        return ReplicaStatus(ReplicaState.FAILED, "exit", None, pod_why or why, words)
    state, reason = BY_EXIT_CODE.get(code, (ReplicaState.FAILED, "exit"))
    state = ReplicaState.FAILED if code == EXIT_DONE else state
    return ReplicaStatus(state, reason, code, pod_why or why, f"exit code {code}")


def condition(item: Mapping[str, Any], *types: str, status: str = "True") -> Mapping[str, Any] | None:
    """The first condition in an object's status of one of `types` and the value `status`; None without any."""
    conditions = item.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] in types and each["status"] == status), None)


def _container_status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the replica's container. A cluster may add others, as service meshes do."""
    listed = pod.get("status", {}).get("containerStatuses") or []
    return next((each for each in listed if each.get("name") == CONTAINER), {})


def container_state(pod: Mapping[str, Any], state: str) -> Mapping[str, Any]:
    """Details of the replica's container if it is in `state` ("waiting", "terminated"), else empty."""
    return (_container_status(pod).get("state") or {}).get(state) or {}


def image_of(pod: Mapping[str, Any]) -> str:
    """The image of the replica's container, with its digest, as its node reports it; empty before the node does."""
    image = _container_status(pod).get("imageID") or ""
    return image if _IMAGE_ID.fullmatch(image) else ""


def _signal_or_code(code: int | None) -> int | None:
    """The exit code, negative for a signal: container runtimes report a signal as 128 plus its number."""
    return 128 - code if code is not None and 128 < code <= 192 else code


def telling_pods(pods: Sequence[dict[str, Any]], counts: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """The pod of each Job that shows the Job's state, by the Job's uid. `pods`: in the API's form.

    It is the newest one; of a Job with several pods the first that has failed, else the first that does not run yet,
    else that of index 0. A Job that has fewer pods than `counts` says, none of which has failed, is left out: it waits
    for them. Times are whole seconds: if two pods have the same, the one being deleted is the older.
    """

    def age(pod: Mapping[str, Any]) -> tuple[str, bool]:
        about = pod["metadata"]
        return str(about.get("creationTimestamp")), not about.get("deletionTimestamp")

    def index(pod: Mapping[str, Any]) -> int:
        return int((pod["metadata"].get("annotations") or {}).get(_INDEX) or 0)

    def order(pod: Mapping[str, Any]) -> tuple[bool, bool, int]:
        phase = (pod.get("status") or {}).get("phase")
        return phase != "Failed", phase in ("Running", "Succeeded"), index(pod)

    newest: dict[str, dict[int, dict[str, Any]]] = {}
    for pod in sorted(pods, key=age):
        for owner in pod["metadata"].get("ownerReferences") or []:
            newest.setdefault(owner["uid"], {})[index(pod)] = pod
    first = {uid: min(of_job.values(), key=order) for uid, of_job in newest.items()}
    return {uid: pod for uid, pod in first.items() if len(newest[uid]) >= counts.get(uid, 1) or not order(pod)[0]}
