"""KubernetesExecutor on a genuine control plane: what its API server keeps, grants and refuses, and what a Job becomes
once its pod's status says how it ended. Tests are skipped without its programs (tests/support/genuine_kubernetes.py).

The launcher has the rights of infra/eks/launcher.yaml and no more. No kubelet runs: tests set statuses of pods.
"""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt_of_service_accounts
import pytest
import yaml
from genuine_kubernetes import GenuineKubernetes, running_kubernetes
from loopback_kubernetes import running_kubernetes as running_loopback

from executors.contract import ExecutorDenied, ExecutorError, LaunchRequest, ReplicaHandle, ReplicaState, ReplicaStatus
from executors.eks_jobs import EKSExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.remote_base import attempt_name

pytestmark = pytest.mark.slow

INFRA = Path(__file__).parent.parent.parent / "infra" / "eks"
NAMESPACE, ACCOUNT = "diloco", "diloco-replica"
LAUNCHER, HALF, OUTSIDER = "token-of-the-launcher-0042", "token-without-secrets-0042", "token-of-nobody-0042"
USERS = {LAUNCHER: ("lena", "diloco-launchers"), HALF: ("henry", "half"), OUTSIDER: ("otto", "outsiders")}
TEMPLATE: dict[str, Any] = {
    "metadata": {
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
        "labels": {"team": "night", "kueue.x-k8s.io/priority-class": "low"},
    },
    "spec": {
        "priorityClassName": "batch",
        "nodeSelector": {"disk": "nvme"},
        "imagePullSecrets": [{"name": "registry"}],
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "volumes": [{"name": "corpus", "persistentVolumeClaim": {"claimName": "corpus", "readOnly": True}}],
        "containers": [
            {
                "name": "replica",
                "image": "mine:1",
                "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                "volumeMounts": [{"name": "corpus", "mountPath": "/data", "readOnly": True}],
                "resources": {"limits": {"ephemeral-storage": "20Gi"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            }
        ],
    },
}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenuineKubernetes]:
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), USERS) as server:
        for name in ("namespace", "irsa", "launcher", "network-policy"):
            for body in yaml.safe_load_all((INFRA / f"{name}.yaml").read_text()):
                server.apply(body)
        batch = {"kind": "PriorityClass", "metadata": {"name": "batch"}, "value": 1}
        server.apply({"apiVersion": "scheduling.k8s.io/v1", **batch})
        yield server


@pytest.fixture
def executor(server: GenuineKubernetes) -> KubernetesExecutor:
    return _executor(server)


@pytest.fixture
def request_of_run(request: pytest.FixtureRequest) -> LaunchRequest:
    """Attempt 1 of replica 0 of a run that is this test's own."""
    run_id = f"run-{zlib.crc32(request.node.nodeid.encode())}"
    return LaunchRequest(run_id, 0, 1, ["python", "-c", "print('$(HOME)')"], secrets={"KEY": "välue"})


def _executor(server: GenuineKubernetes, token: str = LAUNCHER, **options: Any) -> KubernetesExecutor:
    kubeconfig = server.kubeconfig(f"login-{zlib.crc32(token.encode())}", token)
    return KubernetesExecutor(**{"kubeconfig": kubeconfig, "namespace": NAMESPACE, **options})


def _path(kind: str, name: str = "", namespace: str = NAMESPACE) -> str:
    group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
    return f"{group}/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _runs(server: GenuineKubernetes, handle: ReplicaHandle) -> Object:
    """The attempt's pod, which has come to a node and runs there."""
    pod = server.pod_of(NAMESPACE, handle.native["job"])
    server.bind(pod, "node-that-left")
    server.set_status(pod, phase="Running", startTime=_now(), **_container(running={"startedAt": _now()}))
    return pod


def _container(**state: Any) -> Object:
    """`containerStatuses` of a pod whose container is in a state, as a kubelet reports it."""
    about = {"image": "i", "imageID": "", "ready": "running" in state, "restartCount": 0, "name": "replica"}
    return {"containerStatuses": [{**about, "state": state}]}


def _ended(server: GenuineKubernetes, executor: KubernetesExecutor, handle: ReplicaHandle) -> ReplicaStatus:
    def status() -> ReplicaStatus | None:
        found = executor.poll(handle)
        return found if found.state.ended else None

    found = server.wait(status, "the attempt has ended")
    assert isinstance(found, ReplicaStatus)
    return found


# -- what is sent, what is kept ---------------------------------------------------------------------------------------


def _lost(sent: Any, kept: Any, path: str = "") -> list[str]:
    """Paths of what was sent and is not kept as it was."""
    if isinstance(sent, Mapping) and isinstance(kept, Mapping):
        return [each for key in sent for each in _lost(sent[key], kept.get(key), f"{path}.{key}".lstrip("."))]
    if isinstance(sent, Sequence) and not isinstance(sent, str) and isinstance(kept, list) and len(sent) == len(kept):
        return [each for i, (a, b) in enumerate(zip(sent, kept, strict=True)) for each in _lost(a, b, f"{path}[{i}]")]
    return [] if sent == kept else [path]


def _dropped(version: tuple[int, int], *, queue: bool) -> list[str]:
    """Fields of a Job that a server of this version drops without a word."""
    since = {"podFailurePolicy": (1, 26), "podReplacementPolicy": (1, 29)} | ({"suspend": (1, 22)} if queue else {})
    return sorted(field for field, first in since.items() if version < first)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spot": True, "gpu": 1, "cpu": 4, "memory": "16Gi", "service_account": ACCOUNT},
        {"gpu": 1, "gpu_types": ("H100", "A100", "zone=a"), "instance_type": "g6e.xlarge", "cpu": "500m"},
        {"pod_template": TEMPLATE, "gpu": 1, "memory": "1Gi", "spot": True},
    ],
    ids=["plain", "spot", "types", "template"],
)
def test_what_is_sent_is_kept(server: GenuineKubernetes, request_of_run: LaunchRequest, options: Object):
    executor = _executor(server, **options)
    request = LaunchRequest(**{**vars(request_of_run), "env": {"A": "$$5 $(HOME)\n\t'ü"}, "timeout_s": 90.5})
    plan = executor.plan(request)
    handle = executor.launch(request)
    job = server.ask("GET", _path("jobs", handle.native["job"]))
    lost = {path.split(".")[1] if path.startswith("spec.") else path for path in _lost(plan["job"], job)}
    assert sorted(lost) == _dropped(server.version, queue=False)
    secret = server.ask("GET", _path("secrets", handle.native["job"]))
    assert base64.b64decode(secret["data"]["KEY"]).decode() == "välue"
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Job", handle.native["uid"])
    pod = server.pod_of(NAMESPACE, handle.native["job"])  # that its controller was let make
    # Admission adds tolerations for nodes that are lost, after ours.
    sent = plan["job"]["spec"]["template"]
    ours = sent["spec"].pop("tolerations", [])
    assert pod["spec"]["tolerations"][: len(ours)] == ours
    assert _lost(sent, pod) == []
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"]


@pytest.mark.parametrize("run_id", ["Run_7.of the Night", "r" * 200, "läufer"])
def test_any_name_of_a_run_makes_names_and_labels_that_are_taken(executor: KubernetesExecutor, run_id: str):
    handle = executor.launch(LaunchRequest(run_id, 10**6, 10**6, ["true"]))
    assert [each.native_id for each in executor.find(run_id)] == [handle.native_id]


def test_a_queue_holds_a_job_or_the_launch_is_denied(server: GenuineKubernetes, request_of_run: LaunchRequest):
    """Kueue's queue, which starts a Job that is suspended; servers before 1.22 know no suspended Jobs."""
    executor = _executor(server, queue="gpus")
    if _dropped(server.version, queue=True)[-1] == "suspend":
        with pytest.raises(ExecutorDenied, match=r"queue .*1\.22"):
            executor.launch(request_of_run)
        server.wait(lambda: not executor.find(request_of_run.run_id), "nothing is left")
        return
    handle = executor.launch(request_of_run)
    job = server.ask("GET", _path("jobs", handle.native["job"]))
    assert job["spec"]["suspend"] and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert executor.poll(handle).native_state == "Suspended"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"env": {"A": "a" * 4_000_000}}, r"413|too large"),  # the API server takes 3 MiB
        # etcd takes 1.5 MiB. Then the API server tries again without managedFields, and 1.20 finds fault with itself.
        ({"env": {"A": "a" * 2_000_000}}, r"422|413|too large"),
        ({"secrets": {"A": "a" * 1_100_000}}, r"422.*Too long"),
    ],
    ids=["server", "etcd", "secret"],
)
def test_a_request_that_is_too_large_is_denied(
    server: GenuineKubernetes, executor: KubernetesExecutor, parts: Object, words: str
):
    """The same launch would fail again."""
    with pytest.raises(ExecutorDenied, match=words):
        executor.launch(LaunchRequest("large", 0, 1, ["true"], **parts))
    server.wait(lambda: not executor.find("large"), "nothing is left")


def test_a_name_of_a_variable_that_kubernetes_refuses_is_denied_in_its_words(executor: KubernetesExecutor):
    with pytest.raises(ExecutorDenied, match=r"env\[0\]\.name"):
        executor.launch(LaunchRequest("names", 0, 1, ["true"], env={"A B": "x"}))


# -- launching --------------------------------------------------------------------------------------------------------


def test_eight_launches_of_one_attempt_at_once_make_one_job(server: GenuineKubernetes, request_of_run: LaunchRequest):
    executors = [_executor(server) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda each: each.launch(request_of_run), executors))
    assert all(handle == handles[0] for handle in handles)
    assert executors[0].find(request_of_run.run_id) == handles[:1]
    server.pod_of(NAMESPACE, handles[0].native["job"])
    assert len(server.pods_of(NAMESPACE, handles[0].native["job"])) == 1


def test_a_launch_that_died_before_the_secret_is_completed_by_the_next(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    made = server.call("POST", _path("jobs"), executor.plan(request_of_run)["job"], token=LAUNCHER)[1]  # as far as that
    handle = executor.launch(request_of_run)
    assert handle.native["uid"] == made["metadata"]["uid"]
    secret = server.ask("GET", _path("secrets", handle.native["job"]))
    assert secret["metadata"]["ownerReferences"][0]["uid"] == handle.native["uid"]


def test_a_launch_whose_secret_is_refused_leaves_no_job(server: GenuineKubernetes, request_of_run: LaunchRequest):
    (role,) = (each for each in yaml.safe_load_all((INFRA / "launcher.yaml").read_text()) if each["kind"] == "Role")
    role["metadata"]["name"] = "half"
    role["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["secrets"]]
    server.apply(role)
    server.apply(_binding("half", {"kind": "Group", "name": "half", "apiGroup": "rbac.authorization.k8s.io"}))

    def is_refused() -> bool:
        """RBAC needs a moment for a new role."""
        with pytest.raises(ExecutorDenied) as caught:
            _executor(server, HALF).launch(request_of_run)
        return 'cannot create resource "secrets"' in str(caught.value)

    server.wait(is_refused, "only the Secret is refused")
    server.wait(lambda: server.call("GET", _path("jobs", attempt_name(request_of_run)))[0] == 404, "the Job is gone")
    server.wait(lambda: not server.pods_of(NAMESPACE, attempt_name(request_of_run)), "so is its pod")


def _binding(role: str, subject: Object) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{role}-{subject['name']}", "namespace": NAMESPACE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
        "subjects": [subject],
    }


def test_more_jobs_than_a_page_of_kubectl_are_found(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    """The API server answers with all unless a client asks for pages, of 500 in kubectl."""

    def make(replica_id: int) -> None:
        body = executor.plan(LaunchRequest(request_of_run.run_id, replica_id, 1, ["true"]))["job"]
        body["spec"]["parallelism"] = 0  # no pods
        server.ask("POST", _path("jobs"), body)

    for replica_id in range(510):
        make(replica_id)
    handles = executor.find(request_of_run.run_id)
    assert [handle.replica_id for handle in handles] == list(range(510))
    assert {status.state for status in executor.poll_many(handles)} == {ReplicaState.PENDING}


# -- polling ----------------------------------------------------------------------------------------------------------


def _terminated(code: int, reason: str = "Error") -> Object:
    return _container(terminated={"exitCode": code, "reason": reason, "startedAt": _now(), "finishedAt": _now()})


_UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
_DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": "node is gone"}


@pytest.mark.parametrize(
    ("status", "state", "reason", "code"),
    [
        ({"conditions": [_UNSCHEDULABLE]}, "pending", "", None),
        (_container(waiting={"reason": "ImagePullBackOff"}), "pending", "image", None),
        (_container(waiting={"reason": "InvalidImageName"}), "failed", "image", None),
        ({"phase": "Running"}, "running", "", None),
        ({"phase": "Succeeded", **_terminated(0, "Completed")}, "succeeded", "exit", 0),
        ({"phase": "Failed", **_terminated(75)}, "preempted", "exit", 75),
        ({"phase": "Failed", **_terminated(76)}, "failed", "superseded", 76),
        ({"phase": "Failed", **_terminated(78)}, "failed", "permanent", 78),
        ({"phase": "Failed", **_terminated(1)}, "failed", "exit", 1),
        ({"phase": "Failed", **_terminated(139)}, "failed", "exit", -11),
        ({"phase": "Failed", **_terminated(137, "OOMKilled")}, "failed", "oom", -9),
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}, "failed", "no_capacity", None),
        ({"phase": "Failed", "reason": "DeadlineExceeded", **_terminated(75)}, "timed_out", "deadline", 75),
        # Told without podFailurePolicy, which a server before 1.26 drops: by the pod's reason or condition.
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "preempted", "lost", None),
        ({"phase": "Failed", "reason": "Evicted", **_terminated(137)}, "preempted", "lost", -9),
        ({"phase": "Failed", "reason": "Shutdown", "message": "Node is shutting down"}, "preempted", "lost", None),
        ({"phase": "Failed", "reason": "Terminated", **_terminated(75)}, "preempted", "lost", 75),
        ({"phase": "Failed", "conditions": [_DISRUPTED]}, "preempted", "lost", None),
        ({"phase": "Failed", "conditions": [_DISRUPTED], **_terminated(137)}, "preempted", "lost", -9),
    ],
)
def test_how_a_pod_ends_is_how_its_attempt_ends(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest, status: Object,
    state: str, reason: str, code: int | None
):  # fmt: skip
    handle = executor.launch(request_of_run)
    assert executor.poll(handle).state is ReplicaState.PENDING
    pod = server.pod_of(NAMESPACE, handle.native["job"])
    if state != "pending":
        server.bind(pod, "node-that-left")
    server.set_status(pod, **({"startTime": _now()} if state != "pending" else {}), **status)

    def told() -> ReplicaStatus | None:
        found = executor.poll(handle)
        return found if (found.state, found.reason) == (state, reason) else None

    assert server.wait(told, f"it is {state} {reason}").exit_code == code
    (same,) = executor.statuses(executor.find(request_of_run.run_id))
    assert (same.state, same.reason) == (state, reason)


def test_a_drained_pod_of_an_old_server_is_replaced_by_one_of_the_same_attempt(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    """Before 1.26 nothing stops the Job's controller. The second process finds the attempt claimed, and ends."""
    if "podFailurePolicy" not in _dropped(server.version, queue=False):
        pytest.skip("this server keeps podFailurePolicy")
    handle = executor.launch(request_of_run)
    first = _runs(server, handle)
    server.delete_pod(first)  # what an eviction by the API does: its kubelet has the grace time to end it
    server.wait(lambda: len(server.pods_of(NAMESPACE, handle.native["job"])) == 2, "there are two pods")
    assert executor.poll(handle).state is ReplicaState.PENDING
    server.delete_pod(first, grace_s=0)
    second = _runs(server, handle)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert executor.poll(handle).state is ReplicaState.RUNNING


def test_a_job_that_is_gone_is_lost_and_takes_its_secret_along(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    handle = executor.launch(request_of_run)
    name = handle.native["job"]
    server.pod_of(NAMESPACE, name)
    server.ask("DELETE", _path("jobs", name), {"propagationPolicy": "Background"})
    assert (executor.poll(handle).state, executor.poll(handle).reason) == (ReplicaState.PREEMPTED, "lost")
    server.wait(lambda: server.call("GET", _path("secrets", name))[0] == 404, "the Secret is gone")
    server.wait(lambda: not server.pods_of(NAMESPACE, name), "the pod is gone")
    executor.cancel(handle)  # of nothing
    again = executor.launch(request_of_run)
    assert again.native["uid"] != handle.native["uid"] and executor.poll(handle).reason == "lost"


def test_logs_are_empty_without_a_node_and_an_error_without_its_kubelet(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    handle = executor.launch(request_of_run)
    assert list(executor.logs(handle)) == []
    pod = server.pod_of(NAMESPACE, handle.native["job"])
    assert list(executor.logs(handle)) == []
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "silent"}}
    server.apply(node)
    about = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
             "daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}  # fmt: skip
    server.ask("PATCH", "/api/v1/nodes/silent/status", {"status": about})
    server.bind(pod, "silent")
    server.set_status(pod, phase="Running", startTime=_now(), **_container(running={"startedAt": _now()}))
    with pytest.raises(ExecutorError) as caught:
        list(executor.logs(handle))
    assert not isinstance(caught.value, ExecutorDenied)
    server.ask("DELETE", "/api/v1/nodes/silent")
    assert list(executor.logs(handle)) == []


# -- ending -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, 600.0])
def test_cancelling_a_replica_that_runs_gives_its_pod_a_deadline(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest, timeout_s: float | None
):
    handle = executor.launch(LaunchRequest(**{**vars(request_of_run), "timeout_s": timeout_s}))
    pod = _runs(server, handle)
    executor.cancel(handle)
    executor.cancel(handle)
    kept = server.pod_of(NAMESPACE, handle.native["job"])
    assert kept["spec"]["activeDeadlineSeconds"] == 1 and "deletionTimestamp" not in kept["metadata"]
    server.set_status(pod, phase="Failed", reason="DeadlineExceeded", **_terminated(75))  # as its kubelet does then
    status = _ended(server, _executor(server), handle)
    assert (status.state, status.exit_code) == (ReplicaState.CANCELLED, 75)


def test_cancelling_before_a_node_was_found_ends_job_and_pod(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    handle = executor.launch(request_of_run)
    server.pod_of(NAMESPACE, handle.native["job"])
    executor.cancel(handle)
    assert _ended(server, _executor(server), handle).state is ReplicaState.CANCELLED
    server.wait(lambda: not server.pods_of(NAMESPACE, handle.native["job"]), "its controller deleted the pod")


# -- who may do what --------------------------------------------------------------------------------------------------


def _all_calls(executor: KubernetesExecutor, handle: ReplicaHandle, request: LaunchRequest) -> Iterator[ExecutorDenied]:
    for call in (
        lambda: executor.launch(request),
        lambda: executor.poll(handle),
        lambda: executor.find(request.run_id),
        lambda: executor.cancel(handle),
        lambda: list(executor.logs(handle)),
    ):
        with pytest.raises(ExecutorDenied) as caught:
            call()
        yield caught.value


def test_a_wrong_or_expired_token_is_denied(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    handle = executor.launch(request_of_run)
    server.apply(_binding("diloco-launcher", {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}))
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    valid = server.ask("POST", _path("serviceaccounts", f"{ACCOUNT}/token"), asked)["status"]["token"]

    def works() -> bool:
        """RBAC needs a moment for a new binding."""
        try:
            return [each.native_id for each in _executor(server, valid).find(handle.run_id)] == [handle.native_id]
        except ExecutorDenied as error:
            assert "403" in str(error)
            return False

    server.wait(works, "the service account may")
    expired = jwt_of_service_accounts.expired(valid, server.folder / "service-accounts.key")
    for token in (expired, "no-such-token"):
        for error in _all_calls(_executor(server, token), handle, request_of_run):
            assert "401" in str(error) and token not in str(error)


def test_who_has_no_role_and_who_is_in_another_namespace_is_denied(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest
):
    handle = executor.launch(request_of_run)
    for error in _all_calls(_executor(server, OUTSIDER), handle, request_of_run):
        assert "403" in str(error) and "otto" in str(error)
    with pytest.raises(ExecutorDenied, match="403"):
        _executor(server, namespace="default").launch(request_of_run)


def test_the_launchers_rights_are_those_of_its_manifest_and_no_more(server: GenuineKubernetes):
    """All other tests launch, poll, cancel and read with these rights."""
    resources = [("batch", each) for each in ("jobs", "jobs/status", "cronjobs")]
    core = ("pods", "pods/log", "pods/exec", "pods/status", "pods/eviction", "secrets", "configmaps", "nodes")
    resources += [("", each) for each in (*core, "serviceaccounts", "serviceaccounts/token", "namespaces", "events")]
    resources += [("rbac.authorization.k8s.io", each) for each in ("roles", "rolebindings")]
    verbs = ("create", "get", "list", "watch", "patch", "update", "delete", "deletecollection", "escalate", "bind")

    def granted(namespace: str) -> set[tuple[str, str]]:
        asked = ((group, kind, verb) for group, kind in resources for verb in verbs)
        return {(kind, verb) for group, kind, verb in asked if _may(server, namespace, group, kind, verb)}

    assert granted(NAMESPACE) == {
        *(("jobs", verb) for verb in ("create", "get", "list", "patch", "delete")),
        ("pods", "list"),
        ("pods", "patch"),
        ("pods/log", "get"),
        ("secrets", "create"),
        ("events", "list"),
    }
    assert granted("default") == set()
    for method, path in (("GET", _path("secrets")), ("DELETE", _path("pods", "x")), ("GET", "/api/v1/nodes")):
        assert server.call(method, path, token=LAUNCHER)[0] == 403


def _may(server: GenuineKubernetes, namespace: str, group: str, resource: str, verb: str) -> bool:
    name, _, part = resource.partition("/")
    asked = {"namespace": namespace, "group": group, "resource": name, "subresource": part, "verb": verb}
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = server.call("POST", path, {**kind, "spec": {"resourceAttributes": asked}}, token=LAUNCHER)[1]
    return bool(answer["status"]["allowed"])


def test_the_eks_executor_is_the_same_with_a_kubeconfig(server: GenuineKubernetes, request_of_run: LaunchRequest):
    executor = EKSExecutor(kubeconfig=server.kubeconfig("eks", LAUNCHER), namespace=NAMESPACE)
    handle = executor.launch(request_of_run)
    _runs(server, handle)
    assert executor.poll(handle).state is ReplicaState.RUNNING and handle.executor == "eks"


# -- the stand-in ------------------------------------------------------------------------------------------------------


def test_the_loopback_server_refuses_what_this_one_refuses(
    server: GenuineKubernetes, executor: KubernetesExecutor, request_of_run: LaunchRequest, tmp_path: Path
):
    """Status and reason of the same calls, on which the quick tests rely."""
    name, job = attempt_name(request_of_run), executor.plan(request_of_run)["job"]

    def answers(call: Any, pod: str) -> list[Any]:
        asked = [
            ("POST", _path("jobs"), job),
            ("POST", _path("jobs"), {**job, "metadata": {**job["metadata"], "name": "No_Name"}}),
            ("GET", _path("jobs", "none"), None),
            ("PATCH", _path("jobs", "none"), {"spec": {"activeDeadlineSeconds": 1}}),
            ("PATCH", _path("jobs", name), {"spec": {"template": {"metadata": {"labels": {"a": "b"}}}}}),
            ("PATCH", _path("pods", pod), {"spec": {"activeDeadlineSeconds": 5}}),
            ("PATCH", _path("pods", pod), {"spec": {"activeDeadlineSeconds": 6}}),
            ("PATCH", _path("pods", pod), {"spec": {"terminationGracePeriodSeconds": 1}}),
            ("DELETE", _path("jobs", "none"), None),
            ("DELETE", _path("jobs", name), {"propagationPolicy": "Background"}),
            ("GET", _path("jobs", name), None),
        ]
        told = [call(*each) for each in asked]
        return [(status, answer.get("kind"), answer.get("reason")) for status, answer in told]

    executor.launch(request_of_run)
    genuine = answers(server.call, server.pod_of(NAMESPACE, name)["metadata"]["name"])
    with running_loopback() as loopback:
        loopback.holding = True
        other = KubernetesExecutor(kubeconfig=loopback.write_kubeconfig(tmp_path / "k"), namespace=NAMESPACE)
        other.launch(request_of_run)
        server.wait(lambda: loopback.objects("pods"), "the loopback made a pod")
        pod = loopback.objects("pods")[0]["metadata"]["name"]
        assert answers(loopback.answer, pod) == genuine
