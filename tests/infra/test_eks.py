"""The manifests and roles for EKS: valid, at one with each other, and exactly the rights that the executor uses."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import kubernetes_validate
import loopback_eks
import pytest
import yaml
from loopback_kubernetes import LoopbackKubernetes, running_kubernetes

from executors.contract import ExecutorDenied, ReplicaState
from executors.eks_jobs import EKSExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.kubernetes_objects import OF_SEVERAL
from executors.remote_base import attempt_name
from executors.testing import ended_state, request_of, wait_until

INFRA = Path(__file__).parent.parent.parent / "infra"
MANIFESTS = ("namespace", "irsa", "pod-identity", "launcher", "network-policy")
NAMESPACE, ACCOUNT = "diloco", "diloco-replica"
_ROUTE = re.compile(
    r"/(?:api/v1|apis/(?P<group>\w+)/v1)/namespaces/(?P<ns>[^/]+)/(?P<kind>\w+)(?P<name>/[^/]+)?(?P<log>/log)?"
)
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
_STAY = "import signal; print('here', flush=True); signal.sigwait([signal.SIGTERM])"

Right = tuple[str, str, str]  # API group, resource, verb


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((INFRA / "eks" / f"{name}.yaml").read_text()))


def policy(path: str) -> dict[str, Any]:
    return dict(json.loads((INFRA / path).read_text()))


# -- manifests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.32", "1.34"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_what_kubernetes_takes(name: str, version: str):
    for body in documents(name):
        kubernetes_validate.validate(body, version, strict=True)


def test_a_misspelt_manifest_would_be_refused():
    """The test above can fail."""
    (body,) = documents("irsa")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**body, "automountToken": False}, "1.34", strict=True)


def test_everything_is_in_one_namespace_and_names_one_service_account():
    bodies = {name: documents(name) for name in MANIFESTS}
    assert [body["metadata"]["name"] for body in bodies["namespace"]] == [NAMESPACE]
    named = [*bodies["irsa"], *bodies["pod-identity"], *bodies["launcher"], *bodies["network-policy"]]
    assert {body["metadata"]["namespace"] for body in named} == {NAMESPACE}
    assert [body["metadata"]["name"] for body in (*bodies["irsa"], *bodies["pod-identity"])] == [ACCOUNT, ACCOUNT]
    (cluster,) = documents("cluster")
    irsa, pod = cluster["iam"]["serviceAccounts"][0], cluster["iam"]["podIdentityAssociations"][0]
    assert (irsa["metadata"]["namespace"], irsa["metadata"]["name"]) == (NAMESPACE, ACCOUNT)
    assert (pod["namespace"], pod["serviceAccountName"]) == (NAMESPACE, ACCOUNT)
    role, binding = bodies["launcher"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    groups = cluster["accessConfig"]["accessEntries"][0]["kubernetesGroups"]
    assert [subject["name"] for subject in binding["subjects"]] == groups


def test_the_role_of_irsa_is_the_one_that_eksctl_makes():
    (account,), (cluster,) = documents("irsa"), documents("cluster")
    arn = account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"]
    assert arn == f"arn:aws:iam::ACCOUNT:role/{cluster['iam']['serviceAccounts'][0]['roleName']}"


# -- restricted -------------------------------------------------------------------------------------------------------


def breaches(spec: Mapping[str, Any]) -> list[str]:
    """What the Pod Security Standard `restricted` (kubernetes.io/docs/concepts/security/pod-security-standards) refuses
    in a pod of Linux, and what we ask for besides: a root file system that is only read.
    """
    pod, found = spec.get("securityContext") or {}, []
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    kinds = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    found += [f"volume {each['name']}" for each in spec.get("volumes") or [] if not kinds & each.keys()]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = {**pod, **(container.get("securityContext") or {})}
        capabilities = own.get("capabilities") or {}
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": "ALL" in capabilities.get("drop", ())
            and set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": own.get("runAsNonRoot") is True and own.get("runAsUser") != 0,
            "seccompProfile": (own.get("seccompProfile") or {}).get("type") in ("RuntimeDefault", "Localhost"),
            "procMount": own.get("procMount", "Default") == "Default",
            "hostPorts": not any(port.get("hostPort") for port in container.get("ports") or []),
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
        }
        found += [name for name, kept in checks.items() if not kept]
    return found


def job_of(**options: Any) -> dict[str, Any]:
    job = KubernetesExecutor(namespace=NAMESPACE, **options).plan(request_of("pass", secrets={"KEY": "x"}))["job"]
    return dict(job["spec"]["template"]["spec"])


@pytest.mark.parametrize("options", [{}, {"gpu": 1, "spot": True, "image": "any"}, {"service_account": ACCOUNT}])
def test_pods_of_the_executor_keep_to_restricted_which_the_namespace_enforces(options: dict[str, Any]):
    assert breaches(job_of(**options)) == []
    labels = documents("namespace")[0]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize(
    ("spec", "breach"),
    [
        ({"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}, "runAsNonRoot"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "seccompProfile"),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"containers": [{"securityContext": {"readOnlyRootFilesystem": False}}]}, "readOnlyRootFilesystem"),
        ({"containers": [{"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]}, "capabilities"),
        ({"volumes": [{"name": "disk", "hostPath": {"path": "/"}}]}, "volume disk"),
    ],
)
def test_a_template_can_ask_for_more_than_the_namespace_allows(spec: dict[str, Any], breach: str):
    """The test above can fail."""
    assert breaches(job_of(pod_template={"spec": spec})) == [breach]


def test_replicas_are_reached_by_nobody_and_reach_https_but_not_the_nodes_role():
    spec = documents("network-policy")[0]["spec"]
    assert spec["podSelector"] == {} and spec["policyTypes"] == ["Ingress", "Egress"] and spec["ingress"] == []
    _, https, agent = spec["egress"]
    assert https["ports"] == [{"protocol": "TCP", "port": 443}]
    blocks = [each["ipBlock"] for each in https["to"]]
    assert [each["cidr"] for each in blocks] == ["0.0.0.0/0", "::/0"]  # IPv6: a cluster of EKS has one of the two
    for block, metadata in zip(blocks, ("169.254.169.254", "fd00:ec2::254"), strict=True):
        assert any(ip_address(metadata) in ip_network(each) for each in block["except"])
    assert [each["ipBlock"]["cidr"] for each in agent["to"]] == ["169.254.170.23/32", "fd00:ec2::23/128"]


def test_only_pods_of_replicas_on_several_pods_reach_each_other():
    spec = documents("network-policy")[1]["spec"]
    of_several = {"matchExpressions": [{"key": OF_SEVERAL, "operator": "Exists"}]}
    assert spec["podSelector"] == of_several
    assert spec["ingress"] == [{"from": [{"podSelector": of_several}]}]
    assert spec["egress"] == [{"to": [{"podSelector": of_several}]}]
    one_rank_each = KubernetesExecutor(namespace=NAMESPACE, image="any", ranks_per_machine=1)
    for ranks, pods in ((1, None), (2, "2")):
        job = one_rank_each.plan(replace(request_of("pass"), ranks=ranks))["job"]
        assert job["spec"]["template"]["metadata"]["labels"].get(OF_SEVERAL) == pods


# -- the launcher's rights --------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[LoopbackKubernetes]:
    with running_kubernetes() as cluster:
        yield cluster


def test_the_launchers_role_has_exactly_the_rights_that_the_executor_uses(cluster: LoopbackKubernetes, tmp_path: Path):
    executor = KubernetesExecutor(
        namespace=NAMESPACE, image="any", service_account=ACCOUNT, kubeconfig=cluster.write_kubeconfig(tmp_path / "k")
    )
    request = request_of(_STAY, secrets={"TOKEN": "x"})
    handle = executor.launch(request)
    assert executor.launch(request) == handle  # adopted
    assert executor.find(request.run_id) == [handle]
    wait_until(lambda: list(executor.logs(handle)) == ["here"], "its first line")
    executor.poll_many([handle])
    executor.cancel(handle)
    assert ended_state(executor, handle) is ReplicaState.CANCELLED
    refused = request_of("pass", replica_id=1, secrets={"TOKEN": "x"})
    cluster.refused[("secrets", attempt_name(refused))] = (403, "Forbidden", "no")
    with pytest.raises(ExecutorDenied):
        executor.launch(refused)  # and its Job goes again
    cluster.refused_pods = "exceeded quota: pods"
    late = executor.launch(request_of("pass", replica_id=2))
    wait_until(lambda: "exceeded quota: pods" in executor.poll(late).message, "why its pod is refused")
    spread = KubernetesExecutor(
        namespace=NAMESPACE, image="any", service_account=ACCOUNT, kubeconfig=str(tmp_path / "k"), ranks_per_machine=1
    )
    spread.launch(replace(request_of("pass", replica_id=3), ranks=2))  # with a Service
    used = {right_of(method, path) for method, path, _ in cluster.requests}
    role = documents("launcher")[0]
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == granted


@contextmanager
def asked_of_aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The actions that a server in AWS's place is asked for; it refuses each."""
    asked: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            named = parse_qs(body).get("Action")
            is_cluster = re.fullmatch(r"/clusters/[^/]+", self.path)
            asked.add(f"ec2:{named[0]}" if named else "eks:DescribeCluster" if is_cluster else self.path)
            self.send_error(403)

        do_GET = do_POST = refuse  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    for name, value in loopback_eks.environ(f"http://127.0.0.1:{server.server_port}").items():
        monkeypatch.setenv(name, value)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def test_the_launchers_policy_has_exactly_the_actions_that_the_executor_asks_aws_for(monkeypatch: pytest.MonkeyPatch):
    with asked_of_aws(monkeypatch) as asked:
        executor = EKSExecutor("CLUSTER", region="eu-central-1", instance_type="g6e.xlarge", gpu=1)
        executor.price(request_of("pass"))
        with pytest.raises(ExecutorDenied):
            executor.find("run")
    assert asked == {each["Action"] for each in policy("eks/launcher-iam.json")["Statement"]}


def right_of(method: str, path: str) -> Right:
    """What RBAC calls a request."""
    found = _ROUTE.fullmatch(urlparse(path).path)
    assert found is not None and found["ns"] == NAMESPACE, path
    verb = _VERBS.get(method) or ("get" if found["name"] else "list")
    return found["group"] or "", found["kind"] + ("/log" if found["log"] else ""), verb


# -- trust ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["eks/trust-irsa.json", "eks/trust-pod-identity.json", "modal/trust.json"])
def test_a_trust_policy_is_one_that_iam_takes(path: str):
    from moto.iam.policy_validation import IAMTrustPolicyDocumentValidator

    IAMTrustPolicyDocumentValidator(json.dumps(policy(path))).validate()


def test_irsa_trusts_one_service_account_of_one_cluster():
    (statement,) = policy("eks/trust-irsa.json")["Statement"]
    assert statement["Principal"] == {"Federated": "arn:aws:iam::ACCOUNT:oidc-provider/ISSUER"}
    assert statement["Action"] == "sts:AssumeRoleWithWebIdentity"
    subject = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
    assert statement["Condition"] == {"StringEquals": {"ISSUER:sub": subject, "ISSUER:aud": "sts.amazonaws.com"}}


def test_pod_identity_trusts_the_service_for_one_service_account():
    (statement,) = policy("eks/trust-pod-identity.json")["Statement"]
    assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert set(statement["Action"]) == {"sts:AssumeRole", "sts:TagSession"}
    tags = {"aws:RequestTag/kubernetes-namespace": NAMESPACE, "aws:RequestTag/kubernetes-service-account": ACCOUNT}
    assert statement["Condition"] == {"StringEquals": tags}


def test_modal_is_trusted_for_one_app_only():
    (statement,) = policy("modal/trust.json")["Statement"]
    assert statement["Principal"]["Federated"].endswith(":oidc-provider/oidc.modal.com")
    assert statement["Action"] == "sts:AssumeRoleWithWebIdentity"
    assert statement["Condition"]["StringEquals"] == {"oidc.modal.com:aud": "oidc.modal.com"}
    pattern = statement["Condition"]["StringLike"]["oidc.modal.com:sub"]
    assert pattern == "modal:workspace_id:WORKSPACE:environment_name:ENVIRONMENT:app_name:APP:*"
