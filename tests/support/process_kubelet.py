"""Scheduler and kubelet of a genuine Kubernetes control plane, for one node: pods are local processes.

It binds every pod, sets its status, keeps its deadline, ends it when it is deleted, and serves its log over HTTPS, from
which the API server passes it on. What a kubelet does is taken from its documentation.
"""

import base64
import json
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import urllib3
from genuine_kubernetes import GenuineKubernetes, Gone
from loopback_kubernetes import _expand, _stamp
from machines import Machine

_TICK_S = 0.05
NODE = "here"
_Object = dict[str, Any]


class ProcessKubelet:
    """`holding`: no node takes a pod. `no_capacity`: the node refuses every pod."""

    def __init__(self, server: GenuineKubernetes) -> None:
        self.holding = self.no_capacity = False
        self.started: list[str] = []  # run of every process ever
        self._server = server
        self._machines: dict[str, Machine] = {}  # by name of the pod
        self._ends: dict[str, _Object] = {}  # what ended a pod: part of its last status
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._https = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._https.daemon_threads = True
        certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.load_cert_chain(server.ca, server.ca.with_suffix(".key"))
        self._https.socket = certificate.wrap_socket(
            self._https.socket,
            server_side=True,
            do_handshake_on_connect=False,  # by the thread of the connection, not by the one that accepts
        )
        server.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        about = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._https.server_address[1]}},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        }
        server.ask("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": about})
        threading.Thread(target=self._https.serve_forever, args=(_TICK_S,), daemon=True).start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._https.shutdown()
        self._https.server_close()
        self._server.ask("DELETE", f"/api/v1/nodes/{NODE}")
        for machine in self._machines.values():
            machine.close()

    def evict(self, job: str) -> None:
        """End the pod of a Job, because its node is short of memory."""
        with self._lock:
            for pod in self._pods():
                if pod["metadata"]["labels"].get("job-name") == job:
                    self._end(pod, {"reason": "Evicted", "message": "The node was low on resource: memory."})

    def machine(self, pod: str) -> Machine | None:
        with self._lock:
            return self._machines.get(pod)

    def _run(self) -> None:
        while not self._over.wait(_TICK_S):
            with self._lock:
                try:
                    for pod in self._pods():
                        with suppress(Gone):  # since it was listed
                            self._control(pod)
                except (AssertionError, urllib3.exceptions.HTTPError) as error:  # such as an overloaded server's 500
                    print(f"kubelet: {error}; it tries again", file=sys.stderr)

    def _pods(self) -> list[_Object]:
        return list(self._server.ask("GET", "/api/v1/pods?labelSelector=job-name")["items"])

    def _control(self, pod: _Object) -> None:
        meta, status, machine = pod["metadata"], pod["status"], self._machines.get(pod["metadata"]["name"])
        if "deletionTimestamp" in meta:
            if machine is None or machine.ended.is_set():
                self._server.delete_pod(pod, grace_s=0)
            else:
                self._end(pod, {})
        elif status["phase"] == "Pending":
            self._start(pod)
        elif status["phase"] == "Running" and machine is not None:
            limit = pod["spec"].get("activeDeadlineSeconds")
            if machine.ended.is_set():
                self._set(pod, **self._last_status(meta["name"], machine))
            elif limit is not None and time.time() > datetime.fromisoformat(status["startTime"]).timestamp() + limit:
                words = "Pod was active on the node longer than the specified deadline"
                self._end(pod, {"reason": "DeadlineExceeded", "message": words})

    def _end(self, pod: _Object, why: _Object) -> None:
        """SIGTERM, once."""
        name = pod["metadata"]["name"]
        machine = self._machines.get(name)
        if machine is not None and name not in self._ends:
            self._ends[name] = why
            machine.terminate()

    def _last_status(self, pod: str, machine: Machine) -> _Object:
        code = machine.exit_code or 0
        why = self._ends.get(pod, {})
        told = code if code >= 0 else 128 - code
        ended = {"exitCode": told, "reason": "Error" if code else "Completed"}
        phase = "Failed" if code or why else "Succeeded"
        return {"phase": phase, **why, **_container(terminated=ended)}

    def _start(self, pod: _Object) -> None:
        if not pod["spec"].get("nodeName"):
            if self.holding:
                words = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
                unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
                self._set(pod, conditions=[unbound])
                return
            self._server.bind(pod, NODE)
        if self.no_capacity:
            self._set(pod, phase="Failed", reason="OutOfnvidia.com/gpu", message="Node didn't have enough resource")
            return
        if pod["metadata"]["name"] not in self._machines and not self._run_container(pod):
            return
        self._set(pod, phase="Running", startTime=_now(), **_container(running={"startedAt": _now()}))

    def _run_container(self, pod: _Object) -> bool:
        """Start the process; False while its Secret is not there."""
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        env = {each["name"]: _expand(each["value"], {}) for each in container.get("env", [])}
        for source in container.get("envFrom", []):
            path = f"/api/v1/namespaces/{meta['namespace']}/secrets/{source['secretRef']['name']}"
            code, secret = self._server.call("GET", path)
            if code == 404:
                waiting = {"reason": "CreateContainerConfigError", "message": secret["message"]}
                self._set(pod, startTime=_now(), **_container(waiting=waiting))
                return False
            assert code == 200, f"{path}: {code}"
            env |= {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
        self._machines[meta["name"]] = Machine([_expand(word, env) for word in container["command"]], env)
        self.started.append(meta["labels"]["diloco-run"])
        return True

    def _set(self, pod: _Object, **status: Any) -> None:
        self._server.set_status(pod, **status)


@contextmanager
def running_kubelet(server: GenuineKubernetes) -> Iterator[ProcessKubelet]:
    kubelet = ProcessKubelet(server)
    try:
        yield kubelet
    finally:
        kubelet.close()


def _container(**state: Any) -> _Object:
    """The container's state. A strategic merge keeps other states, unless they are set to null."""
    states = {**dict.fromkeys(("waiting", "running", "terminated")), **state}
    about = {"name": "replica", "image": "i", "imageID": "", "ready": "running" in state, "restartCount": 0}
    return {"containerStatuses": [{**about, "state": states}]}


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _handler(kubelet: ProcessKubelet) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = urlparse(self.path)
            query = {key: values[0] for key, values in parse_qs(asked.query).items()}
            _, where, _, pod, _ = asked.path.split("/")
            machine = kubelet.machine(pod) if where == "containerLogs" else None
            if machine is None:
                words = f'container "replica" in pod "{pod}" is waiting to start: ContainerCreating'.encode()
                self.send_response(400)
                self.send_header("Content-Length", str(len(words)))
                self.end_headers()
                self.wfile.write(words)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with suppress(OSError):
                for chunk in _chunks(machine, query):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


def _chunks(machine: Machine, query: Mapping[str, str]) -> Iterator[bytes]:
    """Lines with their times, as they come with `follow`, else those that there are."""
    tail, follows = int(query.get("tailLines", -1)), json.loads(query.get("follow", "false"))
    number = 0 if tail < 0 else max(0, len(machine.lines()) - tail)
    while True:
        ended = machine.ended.is_set()
        lines = machine.lines()[number:]
        if lines:
            stamped = (f"{_stamp(machine, number + i)} {line}\n" for i, line in enumerate(lines))
            yield "".join(stamped).encode()
        number += len(lines)
        if ended or not follows:
            return
        machine.ended.wait(_TICK_S)
