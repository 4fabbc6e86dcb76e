"""Answers of another form than the provider's, with HTTP 200, through the real SDKs: they say nothing of attempts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import held_services
import pytest

from executors.answers import odd_reply
from executors.contract import ReplicaHandle, ReplicaState, ServerlessExecutor, Unavailable
from executors.slurm_objects import accounted_jobs, queued_jobs
from executors.testing import request_of

SHAPES = {
    "an error": b'{"error": "upstream is away"}',
    "null": b"null",
    "a list": b"[]",
    "a page": b"<!doctype html><html><body>Please log in</body></html>",
    "half": b'{"kind": "JobList", "apiVersion": "batch/v1", "items": [{"metadata": {"na',
}
PLACES = ["hugging_face", "kubernetes", "eks", "modal", "slurm"]
CALLS: dict[str, Callable[[ServerlessExecutor, ReplicaHandle], object]] = {
    "launch": lambda executor, handle: executor.launch(request_of("pass", attempt=2)),
    "cancel": lambda executor, handle: executor.cancel(handle),
    "find": lambda executor, handle: executor.find(handle.run_id),
    "logs": lambda executor, handle: list(executor.logs(handle)),
    "followed logs": lambda executor, handle: list(executor.logs(handle, follow=True)),
}
# Slurm's output is a file, which no tool of Slurm's reads.
CALLS_OF = {place: [call for call in CALLS if place != "slurm" or "logs" not in call] for place in PLACES}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For how long a log is followed without an answer."""
    monkeypatch.setattr("executors.kubernetes_jobs._FOLLOWS_FOR_S", 0.0)
    monkeypatch.setattr("executors.kubernetes_jobs._POLL_LOG_S", 0.01)
    monkeypatch.setattr("executors.hf_api._SILENCE_S", 0.2)


@pytest.mark.parametrize("place", PLACES)
def test_an_answer_of_another_form_is_an_outage_in_every_call(place: str, tmp_path: Path):
    with getattr(held_services, place)(tmp_path) as service:
        service.hold(True)
        executor = service.executor
        handle = executor.launch(request_of("pass"))
        other = executor.launch(request_of("pass", replica_id=1))
        before = executor.poll(handle).state
        for shape, odd in SHAPES.items():
            service.break_with({"odd": odd})
            for call in CALLS_OF[place]:
                if (place, shape, call) == ("hugging_face", "a list", "find"):  # where it is the form: there is none
                    continue
                with pytest.raises(Unavailable, match=r"ry again"):
                    CALLS[call](executor, handle)
            assert executor.poll(handle).state is ReplicaState.UNKNOWN, shape
            assert {each.state for each in executor.poll_many([handle, other])} == {ReplicaState.UNKNOWN}, shape
            service.heal()
        assert executor.poll(handle).state is before is ReplicaState.PENDING  # nothing was ended, nothing remembered
        assert executor.find(handle.run_id) == [handle, other]
        assert executor.launch(request_of("pass", attempt=2)).attempt == 2
        assert sorted(service.machines()) == [("0", "1"), ("0", "2"), ("1", "1")]


@pytest.mark.parametrize("odd", [*SHAPES.values(), b'{"cluster": {"name": "night-shift", "status": "CREATING"}}'])
def test_a_login_to_eks_meets_an_answer_that_is_not_aws(odd: bytes, monkeypatch: pytest.MonkeyPatch):
    import loopback_eks

    from executors.eks_jobs import EKSExecutor

    with answering(odd) as url:
        for name, value in loopback_eks.environ(url).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Unavailable, match="describing cluster"):
            EKSExecutor(loopback_eks.CLUSTER, region=loopback_eks.REGION).find("run")


def test_an_exit_code_is_read_once_there_is_a_log_again(tmp_path: Path):
    """A job in ERROR, whose log is a page at first: the code of its exit line still counts."""
    from loopback_hf import LoopbackHF

    from executors.hf_jobs import HFJobsExecutor
    from executors.testing import wait_until

    with LoopbackHF() as service:
        executor = HFJobsExecutor(endpoint=service.endpoint, token=service.token)
        code = """print('DILOCO_EXIT {"code": 75}'); raise SystemExit(75)"""
        handle = executor.launch(request_of(code))
        wait_until(lambda: service.jobs[handle.native_id].ended, "the job has ended")
        service.odd_logs = SHAPES["a page"]
        assert executor.poll(handle).exit_code is None
        service.odd_logs = None
        assert (executor.poll(handle).state, executor.poll(handle).exit_code) == (ReplicaState.PREEMPTED, 75)


@pytest.mark.parametrize("odd", [*(body.decode() for body in SHAPES.values()), "Welcome to the cluster!\n", "12 RUN"])
def test_what_slurm_never_prints_is_no_empty_queue(odd: str):
    for read in (queued_jobs, accounted_jobs):
        with pytest.raises(Unavailable, match="table of jobs"):
            read(odd)
        assert read("") == {}


def test_an_answer_of_another_form_shows_none_of_its_values(tmp_path: Path):
    with held_services.hugging_face(tmp_path) as service:
        service.break_with({"odd": b'{"token": "hf_someone_elses"}'})
        with pytest.raises(Unavailable, match="other fields \\(token\\)") as caught:
            service.executor.find("run")
        assert "hf_someone" not in str(caught.value)


def test_an_answer_of_another_form_is_told_in_a_line():
    told = str(odd_reply("asking", "a job", {f"{i}{'x' * 1000}": i for i in range(1000)}))
    assert told.startswith("asking: the answer is an object with other fields (0xxx") and len(told) < 400


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """The URL of a server that answers everything with HTTP 200 and `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
