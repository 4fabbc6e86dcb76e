"""A Kubernetes API server on loopback whose Jobs run as local processes: as much of it as the executor speaks with.

Job controller, scheduler and kubelet are one loop here. It proves that requests, replies and errors pass the genuine
client. It does NOT prove that a real cluster schedules the pods, that a kubelet ends a pod at a deadline that was
changed while it ran, keeping its log (its documentation says so), nor anything of Kueue, Karpenter or RBAC. Pods of an
Indexed Job have addresses of loopback. There is no DNS: names of pods in a pod's environment are looked up once, when
it starts, so that such pods wait for their Service.
"""

import base64
import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from machines import Machine

TOKEN = "loopback-kubernetes-token-5521"
_ROUTE = re.compile(
    r"/(?:api/v1|apis/batch/v1)/namespaces/(?P<ns>[^/]+)/(?P<kind>jobs|pods|secrets|services|events)(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)
_TICK_S = 0.01
_LOG_S = 0.05
_HALF_S = 0.3  # for which half an answer stays without the other
_Object = dict[str, Any]


class LoopbackKubernetes:
    """`accepts`: whether a bearer token is let in. The switches below misbehave on request."""

    def __init__(self, accepts: Callable[[str], bool] = lambda token: token == TOKEN) -> None:
        self.accepts = accepts
        self.requests: list[tuple[str, str, Any]] = []  # method, path with query, body
        self.tokens: list[str] = []
        self.failing = 0  # the HTTP status with which everything is answered; 0: nothing fails
        self.retry_after: str | None = None  # header beside it
        self.holding = False
        self.most_pods = 1000  # that its nodes have room for
        self.no_capacity = False
        self.slow_s = 0.0
        self.halves = False  # of every answer the first half is sent, and no more: a connection that is half open
        self.odd: bytes | None = None  # what everything is answered with, with HTTP 200, instead of its own words
        self.breaks_logs = False  # the next followed log breaks off in the middle of a line
        self.refused: dict[tuple[str, str], tuple[int, str, str]] = {}  # (kind, name): status, reason, message
        self.refused_pods = ""  # why no pod of a Job is made; empty: every pod is
        self.unmounted = ""  # why no node mounts the volumes of its pods; empty: every node does
        self.sidecar = ""  # of a service mesh: a second container that the cluster adds to every pod; empty: none
        self.may_list_events = True
        self.hides: set[str] = set()  # names that exist and are not found yet, as behind a cache
        self.repeats = False  # a listing names everything twice
        self.pod_ip = "127.0.1.{}"  # of the pods; {}: a number of each
        self.refused_replicas: set[int] = set()
        self.drops: set[str] = set()  # fields of a Job's spec that it does not know, as an old server
        self._objects: dict[tuple[str, str, str], _Object] = {}  # by namespace, kind, name
        self._machines: dict[str, Machine] = {}  # by pod
        self._started: list[str] = []  # run of every process ever
        self._given_pods: set[str] = set()  # uids of Jobs that had their pod
        self._disrupted: set[str] = set()  # uids of Jobs whose pod was evicted
        self.overdue: set[str] = set()  # pods past their deadline
        self._asked: set[str] = set()  # pods whose process was sent SIGTERM
        self._lock = threading.RLock()
        self.over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(_TICK_S,), daemon=True).start()
        threading.Thread(target=self._control, daemon=True).start()

    def close(self) -> None:
        """End everything that runs."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for machine in self._machines.values():
                machine.close()

    def write_kubeconfig(self, path: Path, token: str = TOKEN) -> str:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "loopback",
            "contexts": [{"name": "loopback", "context": {"cluster": "loopback", "user": "tests"}}],
            "clusters": [{"name": "loopback", "cluster": {"server": self.url}}],
            "users": [{"name": "tests", "user": {"token": token}}],
        }
        path.write_text(json.dumps(config))  # JSON is YAML
        return str(path)

    # -- misbehaving ---------------------------------------------------------------------------------------------

    def preempt(self, job: str) -> None:
        """Evict its pod, of several the last one, as when a spot node is taken back."""
        with self._lock:
            for pod in self._pods_of(job)[-1:]:
                now = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                pod["status"].setdefault("conditions", []).append(now)
                self._disrupted.add(pod["metadata"]["ownerReferences"][0]["uid"])
                self._delete_pod(pod)

    def forget(self, job: str) -> None:
        """The Job, its pods and its Secret are gone at once."""
        with self._lock:
            for pod in self._pods_of(job):
                self._end_machine(pod)
            for key in [key for key, each in self._objects.items() if job in (each["metadata"]["name"], _owner(each))]:
                del self._objects[key]

    def unsuspend(self, job: str, back: bool = False) -> None:
        """What Kueue does when there is room; `back`: when the room is another's."""
        with self._lock:
            self._find("jobs", job)["spec"]["suspend"] = back

    def machines(self, run: str) -> int:
        """How many processes it started for a run, those it is about to start included."""
        self._control_all()
        return self._started.count(run)

    def objects(self, kind: str) -> list[_Object]:
        with self._lock:
            return [copy.deepcopy(each) for (_, of, _), each in self._objects.items() if of == kind]

    # -- the API -------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: _Object | None, query: str = "") -> tuple[int, _Object]:
        """HTTP status and answer of one request, but for logs."""
        route = _ROUTE.fullmatch(path)
        if route is None:
            return _status(404, "NotFound", "the server could not find the requested resource")
        asked = {key: values[0] for key, values in parse_qs(query).items()}
        namespace, kind, name = route["ns"], route["kind"], route["name"]
        if method == "POST":
            return self.create(namespace, kind, body or {}, asked.get("dryRun") == "All")
        if method == "GET" and name is None:
            if kind == "events" and not self.may_list_events:
                return _status(403, "Forbidden", 'events is forbidden: User "u" cannot list resource "events"')
            return self.list_all(namespace, kind, asked.get("labelSelector", ""), asked.get("fieldSelector", ""))
        if method == "GET":
            return self.read(namespace, kind, name)
        if method == "PATCH":
            return self.patch(namespace, kind, name, body or {})
        return self.delete(namespace, kind, name)

    def create(self, namespace: str, kind: str, body: _Object, dry_run: bool) -> tuple[int, _Object]:
        name = body["metadata"]["name"]
        replica = int(body["metadata"].get("labels", {}).get("diloco-replica", -1))
        with self._lock:
            if kind == "jobs" and replica in self.refused_replicas:
                return _status(403, "Forbidden", f'jobs.batch "{name}" is forbidden: exceeded quota: replicas')
            if (kind, name) in self.refused:
                return _status(*self.refused[(kind, name)])
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
                return _status(422, "Invalid", f'{kind} "{name}" is invalid: metadata.name: Invalid value')
            if (namespace, kind, name) in self._objects:
                return _status(409, "AlreadyExists", f'{kind} "{name}" already exists')
            made = copy.deepcopy(body)
            made["metadata"].update(
                namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp=_rfc3339(time.time()), resourceVersion="1"
            )
            if kind == "secrets":
                values = made.pop("stringData", {})
                made["data"] = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
            if kind == "jobs":
                made["spec"] = {key: value for key, value in made["spec"].items() if key not in self.drops}
                made["status"] = {} if made["spec"].get("suspend") else {"startTime": _rfc3339(time.time())}
            if not dry_run:
                self._objects[(namespace, kind, name)] = made
            return 201, copy.deepcopy(made)

    def read(self, namespace: str, kind: str, name: str) -> tuple[int, _Object]:
        with self._lock:
            found = self._objects.get((namespace, kind, name))
            return (200, copy.deepcopy(found)) if found and name not in self.hides else _not_found(kind, name)

    def list_all(self, namespace: str, kind: str, selector: str, fields: str = "") -> tuple[int, _Object]:
        parts = re.findall(r"([^,= ]+)(?:=([^,]*)| in \(([^)]*)\))", selector)
        wanted = [(key, set(values.split(",")) if values else {value}) for key, value, values in parts]
        asked = [part.partition("=")[::2] for part in fields.split(",") if part]
        with self._lock:
            items = [
                copy.deepcopy(each)
                for (its_namespace, its_kind, _), each in self._objects.items()
                if (its_namespace, its_kind) == (namespace, kind)
                and all(each["metadata"].get("labels", {}).get(key) in values for key, values in wanted)
                and all(_field(each, key) == value for key, value in asked)
            ]
        kinds = {
            "jobs": ("batch/v1", "JobList"),
            "pods": ("v1", "PodList"),
            "secrets": ("v1", "SecretList"),
            "events": ("v1", "EventList"),
        }
        version, list_kind = kinds[kind]
        items *= 2 if self.repeats else 1
        return 200, {"apiVersion": version, "kind": list_kind, "metadata": {"resourceVersion": "1"}, "items": items}

    def patch(self, namespace: str, kind: str, name: str, body: _Object) -> tuple[int, _Object]:
        with self._lock:
            found = self._objects.get((namespace, kind, name))
            if found is None:
                return _not_found(kind, name)
            if kind == "pods" and set(body) | set(body.get("spec", {})) != {"spec", "activeDeadlineSeconds"}:
                return _status(422, "Invalid", "pod updates may not change fields other than activeDeadlineSeconds")
            if kind == "jobs" and {"template", "podFailurePolicy"} & set(body.get("spec", {})):
                return _status(422, "Invalid", "field is immutable")
            if kind == "pods":
                before = found["spec"].get("activeDeadlineSeconds")
                if before is not None and before < body["spec"]["activeDeadlineSeconds"]:
                    return _status(422, "Invalid", "activeDeadlineSeconds must be less than or equal to previous value")
            _merge(found, body)
            return 200, copy.deepcopy(found)

    def delete(self, namespace: str, kind: str, name: str) -> tuple[int, _Object]:
        with self._lock:
            found = self._objects.get((namespace, kind, name))
            if found is None:
                return _not_found(kind, name)
            if kind == "pods":
                self._delete_pod(found)
                return 200, copy.deepcopy(found)
            del self._objects[(namespace, kind, name)]
            for each in [each for each in self._objects.values() if _owner(each) == name]:
                if each["kind"] == "Pod":
                    self._delete_pod(each)
                else:
                    del self._objects[(namespace, f"{each['kind'].lower()}s", each["metadata"]["name"])]
            return 200, {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success"}

    def log(self, namespace: str, name: str, container: str = "") -> Machine | tuple[int, _Object]:
        with self._lock:
            if (namespace, "pods", name) not in self._objects:
                return _not_found("pods", name)
            if self.sidecar and not container:
                words = f"a container name must be specified for pod {name}, choose one of: [{self.sidecar} replica]"
                return _status(400, "BadRequest", words)
            if name not in self._machines:
                message = f'container "replica" in pod "{name}" is waiting to start: ContainerCreating'
                return _status(400, "BadRequest", message)
            return self._machines[name]

    # -- job controller, scheduler, kubelet ----------------------------------------------------------------------

    def _control(self) -> None:
        while not self.over.wait(_TICK_S):
            self._control_all()

    def _control_all(self) -> None:
        with self._lock:
            for job in [each for (_, kind, _), each in self._objects.items() if kind == "jobs"]:
                self._control_job(job)
            for pod in [each for (_, kind, _), each in self._objects.items() if kind == "pods"]:
                self._control_pod(pod)

    def _control_job(self, job: _Object) -> None:
        status, spec, uid = job["status"], job["spec"], job["metadata"]["uid"]
        if any(each["type"] in ("Complete", "Failed") for each in status.get("conditions", [])):
            return
        pods = self._pods_of(job["metadata"]["name"])
        if spec.get("suspend"):
            status.pop("startTime", None)
            self._given_pods.discard(uid)
            for pod in pods:
                self._delete_pod(pod)
            return
        started = status.setdefault("startTime", _rfc3339(time.time()))
        limit = spec.get("activeDeadlineSeconds")
        if limit is not None and time.time() > _epoch(started) + limit:
            for pod in pods:
                self._delete_pod(pod)
            if not pods:
                _end_job(job, "Failed", "DeadlineExceeded")
        elif not pods and uid not in self._given_pods:
            if self.refused_pods:
                self._refuse_pod(job)
                return
            self._given_pods.add(uid)
            for index in range(spec["completions"]):
                self._make_pod(job, index)
        elif len(pods) < spec["completions"] or any(pod["status"]["phase"] == "Failed" for pod in pods):
            active = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
            for pod in active:
                self._delete_pod(pod)
            if not active:
                _end_job(job, "Failed", "PodFailurePolicy" if uid in self._disrupted else "BackoffLimitExceeded")
        elif all(pod["status"]["phase"] == "Succeeded" for pod in pods):
            _end_job(job, "Complete", "CompletionsReached")

    def _refuse_pod(self, job: _Object) -> None:
        self._warn(job, "Job", "FailedCreate", f"Error creating: {self.refused_pods}")

    def _warn(self, about: _Object, kind: str, reason: str, message: str) -> None:
        """The event of a real controller or kubelet, which counts further failures in the same event."""
        meta = about["metadata"]
        name, now = f"{meta['name']}.{reason.lower()}", _rfc3339(time.time())
        which = {"kind": kind, "name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]}
        self._objects[(meta["namespace"], "events", name)] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": meta["namespace"], "uid": str(uuid.uuid4())},
            "involvedObject": {"apiVersion": "batch/v1" if kind == "Job" else "v1", **which},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": now,
        }

    def _make_pod(self, job: _Object, index: int) -> None:
        meta, template = job["metadata"], copy.deepcopy(job["spec"]["template"])
        name = f"{meta['name'][:57]}-{uuid.uuid4().hex[:5]}"
        about: _Object = {}
        if job["spec"].get("completionMode") == "Indexed":
            about["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
            template["spec"]["hostname"] = f"{meta['name']}-{index}"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "controller": True}
        self._objects[(meta["namespace"], "pods", name)] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": meta["namespace"],
                "uid": str(uuid.uuid4()),
                "creationTimestamp": _rfc3339(time.time()),
                "labels": {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": meta["name"]},
                "ownerReferences": [owner],
                **about,
            },
            "spec": template["spec"],
            "status": {"phase": "Pending", "podIP": self.pod_ip.format(1 + len(self._objects) % 250)},
        }

    def _control_pod(self, pod: _Object) -> None:
        name, namespace, status = pod["metadata"]["name"], pod["metadata"]["namespace"], pod["status"]
        machine = self._machines.get(name)
        if "deletionTimestamp" in pod["metadata"]:
            if machine is None or machine.ended.is_set():
                del self._objects[(namespace, "pods", name)]
            return
        if status["phase"] not in ("Pending", "Running"):
            return
        limit = pod["spec"].get("activeDeadlineSeconds")
        if limit and "startTime" in status and time.time() > _epoch(status["startTime"]) + limit:
            self._end_machine(pod)
            self.overdue.add(name)
        if machine is None and name not in self.overdue:
            self._start_pod(pod)
        elif machine is None or machine.ended.is_set():
            self._end_pod(pod, machine)

    def _start_pod(self, pod: _Object) -> None:
        container, status, namespace = pod["spec"]["containers"][0], pod["status"], pod["metadata"]["namespace"]
        if self.holding or len(self._machines) >= self.most_pods:
            words = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            status["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
            ]
            return
        if self.no_capacity:
            status.update(phase="Failed", reason="OutOfnvidia.com/gpu", message="Node didn't have enough resource")
            return
        status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        status.setdefault("startTime", _rfc3339(time.time()))
        pod["spec"]["nodeName"] = "node-0"
        if self.unmounted:
            _wait(status, "ContainerCreating", "")
            self._warn(pod, "Pod", "FailedMount", self.unmounted)
            return
        if (subdomain := pod["spec"].get("subdomain")) and (namespace, "services", subdomain) not in self._objects:
            return
        env = {each["name"]: self._value(pod, each) for each in container["env"]}
        for source in container.get("envFrom", []):
            secret = self._objects.get((namespace, "secrets", source["secretRef"]["name"]))
            if secret is None:
                _wait(status, "CreateContainerConfigError", f'secret "{source["secretRef"]["name"]}" not found')
                return
            env.update({key: base64.b64decode(value).decode() for key, value in secret["data"].items()})
        if container["image"].startswith("missing/"):
            _wait(status, "ImagePullBackOff", f'Back-off pulling image "{container["image"]}"')
            return
        if not re.fullmatch(r"[a-z0-9][a-z0-9._/:@-]*", container["image"]):
            _wait(status, "InvalidImageName", f'Failed to apply default image tag "{container["image"]}"')
            return
        command = [_expand(word, env) for word in container["command"]]
        grace_s = min(5, pod["spec"]["terminationGracePeriodSeconds"])
        self._machines[pod["metadata"]["name"]] = Machine(command, env, grace_s=grace_s)
        self._started.append(pod["metadata"]["labels"]["diloco-run"])
        image = container["image"]  # by tag: as one that was loaded on the node, without a name
        image_id = f"docker.io/library/{image}" if "@" in image else "sha256:" + "0" * 64
        running = {"name": "replica", "image": image, "imageID": image_id, "state": {"running": {}}}
        beside = {
            "name": self.sidecar,
            "image": "mesh:1",
            "imageID": "mesh@sha256:" + "1" * 64,
            "state": {"running": {}},
        }
        status.update(phase="Running", containerStatuses=[*([beside] if self.sidecar else []), running])

    def _value(self, pod: _Object, variable: _Object) -> str:
        """The value of a variable of a pod's environment, with names in DNS of the pods of its Service looked up."""
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            name = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
            assert name is not None, path
            return str(pod["metadata"]["annotations"][name[1]])
        value = _expand(variable["value"], {})
        if subdomain := pod["spec"].get("subdomain"):
            chosen = self._objects[(pod["metadata"]["namespace"], "services", subdomain)]["spec"]["selector"].items()
            for (_, kind, _), each in self._objects.items():
                if kind == "pods" and chosen <= each["metadata"]["labels"].items():
                    value = value.replace(f"{each['spec']['hostname']}.{subdomain}", each["status"]["podIP"])
        return value

    def _end_pod(self, pod: _Object, machine: Machine | None) -> None:
        status, overdue = pod["status"], pod["metadata"]["name"] in self.overdue
        code = None if machine is None else machine.exit_code
        if code is not None:
            told = code if code >= 0 else 128 - code
            ended = {"exitCode": told, "reason": "Completed" if code == 0 else "Error"}
            status["containerStatuses"] = [{"name": "replica", "state": {"terminated": ended}}]
        status["phase"] = "Succeeded" if code == 0 and not overdue else "Failed"
        if overdue:
            words = "Pod was active on the node longer than the specified deadline"
            status.update(reason="DeadlineExceeded", message=words)

    def _delete_pod(self, pod: _Object) -> None:
        pod["metadata"].setdefault("deletionTimestamp", _rfc3339(time.time()))
        self._end_machine(pod)

    def _end_machine(self, pod: _Object) -> None:
        """SIGTERM, once."""
        name = pod["metadata"]["name"]
        machine = self._machines.get(name)
        if machine is not None and name not in self._asked:
            self._asked.add(name)
            machine.terminate()

    def _pods_of(self, job: str) -> list[_Object]:
        return [each for (_, kind, _), each in self._objects.items() if kind == "pods" and _owner(each) == job]

    def _find(self, kind: str, name: str) -> _Object:
        return next(each for (_, k, n), each in self._objects.items() if (k, n) == (kind, name))


@contextmanager
def running_kubernetes(accepts: Callable[[str], bool] | None = None) -> Iterator[LoopbackKubernetes]:
    cluster = LoopbackKubernetes(accepts) if accepts else LoopbackKubernetes()
    try:
        yield cluster
    finally:
        cluster.close()


def _handler(cluster: LoopbackKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            cluster.requests.append((self.command, self.path, body))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            cluster.tokens.append(token)
            time.sleep(cluster.slow_s)
            if not cluster.accepts(token):
                return self._reply(*_status(401, "Unauthorized", "Unauthorized"))
            if cluster.failing:
                return self._reply(*_status(cluster.failing, "InternalError", "etcdserver: request timed out"))
            if cluster.odd is not None:
                return self._send(200, cluster.odd)
            asked = urlparse(self.path)
            route = _ROUTE.fullmatch(asked.path)
            if route is not None and route["log"]:
                query = {key: values[0] for key, values in parse_qs(asked.query).items()}
                found = cluster.log(route["ns"], route["name"], query.get("container", ""))
                return self._reply(*found) if isinstance(found, tuple) else self._stream(found, query)
            return self._reply(*cluster.answer(self.command, asked.path, body, asked.query))

        do_GET = do_POST = do_PATCH = do_DELETE = do_any  # noqa: N815

        def _reply(self, code: int, body: Mapping[str, Any]) -> None:
            self._send(code, json.dumps(body).encode())

        def _send(self, code: int, data: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "text/html" if data.startswith(b"<") else "application/json")
            self.send_header("Content-Length", str(len(data)))
            if cluster.failing and cluster.retry_after:
                self.send_header("Retry-After", cluster.retry_after)
            self.end_headers()
            if cluster.halves:
                self.close_connection = True
                self.wfile.write(data[: len(data) // 2])
                cluster.over.wait(_HALF_S)
                return
            self.wfile.write(data)

        def _stream(self, machine: Machine, query: Mapping[str, str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            follow, tail = query.get("follow", "").lower() == "true", int(query.get("tailLines", -1))
            number = 0 if tail < 0 else max(0, len(machine.lines()) - tail)
            with suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    ended = machine.ended.is_set()
                    lines = machine.lines()[number:]
                    stamps = range(number, number + len(lines))
                    text = "".join(f"{_stamp(machine, n)} {line}\n" for n, line in zip(stamps, lines, strict=True))
                    number += len(lines)
                    if text and follow and cluster.breaks_logs:
                        cluster.breaks_logs = False
                        self._chunk(text[: text.index("\n") + 40].encode())
                        self.close_connection = True
                        return
                    if text:
                        self._chunk(text.encode())
                    if ended or not follow:
                        self.wfile.write(b"0\r\n\r\n")
                        return
                    machine.ended.wait(_LOG_S)

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


def _status(code: int, reason: str, message: str) -> tuple[int, _Object]:
    status = {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure"}
    return code, {**status, "message": message, "reason": reason, "code": code}


def _field(item: _Object, path: str) -> Any:
    for part in path.split("."):
        item = item.get(part, {})
    return item


def _not_found(kind: str, name: str) -> tuple[int, _Object]:
    return _status(404, "NotFound", f'{kind} "{name}" not found')


def _end_job(job: _Object, kind: str, reason: str) -> None:
    about = {"type": kind, "status": "True", "reason": reason, "message": f"loopback: {reason}"}
    job["status"].setdefault("conditions", []).append(about)


def _wait(status: _Object, reason: str, message: str) -> None:
    status["containerStatuses"] = [{"name": "replica", "state": {"waiting": {"reason": reason, "message": message}}}]


def _owner(item: _Object) -> str:
    return next((owner["name"] for owner in item["metadata"].get("ownerReferences", [])), "")


def _merge(target: _Object, patch: _Object) -> None:
    for key, value in patch.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' own: $(NAME) becomes its value if there is one, $$ becomes $."""

    def put(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", put, text)


def _rfc3339(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def _epoch(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _stamp(machine: Machine, line: int) -> str:
    """A time for every line, the same whenever it is read."""
    at = datetime.fromtimestamp(machine.started_at, UTC) + timedelta(microseconds=line)
    return f"{at:%Y-%m-%dT%H:%M:%S.%f}000Z"
