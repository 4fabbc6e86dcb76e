"""RayExecutor against a server that gives a dashboard's answers: what is sent, what states mean, what goes wrong."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from executors.contract import ExecutorDenied, ReplicaState, Unavailable
from executors.ray_jobs import RayExecutor
from executors.registry import spec_of
from executors.testing import SECRET, request_of

NAME = "dl-contract-run-r0-a1"
LABELS = {"diloco-run": "contract-run", "diloco-replica": "0", "diloco-attempt": "1"}


class Dashboard:
    """Answers by the start of a path: (status, body); JSON unless the body is bytes. `asked`: requests so far."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, bytes, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.command, self.path, body, dict(self.headers)))
                path = max((each for each in outer.answers if self.path.startswith(each)), key=len, default="")
                status, said = outer.answers.get(path, (404, b"Job does not exist"))
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Location", "/login")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-token")
    monkeypatch.delenv("RAY_JOB_HEADERS", raising=False)
    server = Dashboard()
    yield server
    server.close()


def job(status: str, **fields: Any) -> dict[str, Any]:
    return {"submission_id": NAME, "status": status, "metadata": LABELS, "entrypoint": "x", **fields}


def test_values_of_secrets_in_a_runtime_environment_are_in_no_record():
    """`spec_of` writes `options` into run.json, which everybody reads who reads the bucket."""
    plain = RayExecutor(runtime_env={"uv": ["datasets"], "env_vars": {"TOKENIZERS_PARALLELISM": "false"}})
    assert plain.options == {
        "runtime_env": {"uv": ["datasets"], "env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
        "python": "python",
    }
    executor = RayExecutor(runtime_env={"uv": ["datasets"], "env_vars": {"HF_TOKEN": SECRET}})
    assert executor.options is None and executor.withheld == ("runtime_env",)
    assert spec_of(executor) == {"name": "ray", "withheld": ["runtime_env"]}


@pytest.mark.parametrize(
    ("options", "reserved"),
    [
        ({}, {"entrypoint_num_cpus": 1}),
        ({"gpu": 1}, {"entrypoint_num_gpus": 1}),
        ({"memory": "1K"}, {"entrypoint_memory": 1024}),
    ],
)
def test_a_job_always_asks_for_something_because_ray_runs_others_on_the_head_node(
    options: dict[str, Any], reserved: dict[str, Any]
):
    job = RayExecutor(**options).plan(request_of(""))["job"]
    assert {name: value for name, value in job.items() if name.startswith("entrypoint_")} == reserved


def test_an_address_with_a_password_is_refused_without_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"https://me:{SECRET}@ray.example")
    for options in ({}, {"address": f"https://{SECRET}@ray.example:8265"}):
        with pytest.raises(ValueError, match="RAY_JOB_HEADERS") as refused:
            RayExecutor(**options)
        assert SECRET not in str(refused.value)


def test_the_request_of_a_job_as_it_is_sent(dashboard: Dashboard):
    dashboard.answers["/api/jobs/"] = 200, {"submission_id": NAME}
    dashboard.answers["/api/packages/gcs/"] = 200, b""
    options: dict[str, Any] = {"gpu": 1, "cpu": 4, "memory": "2G", "resources": ["big=0.5"], "python": "/env/python"}
    executor = RayExecutor(
        address=dashboard.address, runtime_env={"uv": ["datasets"], "env_vars": {"A": "1"}}, **options
    )
    request = request_of("print(1)", env={"PLAIN": "value"}, secrets={"KEY": SECRET}, timeout_s=60.0)
    assert executor.launch(request).native_id == NAME
    (reserve, put, post) = dashboard.asked
    assert (reserve[0], put[0]) == ("GET", "PUT") and SECRET.encode() in put[2]
    sent = json.loads(post[2])
    entrypoint = sent.pop("entrypoint")
    package = "gcs://" + put[1].rpartition("/")[2]
    assert sent == {
        "submission_id": NAME,
        "metadata": LABELS,
        "runtime_env": {
            "uv": ["datasets"],
            "env_vars": {
                "A": "1",
                "PLAIN": "value",
                "DILOCO_COMMAND": "timeout --foreground --kill-after=60 60 /env/python -u -c 'print(1)'",
                "DILOCO_STARTED": f"-- {NAME} --",
                "RAY_JOB_STOP_WAIT_TIME_S": "120",
            },
            "py_modules": [package],
        },
        "entrypoint_num_gpus": 1,
        "entrypoint_num_cpus": 4,
        "entrypoint_memory": 2 * 2**30,
        "entrypoint_resources": {"big": 0.5},
    }
    assert entrypoint.endswith('eval "exec $DILOCO_COMMAND"') and SECRET not in post[2].decode()
    assert {each[3]["Authorization"] for each in dashboard.asked} == {"Bearer the-token"}
    assert SECRET not in repr(executor.plan(request)) and "KEY" in repr(executor.plan(request))


@pytest.mark.parametrize(
    ("listed", "state", "reason", "code"),
    [
        (job("PENDING", message="It may be waiting for resources (CPUs)"), "pending", "no_capacity", None),
        (job("RUNNING"), "running", "", None),
        (job("SUCCEEDED", driver_exit_code=0), "succeeded", "exit", 0),
        (job("STOPPED"), "cancelled", "user", None),
        (job("FAILED", driver_exit_code=78), "failed", "permanent", 78),
        (job("FAILED", driver_exit_code=75), "preempted", "exit", 75),
        (job("FAILED", driver_exit_code=-9), "failed", "exit", -9),
        (job("FAILED", error_type="JOB_SUPERVISOR_ACTOR_DIED"), "preempted", "lost", None),
        (job("FAILED", error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT"), "failed", "no_capacity", None),
        (job("FAILED", error_type="RUNTIME_ENV_SETUP_FAILURE"), "failed", "image", None),
        (job("RESTING"), "unknown", "", None),
    ],
)
def test_a_state_of_a_job_is_one_of_ours(dashboard: Dashboard, listed: Any, state: str, reason: str, code: int | None):
    dashboard.answers["/api/jobs/"] = 200, [listed, {"submission_id": None, "status": "RUNNING"}]
    (handle,) = RayExecutor(address=dashboard.address).find("contract-run")
    status = RayExecutor(address=dashboard.address).poll(handle)
    assert (status.state, status.reason, status.exit_code) == (ReplicaState(state), reason, code)


def test_the_end_of_a_log_in_a_message_is_left_out(dashboard: Dashboard):
    told = job("FAILED", error_type="RUNTIME_ENV_SETUP_FAILURE", message="no such package\n" + "x" * 9000)
    dashboard.answers["/api/jobs/"] = 200, [told]
    (handle,) = RayExecutor(address=dashboard.address).find("contract-run")
    assert RayExecutor(address=dashboard.address).poll(handle).message == "no such package"


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (503, b"busy", Unavailable, "try again"),
        (500, b"Traceback\n  x\nRuntimeError: no agent", Unavailable, "no agent"),
        (500, b"Traceback\n  x\nValueError: Invalid keys in runtime_env", ExecutorDenied, "Invalid keys"),
        (401, b"Unauthorized: Missing authentication token", ExecutorDenied, "RAY_AUTH_TOKEN"),
        (403, b"Forbidden", ExecutorDenied, "RAY_AUTH_TOKEN"),
        (404, b"nothing here", ExecutorDenied, "that of Ray's dashboard"),
        (302, b"", Unavailable, "RAY_JOB_HEADERS"),
        (200, b"<html>login</html>", Unavailable, "HTML page"),
        (200, {"error": "x"}, Unavailable, "other fields"),
        (200, None, Unavailable, "null"),
    ],
)
def test_what_a_dashboard_or_a_proxy_before_it_says_is_told_apart(
    dashboard: Dashboard, status: int, body: Any, error: type[Exception], words: str
):
    dashboard.answers["/api/jobs/"] = status, body
    executor = RayExecutor(address=dashboard.address)
    for call in (lambda: executor.launch(request_of("pass")), lambda: executor.find("contract-run")):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "the-token" not in str(caught.value)


def test_a_dashboard_that_cannot_be_reached_is_unavailable():
    with pytest.raises(Unavailable, match="port-forward"):
        RayExecutor(address="http://127.0.0.1:9").find("contract-run")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": -1}, "write 1, for one for each rank"),
        ({"cpu": 0}, "one CPU or more"),
        ({"memory": "lots"}, "is no size"),
        ({"resources": ["A100"]}, "NAME=AMOUNT"),
        ({"address": "ray://head:10001"}, "that of Ray's dashboard"),
    ],
)
def test_an_option_that_ray_cannot_mean_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        RayExecutor(**options)
