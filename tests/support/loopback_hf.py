"""A Hugging Face Jobs service on 127.0.0.1 for the genuine SDK, each job a local process.

Does NOT prove how the real service behaves where nobody has written it down: what it answers without capacity or when
an ended job is cancelled, the stage and message of a time-out, whether a listing shows a job at once, whether SIGTERM
comes before SIGKILL, how long it keeps the log of a silent job open (here `quiet_s`), its limits on a request's size.
"""

import itertools
import json
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, quote, urlsplit

from machines import Machine

HALF_S = 0.3  # for which half an answer stays without the other
_HARDWARE = [("cpu-basic", "2 vCPU", "16 GB", 167), ("t4-small", "4 vCPU", "15 GB", 6667)]


def _stamp(when: float | None) -> str | None:
    if when is None:
        return None
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Job:
    def __init__(self, job_id: str, owner: str, spec: dict[str, Any]) -> None:
        self.id, self.owner, self.spec = job_id, owner, spec
        self.created_at = time.time()
        self.machine: Machine | None = None
        self.cancelled = self.deleted = self.forgotten = False
        self.told: tuple[str, str] | None = None  # stage and message, told instead of what became of the machine
        self._events: list[dict[str, Any]] = []
        self._read = 0
        self._lock = threading.Lock()

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.spec.get("labels") or {})

    def start(self) -> None:
        env = {**self.spec["environment"], **self.spec.get("secrets", {}), "JOB_ID": self.id}
        command = [*self.spec["command"], *self.spec["arguments"]]
        self.machine = Machine(command, env, timeout_s=self.spec.get("timeoutSeconds", 1800), grace_s=2.0)

    def end(self) -> None:
        if self.machine is not None:
            self.machine.terminate()

    def status(self) -> tuple[str, str | None]:
        machine = self.machine
        if self.told is not None:
            return self.told
        if self.deleted:
            return "DELETED", None
        if machine is None:
            return ("CANCELED" if self.cancelled else "SCHEDULING"), None
        if not machine.ended.is_set():
            return "RUNNING", None
        if machine.exit_code == 0:
            return "COMPLETED", None
        if self.cancelled:
            return "CANCELED", None
        return "ERROR", "Job timeout" if machine.timed_out else "Job failed"

    @property
    def ended(self) -> bool:
        return self.status()[0] not in ("SCHEDULING", "RUNNING")

    def body(self) -> dict[str, Any]:
        stage, message = self.status()
        machine = self.machine
        hidden = dict.fromkeys(self.spec.get("secrets", {}), None)
        return {
            "id": self.id,
            "createdAt": _stamp(self.created_at),
            "startedAt": _stamp(machine.started_at if machine else None),
            "finishedAt": _stamp(machine.ended_at if machine else time.time() if self.told else None),
            "dockerImage": self.spec.get("dockerImage"),
            "command": self.spec["command"],
            "arguments": self.spec["arguments"],
            "environment": self.spec["environment"],
            "secrets": hidden,
            "flavor": self.spec["flavor"],
            "labels": self.labels,
            "status": {"stage": stage, "message": message},
            "owner": {"id": "5e9ecfc04957053f60648a3e", "name": self.owner, "type": "user"},
        }

    def events(self) -> list[dict[str, Any]]:
        """Log lines so far. A line keeps the time at which it was first seen: the SDK resumes by it."""
        machine = self.machine
        if machine is None:
            return []
        with self._lock:
            over = machine.ended.is_set()
            raw = machine.read(self._read)
            raw = raw if over else raw[: raw.rfind(b"\n") + 1]
            self._read += len(raw)
            now = _stamp(time.time())
            self._events += [{"timestamp": now, "data": line} for line in raw.decode(errors="replace").splitlines()]
            return list(self._events)


class LoopbackHF:
    """The service. `endpoint`, `token`, `user` for the SDK; the flags below make it misbehave.

    `quiet_s`: a running job's log is closed after so long a silence, as the SDK expects a stream to do.
    """

    def __init__(self, *, token: str = "hf_loopback_91b2c3", quiet_s: float = 0.5, page_size: int = 2) -> None:
        self.token, self.user = token, "ada"
        self.quiet_s, self.page_size = quiet_s, page_size
        self.held = self.without_capacity = False
        self.failing = 0  # the HTTP status with which everything is answered; 0: nothing fails
        self.retry_after: str | None = None  # header beside it
        self.loses_replies = False  # of launches: the job is there, its launcher meets HTTP 504
        self.hides = False  # jobs exist and are not found yet
        self.repeats = False  # a listing names every job twice
        self.delay_s = 0.0
        self.halves = False  # of every answer the first half is sent, and no more: a connection that is half open
        self.odd: bytes | None = None  # what everything is answered with, with HTTP 200, instead of the service's words
        self.odd_logs: bytes | None = None  # the same in the place of logs alone
        self.refused: list[Mapping[str, str]] = []  # launches that carry these labels
        self.jobs: dict[str, Job] = {}
        self.requests: list[tuple[str, str, Any]] = []  # method, path and query, body
        self._ids = itertools.count(0x68780D00BBE36D38803F0001)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environ = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs.values():
            if job.machine is not None:
                job.machine.close()

    def hold(self, on: bool) -> None:
        """While on, jobs stay SCHEDULING."""
        with self._lock:
            self.held = on
            waiting = [job for job in self.jobs.values() if job.machine is None and not job.ended and not job.forgotten]
            for job in [] if on else waiting:
                job.start()

    def end(self, job_id: str) -> None:
        """SIGTERM out of the blue."""
        self.jobs[job_id].end()

    def forget(self, job_id: str) -> None:
        self.jobs[job_id].forgotten = True
        self.end(job_id)

    def delete(self, job_id: str) -> None:
        self.jobs[job_id].deleted = True
        self.end(job_id)

    def carrying(self, labels: Mapping[str, str]) -> list[Job]:
        """Every job ever created with these labels, newest first."""
        return [job for job in reversed(list(self.jobs.values())) if labels.items() <= job.labels.items()]

    def create(self, spec: dict[str, Any]) -> Job:
        with self._lock:
            job = Job(f"{next(self._ids):024x}", self.user, spec)
            self.jobs[job.id] = job
            if not self.held:
                job.start()
        return job


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    service: LoopbackHF

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts, query = url.path.strip("/").split("/"), parse_qs(url.query)
        if not self._admitted(None):
            return
        match parts:
            case ["api", "whoami-v2"]:
                self._answer(200, {"type": "user", "name": self.service.user})
            case ["api", "jobs", "hardware"]:
                self._answer(200, [_hardware(*each) for each in _HARDWARE])
            case ["api", "jobs", self.service.user]:
                self._list(url.path, query)
            case ["api", "jobs", self.service.user, job_id]:
                if job := self._job(job_id):
                    self._answer(200, job.body())
            case ["api", "jobs", self.service.user, job_id, "logs"]:
                if job := self._job(job_id):
                    self._stream(job, int(query["tail"][0]) if "tail" in query else None)
            case _:
                self._answer(403, {"error": "You don't have the required permissions"})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        if not self._admitted(body):
            return
        match urlsplit(self.path).path.strip("/").split("/"):
            case ["api", "jobs", self.service.user]:
                self._run(body)
            case ["api", "jobs", self.service.user, job_id, "cancel"]:
                if job := self._job(job_id):
                    if job.ended:
                        self._answer(400, {"error": "Job is not running"})
                        return
                    job.cancelled = True
                    job.end()
                    self._answer(200, job.body())
            case _:
                self._answer(403, {"error": "You don't have the required permissions"})

    def _admitted(self, body: Any) -> bool:
        service = self.service
        service.requests.append((self.command, self.path, body))
        if service.delay_s:
            service._closing.wait(service.delay_s)
        if self.headers.get("Authorization") != f"Bearer {service.token}":
            self._answer(401, {"error": "Invalid username or password."})
        elif service.failing:
            headers = {"Retry-After": service.retry_after} if service.retry_after else {}
            words = "Internal Error - We're working hard to fix this as soon as possible!"
            self._answer(service.failing, {"error": words}, headers)
        elif (odd := service.odd or (service.odd_logs if "/logs" in self.path else None)) is not None:
            self._send(200, odd, {})
        else:
            return True
        return False

    def _run(self, spec: dict[str, Any]) -> None:
        labels = spec.get("labels") or {}
        if self.service.without_capacity:
            self._answer(503, {"error": "No machine available"})
        elif any(refused.items() <= labels.items() for refused in self.service.refused):
            self._answer(400, {"error": "Invalid job spec"})
        else:
            job = self.service.create(spec)
            if self.service.loses_replies:
                self._answer(504, {"error": "Gateway Time-out"})
            else:
                self._answer(200, job.body())

    def _list(self, path: str, query: dict[str, list[str]]) -> None:
        wanted = dict(label.split("=", 1) for label in query.get("label", []))
        stages = query.get("stage")
        hides, times = self.service.hides, 2 if self.service.repeats else 1
        found = [job.body() for job in self.service.carrying(wanted) if not (job.forgotten or hides)] * times
        found = [body for body in found if stages is None or body["status"]["stage"] in stages]
        first = int(query.get("cursor", ["0"])[0])
        after = first + self.service.page_size
        headers = {}
        if after < len(found):
            asked = "".join(f"&{key}={quote(each)}" for key in ("label", "stage") for each in query.get(key, []))
            headers["Link"] = f'<{self.service.endpoint}{path}?cursor={after}{asked}>; rel="next"'
        self._answer(200, found[first:after], headers)

    def _job(self, job_id: str) -> Job | None:
        job = self.service.jobs.get(job_id)
        if job is None or job.forgotten or self.service.hides:
            self._answer(404, {"error": "Job not found"})
            return None
        return job

    def _stream(self, job: Job, tail: int | None) -> None:
        sent = 0 if tail is None else max(0, len(job.events()) - tail)
        job.events()  # seen before the Date header, at which a reader that does not follow stops
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if tail is None:
            self._event({"timestamp": _stamp(job.created_at), "data": f"===== Job started at {job.created_at} ====="})
        quiet_since = time.monotonic()
        while not self.service._closing.is_set() and time.monotonic() - quiet_since < self.service.quiet_s:
            ended = job.ended
            events = job.events()
            for event in events[sent:]:
                self._event(event)
            if len(events) > sent:
                sent, quiet_since = len(events), time.monotonic()
            if ended:
                return
            self.service._closing.wait(0.02)

    def _event(self, event: dict[str, Any]) -> None:
        try:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # the reader has seen enough

    def _answer(self, code: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        self._send(code, json.dumps(body).encode(), headers or {})

    def _send(self, code: int, raw: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "text/html" if raw.startswith(b"<") else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.service.halves:
            self.wfile.write(raw[: len(raw) // 2])
            self.service._closing.wait(HALF_S)
            return
        self.wfile.write(raw)


def _hardware(name: str, cpu: str, ram: str, micro_usd: int) -> dict[str, Any]:
    return {
        "name": name,
        "prettyName": name,
        "cpu": cpu,
        "ram": ram,
        "accelerator": None,
        "unitCostMicroUSD": micro_usd,
        "unitCostUSD": micro_usd / 1e6,
        "unitLabel": "minute",
    }
