"""Replicas as Jobs of a Kubernetes cluster: one `batch/v1` Job per attempt, named after it.

Knows the Kubernetes API and no cloud; `executors.eks_jobs` logs in to EKS. What it needs to be allowed to do: create,
get, list, patch and delete Jobs, list and patch Pods, read their logs, create Secrets.

An attempt is ended by its pod's own deadline, when it takes too long and when it is cancelled, because everything
else that stops a Job (suspending it, the Job's deadline, deleting it) deletes the pod and its log with it.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from executors.contract import (
    ExecutorClock,
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    MissingSdk,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    SystemExecutorClock,
    plain_options,
)
from executors.kubernetes_objects import (
    CANCELLED,
    condition,
    container_resources,
    job_body,
    newest_by_owner,
    secret_body,
    selector,
    status_of,
)
from executors.remote_base import (
    LABEL_ATTEMPT,
    LABEL_REPLICA,
    LABEL_RUN,
    RemoteExecutor,
    attempt_name,
    check_resources,
    run_label,
)

_IMAGE = "python:3.11-slim"  # replicas install the rest; one that brings torch starts minutes faster
_CALL_S = (10, 30)  # to connect, to answer
_FOLLOW_S = (10, 300)  # a replica may be silent; then the log is opened again
_LOOK_AGAIN_S = 0.5  # for a log that is not there yet


class KubernetesExecutor(RemoteExecutor):
    """Runs each attempt as a Job of a Kubernetes cluster.

    Args:
        namespace: Where the Jobs are made.
        image: Container image of the replicas; python:3.11-slim if None. One that brings torch starts much faster.
        gpu: NVIDIA GPUs per replica.
        cpu: CPUs per replica, such as 4 or "500m".
        memory: Memory per replica, such as "16Gi".
        service_account: Service account of the pods, which may give them access to the bucket.
        spot: Only use spot nodes, of EKS node groups or Karpenter.
        queue: Local queue of Kueue, which then decides when a replica starts.
        kubeconfig: File that says how to reach the cluster; by default the usual one, else the pod's own cluster.
        context: The kubeconfig's context, by default its current one.
        clock: For tests.
    """

    name = "kubernetes"
    _or_else = ""  # how else one gets to a cluster

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
        kubeconfig: str | None = None,
        context: str | None = None,
        clock: ExecutorClock | None = None,
    ) -> None:
        self.options = plain_options(locals())
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", namespace):
            raise ValueError(f"namespace={namespace!r} is no name of a namespace. Use letters, digits and hyphens.")
        self._namespace = namespace
        self._image = image
        self._machine = {"gpu": gpu, "cpu": cpu, "memory": memory}
        container_resources(self._machine)  # complains now
        self._service_account = service_account
        self._spot = spot
        self._queue = queue
        self._kubeconfig = kubeconfig
        self._context = context
        self._clock = clock or SystemExecutorClock()
        self._cancelled: set[str] = set()  # uids, for when the Job is gone
        self._connecting = threading.Lock()
        self._apis: dict[str, Any] | None = None

    def hourly_usd(self, request: LaunchRequest) -> float | None:
        """Unknown: the cluster picks the node."""
        return None

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The Job and, if the request has secrets, the Secret, without what is secret."""
        plan: dict[str, Any] = {"job": self._job(request)}
        if request.secrets:
            plan["secret"] = secret_body(request, dict.fromkeys(request.secrets, "<redacted>"), job_uid="")
        return plan

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Create the Job, or adopt the one of this name; then its Secret, for which the pod waits.

        Who dies between the two leaves a Job that waits, and that the next launch completes.
        """
        body, name = self._job(request), attempt_name(request)
        job = self._call("create_namespaced_job", f"Job {name}", self._namespace, body, answers=(409,))
        created = job is not None
        if job is None:
            job = self._call("read_namespaced_job", f"Job {name}", name, self._namespace, answers=(404,))
            if job is None:
                raise ExecutorError(f"Job {name} existed and is gone a moment later. Launch the attempt again.")
        if request.secrets and condition(job, "Complete", "Failed") is None:
            try:
                secret = secret_body(request, request.secrets, job["metadata"]["uid"])
                self._call("create_namespaced_secret", f"Secret {name}", self._namespace, secret, answers=(409,))
            except ExecutorError:
                if created:  # its pod would hold a node and wait for ever, should nobody launch this attempt again
                    with suppress(ExecutorError):
                        self._delete(name)
                raise
        return self._handle(request.run_id, job)

    def _job(self, request: LaunchRequest) -> dict[str, Any]:
        check_resources(request, self._machine)
        return job_body(
            request,
            image=request.image or self._image or _IMAGE,
            machine={**self._machine, **request.resources},
            service_account=self._service_account,
            spot=self._spot,
            queue=self._queue,
        )

    def _handle(self, run_id: str, job: Mapping[str, Any]) -> ReplicaHandle:
        meta = job["metadata"]
        return ReplicaHandle(
            executor=self.name,
            run_id=run_id,
            replica_id=int(meta["labels"][LABEL_REPLICA]),
            attempt=int(meta["labels"][LABEL_ATTEMPT]),
            native_id=f"{meta['namespace']}/{meta['name']}",
            native={**self._where(), "namespace": meta["namespace"], "job": meta["name"], "uid": meta["uid"]},
        )

    def _where(self) -> dict[str, str | None]:
        """Which cluster, for a handle."""
        return {"cluster": None, "region": None, "context": self._context}

    # -- watching ------------------------------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return self._poll([handle], handle.native["namespace"], selector(handle))[0]

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Two listings per run: its Jobs, its pods."""
        fleets: dict[tuple[str, str], list[ReplicaHandle]] = {}
        for handle in handles:
            fleets.setdefault((handle.native["namespace"], handle.run_id), []).append(handle)
        statuses: dict[str, ReplicaStatus] = {}
        for (namespace, run_id), fleet in fleets.items():
            found = self._poll(fleet, namespace, f"{LABEL_RUN}={run_label(run_id)}")
            statuses.update(zip([handle.native["uid"] for handle in fleet], found, strict=True))
        return [statuses[handle.native["uid"]] for handle in handles]

    def _poll(self, handles: Sequence[ReplicaHandle], namespace: str, selector: str) -> list[ReplicaStatus]:
        try:
            jobs = {job["metadata"]["uid"]: job for job in self._list("job", namespace, selector)}
            pods = newest_by_owner(self._list("pod", namespace, selector))  # later: knows the end of a Job that ended
        except ExecutorDenied:
            raise
        except ExecutorError as error:
            return [ReplicaStatus(ReplicaState.UNKNOWN, message=str(error))] * len(handles)
        uids = [handle.native["uid"] for handle in handles]
        return [status_of(jobs[uid], pods.get(uid)) if uid in jobs else self._gone(uid) for uid in uids]

    def _gone(self, uid: str) -> ReplicaStatus:
        if uid in self._cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", message="cancelled; the Job is gone")
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", message="the Job is gone; nobody here cancelled it")

    def find(self, run_id: str) -> list[ReplicaHandle]:
        jobs = self._list("job", self._namespace, f"{LABEL_RUN}={run_label(run_id)}")
        handles = [self._handle(run_id, job) for job in jobs]
        return sorted(handles, key=lambda handle: (handle.replica_id, handle.attempt))

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """The pod's output; none once the pod is gone, as after a preemption. Following survives a broken connection:
        every line comes with its time, so reading goes on after the last one seen."""
        last = ""
        while True:
            ended = not follow or self.poll(handle).state.ended  # before reading: what it wrote until then is read
            seen = last
            try:
                for line in self._read_log(handle, follow, tail if not seen else None):
                    at, _, text = line.partition(" ")
                    if at > seen:
                        last = at
                        yield text
            except ExecutorDenied:
                raise
            except ExecutorError:
                if not follow or (ended and last == seen):
                    raise
                ended = False  # there is more to read
            if ended:
                return
            self._clock.sleep(_LOOK_AGAIN_S)

    def _read_log(self, handle: ReplicaHandle, follow: bool, tail: int | None) -> Iterator[str]:
        pods = newest_by_owner(self._list("pod", handle.native["namespace"], selector(handle)))
        pod = pods.get(handle.native["uid"])
        if pod is None:
            return
        stream = self._send(
            "read_namespaced_pod_log",
            f"the log of {pod['metadata']['name']}",
            pod["metadata"]["name"],
            handle.native["namespace"],
            answers=(400, 404),  # not started yet; its node is gone
            timeout_s=_FOLLOW_S if follow else _CALL_S,
            follow=follow,
            timestamps=True,
            **({} if tail is None else {"tail_lines": tail}),
        )
        if stream is not None:
            yield from _lines(stream)

    # -- ending --------------------------------------------------------------------------------------------------

    def cancel(self, handle: ReplicaHandle) -> None:
        """Write it down on the Job, for every process to see; then let the deadline of its pod end, which sends
        SIGTERM and keeps the log. A Job without a pod at work gets a deadline of its own instead."""
        namespace, name = handle.native["namespace"], handle.native["job"]
        job = self._call("read_namespaced_job", f"Job {name}", name, namespace, answers=(404,))
        if job is None or job["metadata"]["uid"] != handle.native["uid"] or condition(job, "Complete", "Failed"):
            return
        pod = newest_by_owner(self._list("pod", namespace, selector(handle))).get(handle.native["uid"])
        at_work = pod is not None and pod.get("status", {}).get("startTime") is not None
        note: dict[str, Any] = {"metadata": {"annotations": {CANCELLED: "true"}}}
        due = {"spec": {"activeDeadlineSeconds": 1}}
        patch = note if at_work else {**note, **due}
        self._call("patch_namespaced_job", f"Job {name}", name, namespace, patch, answers=(404,))
        if pod is not None and at_work:
            pod_name = pod["metadata"]["name"]
            self._call("patch_namespaced_pod", f"Pod {pod_name}", pod_name, namespace, due, answers=(404,))
        self._cancelled.add(handle.native["uid"])

    def _delete(self, name: str) -> None:
        options = {"propagationPolicy": "Background"}
        self._call("delete_namespaced_job", f"Job {name}", name, self._namespace, body=options, answers=(404,))

    # -- the API -------------------------------------------------------------------------------------------------

    def _list(self, kind: str, namespace: str, selector: str) -> list[dict[str, Any]]:
        verb = f"list_namespaced_{kind}"
        reply = self._call(verb, f"the {kind}s of {selector}", namespace, label_selector=selector)
        return list((reply or {}).get("items") or [])

    def _call(self, verb: str, about: str, *args: Any, **options: Any) -> dict[str, Any] | None:
        """One call and its reply; None for a status that the caller names as one of the `answers`."""
        response = self._send(verb, about, *args, **options)
        if response is None:
            return None
        try:
            return dict(json.loads(response.data))
        except ValueError:
            raise ExecutorError(f"what answered about {about} is no Kubernetes API. Check the address.") from None
        except _network_errors() as error:
            raise _unreachable(about, error) from None

    def _send(
        self,
        verb: str,
        about: str,
        *args: Any,
        answers: tuple[int, ...] = (),
        timeout_s: tuple[int, int] = _CALL_S,
        **options: Any,
    ) -> Any:
        """The raw response: the SDK's own models refuse what a newer server adds."""
        api = self._api(verb)
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config import ConfigException

        try:
            return getattr(api, verb)(*args, _preload_content=False, _request_timeout=timeout_s, **options)
        except ApiException as error:
            if error.status in answers:
                return None
            raise _refusal(about, int(error.status or 0), error.body, error.reason) from None
        except ConfigException as error:
            raise ExecutorDenied(f"the login to Kubernetes failed: {error}. Does kubectl work here?") from None
        except _network_errors() as error:
            raise _unreachable(about, error) from None

    def _api(self, verb: str) -> Any:
        with self._connecting:
            if self._apis is None:
                try:
                    from kubernetes import client
                except ImportError:
                    raise MissingSdk(
                        f"the {self.name} executor needs the Kubernetes client, which is not installed. "
                        "Install it: pip install 'diloco-orchestrator[eks]'"
                    ) from None
                connection = client.ApiClient(self._configuration())
                self._apis = {"job": client.BatchV1Api(connection), "core": client.CoreV1Api(connection)}
        return self._apis["job" if verb.endswith("_job") else "core"]

    def _configuration(self) -> Any:
        import kubernetes.config as kubernetes_config
        from kubernetes import client

        config: Any = kubernetes_config
        configuration = client.Configuration()
        usual = config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION.split(":")
        named = self._kubeconfig is not None or self._context is not None
        try:
            if named or any(Path(path).expanduser().exists() for path in usual):
                config.load_kube_config(self._kubeconfig, self._context, configuration, persist_config=False)
            else:
                config.load_incluster_config(configuration)
        except (config.ConfigException, OSError) as error:
            raise ExecutorDenied(
                f"no Kubernetes cluster is configured: {str(error).rstrip('.')}. Name a kubeconfig that works with "
                f"kubectl{self._or_else}."
            ) from None
        return configuration


def _lines(stream: Any) -> Iterator[str]:
    """Lines of a response as they come; before a broken connection is raised, only whole ones."""
    rest = b""
    try:
        for chunk in stream.stream():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        if rest:
            yield rest.decode(errors="replace")
    except _network_errors() as error:
        raise _unreachable("a log", error) from None
    finally:
        stream.close()


def _network_errors() -> tuple[type[Exception], ...]:
    from urllib3.exceptions import HTTPError

    return (HTTPError, OSError)


def _unreachable(about: str, error: Exception) -> ExecutorError:
    return ExecutorError(f"the Kubernetes API did not answer about {about}: {error}. Try again.")


def _refusal(about: str, status: int, body: Any, reason: Any) -> ExecutorError:
    """An HTTP status of the API as one of our errors."""
    try:
        words = str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        words = str(reason)
    if status in (401, 403):
        advice = "Check who you are to the cluster (kubectl auth whoami), and what that may do here."
        return ExecutorDenied(f"Kubernetes refuses access to {about} ({status}: {words}). {advice}")
    if status in (400, 404, 405, 413, 422):
        return ExecutorDenied(f"Kubernetes refuses {about} as invalid ({status}: {words}). Change the request.")
    return ExecutorError(f"Kubernetes failed about {about} ({status}: {words}). Try again.")
