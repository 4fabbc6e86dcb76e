"""Replicas as Jobs of a Kubernetes cluster: one `batch/v1` Job per attempt, named after it.

Independent of any cloud: `eks_jobs` logs in to EKS. `kubernetes_objects` has the objects as data, `kubernetes_api` the
calls. Required rights: create, get, list, patch and delete Jobs, list and patch Pods, read their logs, create Secrets,
and Services for replicas on several pods; and to explain why a pod is refused or does not start, list Events.

A replica on several machines is one Indexed Job of as many pods. The pod of index 0 claims the attempt and ends it, and
its output is the attempt's; the others end with 0 once it has.

An attempt is ended by the deadline of its pod, at its time limit and when it is cancelled, because everything else that
stops a Job (suspending it, the Job's deadline, deleting it) deletes the pod and its log.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.executors.clock import Clock
from diloco_orchestrator.executors.constructor_options import plain_options, withheld
from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    ExecutorError,
    Identity,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
    in_order,
)
from diloco_orchestrator.executors.kubernetes_api import KubernetesApi, login_by_kubeconfig
from diloco_orchestrator.executors.kubernetes_objects import (
    CANCELLED,
    FAILED_CREATE,
    PodOptions,
    condition,
    identity_of,
    image_of,
    job_body,
    runs,
    secret_body,
    selector,
    service_body,
    starts_on_node,
    status_of,
    telling_pods,
    waits_for_pod,
    warnings,
    with_meeting_key,
)
from diloco_orchestrator.executors.kubernetes_template import container_of, read_template
from diloco_orchestrator.executors.names import words_of
from diloco_orchestrator.executors.remote_base import (
    LABEL_ATTEMPT,
    LABEL_REPLICA,
    RemoteExecutor,
    attempt_name,
    run_selector,
)

if TYPE_CHECKING:
    from kubernetes.client import Configuration

_IMAGE = "python:3.11-slim"  # replicas install the other packages; an image that brings torch starts minutes faster
_GONE = "the Job is gone"
# Fields of the events that say why a Job's pod is refused, and why a pod's container does not start.
_REFUSED = f"involvedObject.kind=Job,reason={FAILED_CREATE}"
_STARTS = "involvedObject.kind=Pod,type=Warning"
_POLL_LOG_S = 0.5  # pause before a log that does not exist yet is read again
_FOLLOWS_FOR_S = 600.0  # how long a log is followed though the API server answers nothing


class KubernetesExecutor(RemoteExecutor):
    """Runs each attempt as a Job of a Kubernetes cluster.

    Args:
        namespace: Where the Jobs are made.
        image: Container image of the replicas; python:3.11-slim if None. One that brings torch starts much faster.
        gpu: NVIDIA GPUs of a replica: 1 stands for one for each of its ranks.
        cpu: CPUs per replica, such as 4 or "500m".
        memory: Memory per replica, such as "16Gi".
        service_account: Service account of the pods, which may give them access to the bucket.
        spot: Only use spot nodes, of EKS node groups or Karpenter.
        queue: Local queue of Kueue, which then decides when a replica starts.
        gpu_types: GPUs of nodes in order of preference, as labels of nodes name them: "H100" with Karpenter,
            "NVIDIA-H100-80GB-HBM3" with NVIDIA's device discovery, LABEL=VALUE for another label. Any by default.
        instance_type: Type of the nodes, such as "g6e.xlarge"; any by default.
        pod_template: YAML file, or a dict, with `metadata` and `spec` of the pods, to which the executor adds its own:
            node selectors, tolerations, volumes, pull secrets, priority class, annotations.
        kubeconfig: File that says how to reach the cluster; by default the usual one, else the pod's own cluster.
        context: The kubeconfig's context, by default its current one.
        ranks_per_machine: Ranks of a replica in one pod at the most: one of 16 ranks is two pods of 8. One pod for all
            by default.
        hourly_usd: What one replica's machine costs in US dollars an hour, for max_cost_usd and `status`.
        clock: For tests.
    """

    name = "kubernetes"
    _other_logins = ""  # end of the advice if no kubeconfig is found

    def __init__(
        self,
        *,
        namespace: str = "default",
        image: str | None = None,
        gpu: int = 0,
        cpu: int | float | str | None = None,
        memory: int | str | None = None,
        service_account: str | None = None,
        spot: bool = False,
        queue: str | None = None,
        gpu_types: Sequence[str] = (),
        instance_type: str | None = None,
        pod_template: str | Path | Mapping[str, Any] | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        ranks_per_machine: int | None = None,
        hourly_usd: float | str | None = None,
        clock: Clock | None = None,
    ) -> None:
        given = {**locals(), "pod_template": read_template(pod_template)}  # another process may not have the file
        self.options, self.withheld = plain_options(given), withheld(given)
        super().__init__(hourly_usd=hourly_usd, clock=clock)
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", namespace):
            raise ValueError(f"namespace={namespace!r} is no name of a namespace. Use letters, digits and hyphens.")
        self._namespace = namespace
        self.ranks_per_machine = ranks_per_machine
        self._pod = PodOptions(
            image or container_of(given["pod_template"]).get("image") or _IMAGE,
            gpu,
            cpu,
            memory,
            service_account,
            spot,
            queue,
            words_of(gpu_types),
            instance_type,
            given["pod_template"],
            ranks_per_machine,
        )
        self._kubeconfig = kubeconfig
        self._context = context
        self._api = KubernetesApi(self._login, needed_by=self.name)

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The attempt's Job and, if it has secrets, its Secret with the values redacted; for several pods a Service."""
        request = with_meeting_key(request, self._pod)
        hidden = replace(request, secrets=dict.fromkeys(request.secrets, "<redacted>"))
        return {"job": job_body(request, self._pod), **self._belongings(hidden, job_uid="")}

    def _belongings(self, request: LaunchRequest, job_uid: str) -> dict[str, dict[str, Any]]:
        """The objects of an attempt beside its Job, by kind, which are deleted with it."""
        found = {"secret": secret_body(request, request.secrets, job_uid)} if request.secrets else {}
        if request.machines(self._pod.ranks_per_machine) > 1:
            found["service"] = service_body(request, job_uid)
        return found

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Create the Job of an attempt, or adopt the existing Job of this name; then its Secret and Service, for which
        its pods wait.

        A caller that dies in between leaves a Job that waits; the next launch creates what it lacks. Raises
        `ExecutorDenied` for a server that drops `suspend` or `completionMode`: its Jobs do not wait for a queue, or
        have pods without numbers.
        """
        request = with_meeting_key(request, self._pod)
        body, name = job_body(request, self._pod), attempt_name(request)
        if self._pod.queue is not None:
            self._leave_queue(request)
        job = self._api.call("create_namespaced_job", f"Job {name}", self._namespace, body, answers=(409,))
        created = job is not None
        if job is None:
            job = self._api.call("read_namespaced_job", f"Job {name}", name, self._namespace, answers=(404,))
            if job is None:
                raise Unavailable(f"Job {name} exists and cannot be read yet. Launch the attempt again.")
        if created and self._pod.queue is not None and not job["spec"].get("suspend"):
            self._undo(name)
            raise ExecutorDenied(
                f"the API server dropped `suspend` of Job {name}, which therefore did not wait for queue "
                f"{self._pod.queue!r}, and was deleted. Use Kubernetes 1.22 or newer, or leave out queue."
            )
        if created and "completionMode" in body["spec"] and job["spec"].get("completionMode") != "Indexed":
            self._undo(name)
            raise ExecutorDenied(
                f"the API server dropped `completionMode` of Job {name}, whose pods would not know their numbers, and "
                "which was deleted. Use Kubernetes 1.24 or newer, or leave out ranks_per_machine."
            )
        if condition(job, "Complete", "Failed") is None:
            try:
                for kind, each in self._belongings(request, job["metadata"]["uid"]).items():
                    about = f"{each['kind']} {name}"
                    self._api.call(f"create_namespaced_{kind}", about, self._namespace, each, answers=(409,))
            except ExecutorError:
                if created:  # without another launch its pod would hold a node and wait for ever
                    self._undo(name)
                raise
        return self._handle(request.run_id, job)

    def _handle(self, run_id: str, job: Mapping[str, Any]) -> ReplicaHandle:
        meta = job["metadata"]
        native = {**self._where(), "namespace": meta["namespace"], "job": meta["name"], "uid": meta["uid"]}
        if (pods := job["spec"].get("completions") or 1) > 1:
            native["pods"] = pods
        return self.handle_of(run_id, meta.get("labels"), f"{meta['namespace']}/{meta['name']}", native)

    def _where(self) -> dict[str, str | None]:
        return {"cluster": None, "region": None, "context": self._context}

    def identity(self) -> Identity:
        """The credentials that the pods have of their own: those of a service account, whose role no API shows."""
        return identity_of(self._pod)

    # -- polling -------------------------------------------------------------------------------------------------

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses, by one listing per run while all pods run, else by two or three."""
        fleets: dict[tuple[str, str], list[ReplicaHandle]] = {}
        for handle in handles:
            fleets.setdefault((handle.native["namespace"], handle.run_id), []).append(handle)
        found: dict[str, ReplicaStatus] = {}
        for (namespace, _), fleet in sorted(fleets.items()):
            found |= self._of_fleet(_pods_by_uid(fleet), namespace, selector(*fleet))
        return [found[handle.native["uid"]] for handle in handles]

    def _of_fleet(self, uids: Mapping[str, int], namespace: str, chosen: str) -> dict[str, ReplicaStatus]:
        """The attempts' statuses by the uid of their Job.

        `uids`: with the number of pods of each. `chosen`: label selector of Jobs and pods.
        """
        pods = telling_pods(self._api.items("pod", namespace, chosen), uids)
        if all(runs(pods.get(uid)) for uid in uids):
            running = ReplicaStatus(ReplicaState.RUNNING, native_state="Running")
            return {uid: replace(running, image=image_of(pods[uid])) for uid in uids}
        jobs = {job["metadata"]["uid"]: job for job in self._api.items("job", namespace, chosen)}
        if any(condition(jobs[uid], "Complete", "Failed") for uid in uids if uid in jobs):
            # Listed after the Jobs, so that the end of a Job that ended comes with the end of its pod.
            pods = telling_pods(self._api.items("pod", namespace, chosen), uids)
        refused = any(waits_for_pod(jobs[uid], pods.get(uid)) for uid in uids if uid in jobs)
        starts = any(starts_on_node(pods.get(uid)) for uid in uids)
        said = self._warnings(namespace, [_REFUSED] * refused + [_STARTS] * starts)
        about = {uid: pods[uid]["metadata"]["uid"] if uid in pods else uid for uid in uids}
        return {
            uid: status_of(jobs[uid], pods.get(uid), said.get(about[uid], "")) if uid in jobs else self.gone(uid, _GONE)
            for uid in uids
        }

    def _warnings(self, namespace: str, selectors: Sequence[str]) -> dict[str, str]:
        """The last warnings about Jobs and pods by their uid, of events that field selectors choose; empty if the API
        server lists none.
        """
        try:
            return warnings([each for one in selectors for each in self._api.items("event", namespace, one, "field")])
        except ExecutorError:
            return {}

    def find(self, run_id: str) -> list[ReplicaHandle]:
        jobs = self._api.items("job", self._namespace, run_selector(run_id))
        return in_order(self._handle(run_id, job) for job in jobs)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines of the pod's output; none once the pod is gone, as after a preemption.

        With `follow`, a broken connection is opened again: every line has a time, so no line is yielded twice. Raises
        `ExecutorError` once the API server has not answered for ten minutes.
        """
        last, answered_at = "", self._clock.now()
        while True:
            # Before reading, so that nothing written until then is missed.
            state = self.poll(handle).state if follow else ReplicaState.UNKNOWN
            ended, seen = not follow or state.ended, last
            if state is not ReplicaState.UNKNOWN:
                answered_at = self._clock.now()
            try:
                for line in self._read_log(handle, follow, tail if not seen else None):
                    at, _, text = line.partition(" ")
                    if at > seen:
                        last = at
                        yield text
            except ExecutorDenied:
                raise
            except ExecutorError:
                silent_s = self._clock.now() - answered_at
                if not follow or (ended and last == seen) or silent_s > _FOLLOWS_FOR_S:
                    raise
                ended = False  # there is more to read
            if ended:
                return
            self._clock.sleep(_POLL_LOG_S)

    def _read_log(self, handle: ReplicaHandle, follow: bool, tail: int | None) -> Iterator[str]:
        namespace = handle.native["namespace"]
        pod = telling_pods(self._api.items("pod", namespace, selector(handle)), {}).get(handle.native["uid"])
        if pod is not None:
            yield from self._api.log_lines(pod["metadata"]["name"], namespace, follow, tail)

    # -- ending --------------------------------------------------------------------------------------------------

    def cancel(self, handle: ReplicaHandle) -> None:
        """Annotate the Job as cancelled, so that every process sees it; then set a deadline of 1 s.

        The deadline of a started pod sends SIGTERM and keeps the log. A Job without a started pod gets the deadline
        itself.
        """
        namespace, name = handle.native["namespace"], handle.native["job"]
        job = self._api.call("read_namespaced_job", f"Job {name}", name, namespace, answers=(404,))
        if job is None or job["metadata"]["uid"] != handle.native["uid"] or condition(job, "Complete", "Failed"):
            return
        pods = self._api.items("pod", namespace, selector(handle))
        started = [pod for pod in pods if _is_of(handle, pod) and pod.get("status", {}).get("startTime") is not None]
        annotation: dict[str, Any] = {"metadata": {"annotations": {CANCELLED: "true"}}}
        due = {"spec": {"activeDeadlineSeconds": 1}}
        patch = annotation if started else {**annotation, **due}
        self._api.call("patch_namespaced_job", f"Job {name}", name, namespace, patch, answers=(404,))
        for pod in started:
            pod_name = pod["metadata"]["name"]
            self._api.call("patch_namespaced_pod", f"Pod {pod_name}", pod_name, namespace, due, answers=(404,))
        self._cancelled.add(handle.native["uid"])  # rather than its name, which a later Job may have

    def _leave_queue(self, request: LaunchRequest) -> None:
        """Delete the Jobs of earlier attempts of the replica that a queue holds.

        Kueue suspends a running Job to preempt it, and would let it in again, before or beside the next attempt.
        """
        chosen = f"{run_selector(request.run_id)},{LABEL_REPLICA}={request.replica_id}"
        for job in self._api.items("job", self._namespace, chosen):
            number = str(job["metadata"]["labels"].get(LABEL_ATTEMPT))
            earlier = number.isdecimal() and int(number) < request.attempt
            if earlier and job["spec"].get("suspend"):
                self._undo(job["metadata"]["name"])

    def _undo(self, name: str) -> None:
        """Delete a Job and its pod, if the API server allows it."""
        options = {"propagationPolicy": "Background"}
        with suppress(ExecutorError):
            self._api.call("delete_namespaced_job", f"Job {name}", name, self._namespace, body=options, answers=(404,))

    def _login(self) -> "Configuration":
        return login_by_kubeconfig(self._kubeconfig, self._context, self._other_logins)


def _pods_by_uid(handles: Sequence[ReplicaHandle]) -> dict[str, int]:
    """The number of pods of each attempt, by the uid of its Job."""
    return {handle.native["uid"]: handle.native.get("pods", 1) for handle in handles}


def _is_of(handle: ReplicaHandle, pod: Mapping[str, Any]) -> bool:
    """Whether a pod is one of the attempt's Job, and is not being deleted."""
    about = pod["metadata"]
    owners = about.get("ownerReferences") or []
    return not about.get("deletionTimestamp") and any(each["uid"] == handle.native["uid"] for each in owners)
