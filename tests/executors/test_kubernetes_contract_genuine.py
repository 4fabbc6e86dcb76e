"""The executor contract on a genuine Kubernetes control plane whose one node runs pods as local processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from genuine_kubernetes import GenuineKubernetes, running_kubernetes
from process_kubelet import ProcessKubelet, running_kubelet

from executors.contract import ReplicaHandle
from executors.kubernetes_jobs import KubernetesExecutor
from executors.remote_base import run_label
from executors.testing import ExecutorContract, Rig

pytestmark = pytest.mark.slow

INFRA = Path(__file__).parent.parent.parent / "infra" / "eks"
NAMESPACE, LAUNCHER = "diloco", "token-of-the-launcher-0042"
_JOBS, _PODS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs", f"/api/v1/namespaces/{NAMESPACE}/pods"


class GenuineRig(Rig):
    """The launcher has the rights of infra/eks/launcher.yaml."""

    credentials = (LAUNCHER,)

    def __init__(self, server: GenuineKubernetes, kubelet: ProcessKubelet) -> None:
        self._server, self._kubelet = server, kubelet
        self._options = {"kubeconfig": server.kubeconfig("launcher", LAUNCHER), "namespace": NAMESPACE}
        self.construct = (
            f"from executors.kubernetes_jobs import KubernetesExecutor as K; executor = K(**{self._options!r})"
        )

    def executor(self, **options: Any) -> KubernetesExecutor:
        return KubernetesExecutor(**{**self._options, **options})

    def denied(self) -> KubernetesExecutor:
        return self.executor(kubeconfig=self._server.kubeconfig("denied", "wrong"))

    def preempt(self, handle: ReplicaHandle) -> None:
        self._server.pod_of(NAMESPACE, handle.native["job"])
        self._kubelet.evict(handle.native["job"])

    def hold(self, on: bool) -> None:
        self._kubelet.holding = on

    def no_capacity(self, on: bool) -> None:
        self._kubelet.no_capacity = on

    def forget(self, handle: ReplicaHandle) -> None:
        self._server.ask("DELETE", f"{_JOBS}/{handle.native['job']}", {"propagationPolicy": "Background"})
        self._server.wait(lambda: not self._server.pods_of(NAMESPACE, handle.native["job"]), "its pod is gone")

    def machines(self, run_id: str) -> int:
        pods = self._server.ask("GET", _PODS)["items"]
        waiting = [each for each in pods if each["status"]["phase"] == "Pending"]
        return self._kubelet.started.count(run_label(run_id)) + len(waiting)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenuineKubernetes]:
    users = {LAUNCHER: ("lena", "diloco-launchers")}
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), users) as server:
        for name in ("namespace", "launcher"):
            for body in yaml.safe_load_all((INFRA / f"{name}.yaml").read_text()):
                server.apply(body)
        yield server


@pytest.fixture
def rig(server: GenuineKubernetes) -> Iterator[GenuineRig]:
    with running_kubelet(server) as kubelet:
        yield GenuineRig(server, kubelet)
        kubelet.holding = False
        server.ask("DELETE", _JOBS, {"propagationPolicy": "Background"})
        server.wait(lambda: not server.ask("GET", _JOBS)["items"], "no Job is left")
        server.wait(lambda: not server.ask("GET", _PODS)["items"], "no pod is left")


class TestKubernetesGenuine(ExecutorContract):
    pass
