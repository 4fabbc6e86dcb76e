"""The executor contract on a loopback Hugging Face Jobs service, and what is special to that service."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from loopback_hf import LoopbackHF

from executors.contract import (
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    MissingSdk,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
)
from executors.hf_jobs import HFJobsExecutor
from executors.hf_objects import Job, JobOptions, hourly_usd_of, job_arguments, seconds_of, status_of
from executors.testing import ExecutorContract, Rig, ended_state, request_of, wait_until

_STAY = "import time; print('here', flush=True); time.sleep(600)"


def executor_of(service: LoopbackHF, **options: Any) -> HFJobsExecutor:
    return HFJobsExecutor(endpoint=service.endpoint, token=service.token, **options)


@pytest.fixture
def service() -> Iterator[LoopbackHF]:
    with LoopbackHF() as service:
        yield service


class HFRig(Rig):
    construct = "from executors.hf_jobs import HFJobsExecutor; executor = HFJobsExecutor()"

    def __init__(self, service: LoopbackHF) -> None:
        self._service = service
        self.environ = service.environ
        self.credentials = (service.token, "hf_wrong_token_5521")

    def executor(self) -> HFJobsExecutor:
        return executor_of(self._service)

    def denied(self) -> HFJobsExecutor:
        return HFJobsExecutor(endpoint=self._service.endpoint, token="hf_wrong_token_5521")

    def preempt(self, handle: ReplicaHandle) -> None:
        self._service.end(handle.native_id)

    def hold(self, on: bool) -> None:
        self._service.hold(on)

    def no_capacity(self, on: bool) -> None:
        self._service.without_capacity = on

    def failing(self, on: bool) -> None:
        self._service.failing = 500 if on else 0

    def forget(self, handle: ReplicaHandle) -> None:
        self._service.forget(handle.native_id)

    def refuse(self, replica_id: int) -> None:
        self._service.refused.append({"diloco-replica": str(replica_id)})

    def machines(self, run_id: str) -> int:
        return len(self._service.carrying({"diloco-run": run_id}))


class TestHFJobs(ExecutorContract):
    may_double = True
    tells_exit_codes = False

    @pytest.fixture
    def rig(self, service: LoopbackHF) -> HFRig:
        return HFRig(service)

    @pytest.mark.slow  # two processes that import the SDK; local processes show the same in less time
    def test_two_processes_that_launch_the_same_attempt_get_the_same_one(self, rig, executor):
        super().test_two_processes_that_launch_the_same_attempt_get_the_same_one(rig, executor)


# -- the request ------------------------------------------------------------------------------------------------------

REQUEST = LaunchRequest("my-run", 2, 3, ["python", "-m", "train"], env={"A": "b"}, secrets={"KEY": "hush"})
OPTIONS = JobOptions("l4x1", "torch", 5400, {"E": "f"}, {})


def test_a_request_becomes_a_job():
    assert job_arguments(REQUEST, replace(OPTIONS, secrets={"HF_TOKEN": "hf_x"})) == {
        "image": "torch",
        "command": ["python", "-m", "train"],
        "env": {"E": "f", "A": "b", "DILOCO_LEAVE_AFTER_S": "5100"},
        "secrets": {"HF_TOKEN": "hf_x", "KEY": "hush"},
        "flavor": "l4x1",
        "timeout": 5400,
        "labels": {
            "diloco-run": "my-run",
            "diloco-replica": "2",
            "diloco-attempt": "3",
            "diloco-timeout-s": "5400",
            "name": "dl-my-run-r2-a3",
        },
        "volumes": [],
    }


def test_the_time_limit_of_the_request_comes_first():
    job = job_arguments(replace(REQUEST, timeout_s=0.2), OPTIONS)
    assert (job["timeout"], job["labels"]["diloco-timeout-s"]) == (1, "1")


def test_a_plan_shows_what_is_sent_without_its_secrets():
    executor = HFJobsExecutor("h200", namespace="org", secrets={"HF_TOKEN": "hf_x"}, timeout="90m")
    assert executor.plan(REQUEST) == {
        **job_arguments(REQUEST, replace(OPTIONS, hardware="h200", image="python:3.11", env={})),
        "secrets": {"HF_TOKEN": "<redacted>", "KEY": "<redacted>"},
        "namespace": "org",
    }


@pytest.mark.parametrize("run_id", ["my-run", "My Run", "läufe/7", "x" * 200, ""])
def test_every_label_is_one_that_the_service_takes(run_id: str):
    labels = job_arguments(replace(REQUEST, run_id=run_id), OPTIONS)["labels"]
    for text in (*labels, *labels.values()):
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,100}", text), text


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [("24h", 86400), ("90m", 5400), ("1.5h", 5400), ("2d", 172800), ("7s", 7), (30, 30), (0.5, 1)],
)
def test_a_time_limit_is_read(timeout: str | float, seconds: int):
    assert seconds_of(timeout) == seconds


@pytest.mark.parametrize("timeout", ["", "soon", "-1h", 0, "0m", float("nan"), float("inf")])
def test_what_is_no_time_limit_is_refused(timeout: str | float):
    with pytest.raises(ValueError, match="Write '24h'"):
        HFJobsExecutor(timeout=timeout)


def test_the_price_is_what_the_service_says_now(service: LoopbackHF):
    executor = executor_of(service, hardware="t4-small")
    price = executor.price(REQUEST)
    assert price is not None and price.hourly_usd == pytest.approx(0.40002) and price.source.endswith("now")
    executor.price(REQUEST), executor.check_machine()
    assert [path for _, path, _ in service.requests].count("/api/jobs/hardware") == 1


def test_hardware_that_the_service_does_not_have_is_refused_with_the_nearest(service: LoopbackHF):
    with pytest.raises(ValueError, match="unknown hardware 't4-smal': did you mean 't4-small'"):
        executor_of(service, hardware="t4-smal").check_machine()


def test_out_of_reach_of_the_service_prices_are_those_of_the_table():
    def away(hardware: str) -> HFJobsExecutor:
        return HFJobsExecutor(hardware, endpoint="http://127.0.0.1:9", token="hf_none")

    assert (away("a100-large").price(REQUEST).hourly_usd, away("h200").price(REQUEST).hourly_usd) == (2.50, 5.00)
    assert away("cpu-basic").price(REQUEST).hourly_usd == 0.01 and away("next-year").price(REQUEST) is None
    away("no-such").check_machine()


@pytest.mark.parametrize(
    ("entry", "usd"),
    [
        ({"unitLabel": "minute", "unitCostUSD": 0.01}, 0.6),
        ({"unitLabel": "hour", "unitCostUSD": 2.5}, 2.5),
        ({"unitLabel": "fortnight", "unitCostUSD": 1}, None),
        ({"unitLabel": "minute"}, None),
    ],
)
def test_a_price_in_any_unit_is_one_by_the_hour(entry: dict[str, Any], usd: float | None):
    assert hourly_usd_of(entry) == usd


def test_volumes_reach_the_service(service: LoopbackHF):
    volumes = ["hf://datasets/org/text/train:/data:ro", "hf://buckets/org/runs:/mnt:rw", "hf://org/model:/model"]
    executor_of(service, volumes=volumes).launch(request_of("pass"))
    (body,) = [body for method, path, body in service.requests if method == "POST"]
    assert body["volumes"] == [
        {"type": "dataset", "source": "org/text", "mountPath": "/data", "readOnly": True, "path": "train"},
        {"type": "bucket", "source": "org/runs", "mountPath": "/mnt", "readOnly": False},
        {"type": "model", "source": "org/model", "mountPath": "/model"},
    ]


@pytest.mark.parametrize(
    ("volumes", "words"),
    [
        ("hf://org/model:/model", "is one string"),
        (["org/model:/model"], "is not of the form"),
        (["hf://datasets/org/text:data"], "is not of the form"),
        (["hf://org/a:/model", "hf://org/b:/model"], "two are mounted at /model"),
    ],
)
def test_a_volume_that_cannot_be_mounted_is_refused(volumes: Any, words: str):
    with pytest.raises(ValueError, match=words):
        HFJobsExecutor(volumes=volumes)


# -- the reply --------------------------------------------------------------------------------------------------------


def job_in(stage: str, ran_s: int = 10) -> dict[str, Any]:
    return {
        "id": "1",
        "startedAt": "2026-01-01T00:00:00.000Z",
        "finishedAt": f"2026-01-01T00:{ran_s // 60:02}:{ran_s % 60:02}.000Z",
        "labels": {"diloco-timeout-s": "600"},
        "status": {"stage": stage, "message": "words"},
    }


@pytest.mark.parametrize(
    ("stage", "ran_s", "told", "state", "reason", "code"),
    [
        ("SCHEDULING", 10, None, ReplicaState.PENDING, "", None),
        ("RUNNING", 10, None, ReplicaState.RUNNING, "", None),
        ("COMPLETED", 10, None, ReplicaState.SUCCEEDED, "exit", 0),
        ("COMPLETED", 600, None, ReplicaState.SUCCEEDED, "exit", 0),
        ("CANCELED", 10, None, ReplicaState.CANCELLED, "user", None),
        ("CANCELED", 600, None, ReplicaState.TIMED_OUT, "deadline", None),
        ("DELETED", 10, None, ReplicaState.PREEMPTED, "lost", None),
        ("ERROR", 10, None, ReplicaState.FAILED, "lost", None),
        ("ERROR", 600, None, ReplicaState.TIMED_OUT, "deadline", None),
        ("ERROR", 601, 75, ReplicaState.TIMED_OUT, "deadline", None),
        ("ERROR", 10, 0, ReplicaState.FAILED, "lost", None),
        ("ERROR", 10, 1, ReplicaState.FAILED, "exit", 1),
        ("ERROR", 10, 75, ReplicaState.PREEMPTED, "exit", 75),
        ("ERROR", 10, 76, ReplicaState.FAILED, "superseded", 76),
        ("ERROR", 10, 78, ReplicaState.FAILED, "permanent", 78),
        ("PAUSED", 10, None, ReplicaState.UNKNOWN, "", None),
    ],
)
def test_a_stage_becomes_a_state(
    stage: str, ran_s: int, told: int | None, state: ReplicaState, reason: str, code: int | None
):
    assert status_of(job_in(stage, ran_s), told) == ReplicaStatus(state, reason, code, stage, "words")


def test_a_job_without_times_or_labels_has_a_state_too():
    job = {"id": "1", "startedAt": None, "finishedAt": None, "labels": None, "status": {"stage": "ERROR"}}
    assert status_of(job) == ReplicaStatus(ReplicaState.FAILED, "lost", None, "ERROR", "")


# -- the service ------------------------------------------------------------------------------------------------------


def test_the_sdk_is_asked_for_by_name_if_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    executor = HFJobsExecutor()
    executor.plan(REQUEST)
    with pytest.raises(MissingSdk, match=r"pip install 'diloco-orchestrator\[hf\]'"):
        executor.launch(REQUEST)


def test_the_wire_carries_the_job_and_whoami_is_asked_once(service: LoopbackHF):
    executor = executor_of(service, secrets={"ALL": "1"}, env={"X": "y"})
    for attempt in (1, 2):
        executor.launch(request_of("pass", attempt=attempt, secrets={"KEY": "hush"}))
    executor.find("contract-run")
    posts = [body for method, path, body in service.requests if (method, path) == ("POST", "/api/jobs/ada")]
    assert posts[0] == {
        "command": ["python", "-u", "-c", "pass"],
        "arguments": [],
        "environment": {"X": "y", "DILOCO_LEAVE_AFTER_S": "86100"},
        "secrets": {"ALL": "1", "KEY": "hush"},
        "flavor": "cpu-basic",
        "timeoutSeconds": 86400,
        "dockerImage": "python:3.11",
        "labels": {
            "diloco-run": "contract-run",
            "diloco-replica": "0",
            "diloco-attempt": "1",
            "diloco-timeout-s": "86400",
            "name": "dl-contract-run-r0-a1",
        },
    }
    assert [path for _, path, _ in service.requests].count("/api/whoami-v2") == 1


def test_a_replica_that_was_asked_to_leave_says_so_itself(service: LoopbackHF):
    leave = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('here', flush=True); "
        "signal.sigwait([signal.SIGTERM]); print('DILOCO_EXIT {\"code\": 75}', flush=True); raise SystemExit(75)"
    )
    executor = executor_of(service)
    handle = executor.launch(request_of(leave))
    wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
    service.end(handle.native_id)
    assert ended_state(executor, handle) is ReplicaState.PREEMPTED
    assert executor_of(service).poll_many([handle, handle])[1].exit_code == 75


def test_the_log_of_a_failed_job_is_read_once(service: LoopbackHF):
    executor = executor_of(service)
    handle = executor.launch(request_of("print('said'); raise SystemExit(1)"))
    assert ended_state(executor, handle) is ReplicaState.FAILED
    executor.poll_many([handle, handle])
    assert sum("/logs" in path for _, path, _ in service.requests) == 1


def test_a_launch_whose_reply_was_lost_is_adopted(service: LoopbackHF):
    executor = executor_of(service)
    service.loses_replies = True
    handle = executor.launch(request_of(_STAY))
    assert [handle.native_id] == list(service.jobs)


def test_a_launcher_that_was_not_first_takes_the_older_job_and_ends_its_own(
    service: LoopbackHF, monkeypatch: pytest.MonkeyPatch
):
    first, second = executor_of(service), executor_of(service)
    find, calls = second._api.find, []

    def find_too_early(*args: Any) -> list[Job]:
        calls.append(args)
        return [] if len(calls) == 1 else find(*args)

    kept = first.launch(request_of(_STAY))
    monkeypatch.setattr(second._api, "find", find_too_early)
    assert second.launch(request_of(_STAY)).native_id == kept.native_id
    _, surplus = service.jobs
    wait_until(lambda: service.jobs[surplus].status()[0] == "CANCELED", "the surplus ends")
    assert [handle.native_id for handle in first.find("contract-run")] == [kept.native_id]


def test_a_fleet_is_polled_by_one_listing_over_all_its_pages(service: LoopbackHF):
    executor = executor_of(service)
    handles = [executor.launch(request_of(_STAY, replica_id=replica_id)) for replica_id in range(5)]
    service.requests.clear()
    assert [status.state for status in executor.poll_many(handles)] == [ReplicaState.RUNNING] * 5
    assert len(service.requests) == 3  # five jobs, two on a page
    for number in (2, 3):  # attempts that have ended stay listed for ever, and are not asked for
        ended_state(executor, executor.launch(request_of("pass", attempt=number)))
    service.requests.clear()
    assert [status.state for status in executor.poll_many(handles)] == [ReplicaState.RUNNING] * 5
    assert len(service.requests) == 3
    service.forget(handles[0].native_id)
    assert [status.reason for status in executor.poll_many(handles)] == ["lost", "", "", "", ""]
    service.failing = 500
    assert [status.state for status in executor.poll_many(handles)] == [ReplicaState.UNKNOWN] * 5


def test_a_deleted_job_is_lost_unless_it_was_cancelled_here(service: LoopbackHF):
    executor = executor_of(service)
    handle = executor.launch(request_of(_STAY))
    executor.cancel(handle)
    service.delete(handle.native_id)
    assert executor.poll(handle).state is ReplicaState.CANCELLED
    assert executor_of(service).poll(handle).state is ReplicaState.PREEMPTED


def test_another_process_sees_a_cancel_as_one(service: LoopbackHF):
    executor = executor_of(service)
    handle = executor.launch(request_of(_STAY))
    executor.cancel(handle)
    assert ended_state(executor_of(service), handle) is ReplicaState.CANCELLED


def test_a_silent_service_is_unknown_and_blocks_nobody(service: LoopbackHF, monkeypatch: pytest.MonkeyPatch):
    executor = executor_of(service)
    handle = executor.launch(request_of(_STAY))
    monkeypatch.setattr("executors.hf_api._READ_TIMEOUT_S", 0.05)
    service.delay_s = 1.0
    status = executor.poll(handle)
    assert status.state is ReplicaState.UNKNOWN and "Timeout" in status.message


def test_an_unreachable_service_is_an_error_of_ours():
    executor = HFJobsExecutor(endpoint="http://127.0.0.1:9", token="hf_x", namespace="ada")
    where = {"endpoint": "http://127.0.0.1:9", "namespace": "ada", "job_id": "1"}
    handle = ReplicaHandle("hf-jobs", "r", 0, 1, "1", where)
    assert executor.poll(handle).state is ReplicaState.UNKNOWN
    for call in (lambda: executor.launch(REQUEST), lambda: executor.find("r"), lambda: executor.cancel(handle)):
        with pytest.raises(ExecutorError, match="try again"):
            call()


def test_the_token_goes_to_no_endpoint_that_only_a_handle_names(service: LoopbackHF):
    stranger = ReplicaHandle("hf-jobs", "r", 0, 1, "1", {"endpoint": "http://evil", "namespace": "ada", "job_id": "1"})
    with pytest.raises(ExecutorError, match="http://evil"):
        executor_of(service).poll(stranger)


def test_a_namespace_of_others_is_denied(service: LoopbackHF):
    with pytest.raises(ExecutorDenied, match="HTTP 403"):
        executor_of(service, namespace="google").launch(request_of("pass"))


def test_a_long_log_arrives_whole_while_it_runs_and_after(service: LoopbackHF):
    executor = executor_of(service)
    handle = executor.launch(request_of("for i in range(20000): print(i, 'x' * 10)"))
    assert list(executor.logs(handle, follow=True)) == list(executor.logs(handle))
    assert len(list(executor.logs(handle))) == 20000
