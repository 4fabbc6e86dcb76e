"""Pod templates: what is refused, and what a pod becomes of them."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from executors.contract import LaunchRequest
from executors.eks_jobs import EKSExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.kubernetes_template import gpu_affinity, read_template
from executors.registry import recreate, spec_of

REQUEST = LaunchRequest("run-7", 0, 1, ["python"], env={"A": "ours"}, secrets={"KEY": "x"}, timeout_s=60)
TEMPLATE = """
apiVersion: v1
kind: Pod
metadata:
  annotations: {cluster-autoscaler.kubernetes.io/safe-to-evict: "false"}
  labels: {team: night, kueue.x-k8s.io/priority-class: low}
spec:
  priorityClassName: batch
  nodeSelector: {disk: nvme}
  imagePullSecrets: [{name: registry}]
  tolerations: [{key: dedicated, operator: Exists}]
  volumes:
  - name: corpus
    persistentVolumeClaim: {claimName: corpus, readOnly: true}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: In, values: [a]}]}]
  containers:
  - name: replica
    image: mine:1
    env: [{name: A, value: theirs}, {name: B, value: b}, {name: TOKEN, valueFrom: {secretKeyRef: {name: s, key: k}}}]
    volumeMounts: [{name: corpus, mountPath: /data, readOnly: true}]
    resources: {limits: {ephemeral-storage: 20Gi}}
    securityContext: {capabilities: {add: [IPC_LOCK]}}
"""


def pod_of(executor: KubernetesExecutor) -> dict[str, Any]:
    job = executor.plan(REQUEST)["job"]
    for version in ("1.32", "1.34"):
        kubernetes_validate.validate(job, version, strict=True)
    return dict(job["spec"]["template"])


def test_a_template_is_merged_under_what_the_executor_needs(tmp_path: Path):
    path = tmp_path / "pod.yaml"
    path.write_text(TEMPLATE)
    executor = KubernetesExecutor(pod_template=path, gpu=1, memory="16Gi", spot=True)
    path.unlink()
    template = pod_of(executor)
    assert template["metadata"]["labels"] == {
        "team": "night",
        "kueue.x-k8s.io/priority-class": "low",
        "diloco-run": "run-7",
        "diloco-replica": "0",
        "diloco-attempt": "1",
    }
    assert template["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    labels = executor.plan(REQUEST)["job"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/priority-class"] == "low" and "team" not in labels
    pod = template["spec"]
    assert pod["priorityClassName"] == "batch" and pod["restartPolicy"] == "Never"
    assert [each["key"] for each in pod["tolerations"]] == ["dedicated", "nvidia.com/gpu"]
    assert [each["name"] for each in pod["volumes"]] == ["corpus", "shared-memory", "scratch"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [[each["key"] for each in term["matchExpressions"]] for term in terms] == [
        ["zone", "karpenter.sh/capacity-type"],
        ["zone", "eks.amazonaws.com/capacityType"],
    ]
    (container,) = pod["containers"]
    assert container["image"] == "mine:1" and container["command"] == ["python"]
    assert [(each["name"], each.get("value")) for each in container["env"]] == [
        ("B", "b"),
        ("TOKEN", None),
        ("A", "ours"),
        ("HOME", "/tmp"),
    ]
    assert container["resources"]["limits"] == {"ephemeral-storage": "20Gi", "memory": "16Gi", "nvidia.com/gpu": "1"}
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/data", "/dev/shm", "/tmp"]
    spec = spec_of(executor)
    assert spec is not None and recreate(spec).plan(REQUEST) == executor.plan(REQUEST)  # without the file


def test_a_pod_has_shared_memory_by_default_and_a_template_may_limit_it():
    volume, scratch = pod_of(KubernetesExecutor())["spec"]["volumes"]
    assert volume == {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    assert scratch == {"name": "scratch", "emptyDir": {}}
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    limited = {
        "spec": {
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
            "containers": [{"name": "replica", "volumeMounts": [mount]}],
        }
    }
    pod = pod_of(KubernetesExecutor(pod_template=limited))["spec"]
    assert [each["name"] for each in pod["volumes"]] == ["shm", "scratch"]
    assert [each["name"] for each in pod["containers"][0]["volumeMounts"]] == ["shm", "scratch"]


def test_a_template_may_have_another_user_home_and_scratch_folder():
    container = {
        "name": "replica",
        "env": [{"name": "HOME", "value": "/home/me"}],
        "securityContext": {"readOnlyRootFilesystem": False},
        "volumeMounts": [{"name": "disk", "mountPath": "/tmp"}],
    }
    spec = {
        "securityContext": {"runAsNonRoot": False, "runAsUser": 0},
        "volumes": [{"name": "disk", "emptyDir": {"sizeLimit": "50Gi"}}],
        "containers": [container],
    }
    pod = pod_of(KubernetesExecutor(pod_template={"spec": spec}))["spec"]
    assert pod["securityContext"]["runAsUser"] == 0 and pod["containers"][0]["env"][0]["value"] == "/home/me"
    assert [each["name"] for each in pod["containers"][0]["env"]] == ["HOME", "A"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False
    assert [each["name"] for each in pod["volumes"]] == ["disk", "shared-memory"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"spec": {"nodeSelectr": {}}}, "pod_template.spec: unknown field 'nodeSelectr': did you mean 'nodeSelector'?"),
        ({"sepc": {}}, "did you mean 'spec'?"),
        ({"spec": {"containers": [{"imge": "x"}]}}, "pod_template.spec.containers[0]: unknown field 'imge'"),
        ({"spec": {"tolerations": [{"key": 1}]}}, "tolerations[0].key = 1 is not text. Put it in quotes: '1'."),
        ({"spec": {"hostNetwork": "yes"}}, "hostNetwork = 'yes' is not true or false"),
        ({"spec": {"priority": True}}, "is not a whole number"),
        ({"spec": {"tolerations": {}}}, "is no list"),
        ({"spec": {"nodeSelector": ["a"]}}, "is no mapping"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}, "only hold the container 'replica'"),
        ({"spec": {"containers": [{"command": ["sh"]}]}}, "command is the executor's"),
        ({"spec": {"containers": [{"env": [{"name": "API_KEY", "value": "x"}]}]}}, "API_KEY looks like a secret"),
        ({"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 2}}}]}}, "Leave that to gpu="),
        (
            {"spec": {"initContainers": [{"name": "fetch", "env": [{"name": "API_KEY", "value": "x"}]}]}},
            "API_KEY looks like a secret",
        ),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "pod_template.spec.volumes[0] has no 'name'"),
        ({"spec": {"containers": [{"volumeMounts": [{"name": "a"}]}]}}, "volumeMounts[0] has no 'mountPath'"),
        (
            {"spec": {"initContainers": [{"image": "x"}]}},
            "initContainers[0] has no 'name', which every",
        ),
    ],
)
def test_a_template_that_cannot_work_is_refused_with_the_field(template: dict[str, Any], words: str):
    with pytest.raises(ValueError) as refused:
        read_template(template)
    assert words in str(refused.value)


def test_what_the_executor_sets_itself_is_refused():
    executor = KubernetesExecutor(pod_template={"spec": {"restartPolicy": "Always"}})
    with pytest.raises(ValueError, match=r"spec.restartPolicy = 'Always': the executor sets it to 'Never'"):
        executor.plan(REQUEST)
    image = {"spec": {"containers": [{"image": "mine:1"}]}}
    with pytest.raises(ValueError, match="image = 'mine:1'"):
        KubernetesExecutor(image="other:1", pod_template=image).plan(REQUEST)


def test_a_volume_of_the_template_is_never_replaced_by_one_of_ours():
    """A claim named "scratch" would be an empty folder."""
    mine = {"spec": {"volumes": [{"name": "scratch", "persistentVolumeClaim": {"claimName": "corpus"}}]}}
    with pytest.raises(ValueError, match="has a volume 'scratch' of its own"):
        KubernetesExecutor(pod_template=mine).plan(REQUEST)


def test_a_quantity_may_be_a_number_and_a_default_may_be_set_otherwise():
    template = {
        "spec": {
            "automountServiceAccountToken": True,
            "containers": [{"resources": {"requests": {"cpu": 4}}}],
        }
    }
    pod = pod_of(KubernetesExecutor(pod_template=template))["spec"]
    assert pod["automountServiceAccountToken"] is True and pod["enableServiceLinks"] is False


def test_gpus_are_preferred_in_their_order_and_any_of_them_is_taken():
    found = gpu_affinity(["H100", "cloud/gpu=a100"])["nodeAffinity"]
    required = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    by_label = {term["matchExpressions"][0]["key"]: term["matchExpressions"][0]["values"] for term in required}
    assert by_label["karpenter.k8s.aws/instance-gpu-name"] == ["h100"] and by_label["cloud/gpu"] == ["a100"]
    weights = [
        (each["weight"], each["preference"]["matchExpressions"][0]["values"][0])
        for each in found["preferredDuringSchedulingIgnoredDuringExecution"]
    ]
    assert weights[0] == (100, "H100") and weights[-1] == (90, "a100")
    pod = pod_of(EKSExecutor(gpu=1, gpu_types=["H100", "A100"], spot=True, instance_type="p5.4xlarge"))["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(terms) == 4 * 2 and all(len(term["matchExpressions"]) == 2 for term in terms)
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.4xlarge"}


def test_a_file_that_is_no_template_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        KubernetesExecutor(pod_template=tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="holds no mapping"):
        KubernetesExecutor(pod_template=str(tmp_path / "list.yaml"))
