"""A genuine Kubernetes control plane on this machine: etcd, kube-apiserver and kube-controller-manager on loopback.

Needs their three programs on PATH or in the folder KUBERNETES_BIN; docs/inside/testing.md says how apt alone gives
them. There is no scheduler, kubelet or network: Jobs get their pods, and tests say what becomes of a pod through its
status. Authorization is RBAC; users log in by a static token, service accounts by signed ones.
"""

import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jwt_of_service_accounts
import pytest
import urllib3
from genuine_slurm import _free_ports

_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
_PATIENCE_S = 120.0  # ends a start, or a wait for a controller, that hangs
ADMIN_TOKEN = "token-of-the-kubernetes-admin-0042"
_CONTROLLERS = "job,garbagecollector,serviceaccount,serviceaccount-token,podgc,ttl-after-finished,namespace"
_Object = dict[str, Any]


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("KUBERNETES_BIN", ""), os.environ.get("PATH", "")]))


def skip_without_kubernetes() -> None:
    """Skip the test where a program of the control plane is absent."""
    if absent := [name for name in _PROGRAMS if _program(name) is None]:
        pytest.skip(
            f"no genuine Kubernetes here ({', '.join(absent)}): put the programs on PATH or their folder into "
            "KUBERNETES_BIN; `make kubernetes` builds them on Debian"
        )


class Gone(AssertionError):
    """The object of a request is gone or is being deleted (404, 409)."""


class GenuineKubernetes:
    """A running control plane. `version`: of its API server, as (major, minor)."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.url = folder, f"https://127.0.0.1:{port}"
        words = subprocess.run([str(_program("kube-apiserver")), "--version"], capture_output=True, text=True).stdout
        found = re.search(r"v(\d+)\.(\d+)", words)
        assert found is not None, f"kube-apiserver --version: {words!r}"
        self.version = int(found[1]), int(found[2])
        self._pool: urllib3.PoolManager | None = None

    @property
    def ca(self) -> Path:
        """The certificate that the API server made for itself."""
        return self.folder / "certificates" / "apiserver.crt"

    def call(self, method: str, path: str, body: Any = None, *, token: str = ADMIN_TOKEN) -> tuple[int, _Object]:
        """HTTP status and answer of one request. A patch is a strategic merge patch."""
        if self._pool is None:
            self._pool = urllib3.PoolManager(ssl_context=ssl.create_default_context(cafile=str(self.ca)), retries=False)
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        answer = self._pool.request(method, self.url + path, body=data, headers=headers, timeout=_PATIENCE_S)
        return answer.status, json.loads(answer.data)

    def ask(self, method: str, path: str, body: Any = None) -> _Object:
        """The answer to a request of the administrator. Raises `Gone`, and `AssertionError` for other refusals."""
        status, answer = self.call(method, path, body)
        words = f"{method} {path}: {status} {answer.get('message')}"
        if status in (404, 409):
            raise Gone(words)
        assert status < 300, words
        return answer

    def apply(self, body: Mapping[str, Any]) -> _Object:
        """Create an object of a file of infra/."""
        version, kind, meta = body["apiVersion"], body["kind"].lower(), body["metadata"]
        plural = {"networkpolicy": "networkpolicies", "priorityclass": "priorityclasses"}.get(kind, f"{kind}s")
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        inside = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
        return self.ask("POST", f"{root}{inside}/{plural}", dict(body))

    def kubeconfig(self, name: str, token: str) -> str:
        """A kubeconfig of this server with a bearer token. `name`: of the file."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "genuine",
            "contexts": [{"name": "genuine", "context": {"cluster": "genuine", "user": "tests"}}],
            "clusters": [{"name": "genuine", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": "tests", "user": {"token": token}}],
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(config))  # JSON is YAML
        return str(path)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """What `condition` returns once that is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.out")))
            assert time.monotonic() < deadline, f"Kubernetes: never happened: {what}\n{logs}"
            time.sleep(0.05)
        return found

    # -- what scheduler and kubelet would do ---------------------------------------------------------------------

    def pods_of(self, namespace: str, job: str) -> list[_Object]:
        """The pods of a Job, oldest first."""
        found = self.ask("GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector=job-name={job}")["items"]
        return sorted(found, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    def pod_of(self, namespace: str, job: str) -> _Object:
        """The first pod of a Job, once its controller made it."""
        return dict(self.wait(lambda: self.pods_of(namespace, job), f"{job} has a pod")[0])

    def bind(self, pod: _Object, node: str) -> None:
        """Give a pod to a node, as the scheduler does; the node need not exist."""
        meta = pod["metadata"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}, "target": target}
        self.ask("POST", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding", body)

    def set_status(self, pod: _Object, **status: Any) -> None:
        """Change a pod's status, as its kubelet does."""
        meta = pod["metadata"]
        self.ask("PATCH", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status", {"status": status})

    def delete_pod(self, pod: _Object, *, grace_s: int | None = None) -> None:
        """Delete a pod: one that is on a node stays until its kubelet deletes it again with `grace_s` 0."""
        meta = pod["metadata"]
        body = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        self.ask("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", body)


@contextmanager
def running_kubernetes(folder: Path, users: Mapping[str, tuple[str, str]]) -> Iterator[GenuineKubernetes]:
    """A control plane over `folder`, which is new. `users`: name and group by token, besides the administrator."""
    skip_without_kubernetes()
    api_port, etcd_port, peer_port, manager_port = _free_ports(4)
    tokens = [f"{ADMIN_TOKEN},admin,admin,system:masters"]
    tokens += [f"{token},{name},{name},{group}" for token, (name, group) in users.items()]
    (folder / "tokens.csv").write_text("\n".join(tokens) + "\n")
    key = folder / "service-accounts.key"
    jwt_of_service_accounts.write_key(key)
    server = GenuineKubernetes(folder, api_port)
    old = server.version < (1, 21)  # then off unless asked for
    gates = ["--feature-gates=TTLAfterFinished=true"] if old else []
    with ExitStack() as stack:

        def start(program: str, *words: str) -> None:
            with (folder / f"{program}.out").open("ab") as output:
                daemon = subprocess.Popen(
                    [str(_program(program)), *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)

        etcd, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
        start(
            "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={api_port}",
            f"--cert-dir={folder}/certificates",
            f"--token-auth-file={folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            f"--service-account-issuer={jwt_of_service_accounts.ISSUER}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            *gates,
        )
        server.wait(lambda: server.ca.exists() and _is_ready(server), "the API server is ready")
        start(
            "kube-controller-manager",
            f"--kubeconfig={server.kubeconfig('controllers', ADMIN_TOKEN)}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={manager_port}",
            *(["--port=0"] if server.version < (1, 24) else []),
            f"--cert-dir={folder}/manager",
            f"--controllers={_CONTROLLERS}",
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
            f"--service-account-private-key-file={key}",
            *gates,
        )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        server.wait(lambda: server.call("GET", account)[0] == 200, "the controllers run")
        yield server


def _is_ready(server: GenuineKubernetes) -> bool:
    try:
        return server.call("GET", "/api/v1/namespaces/default")[0] == 200
    except (urllib3.exceptions.HTTPError, ValueError, OSError):
        return False
