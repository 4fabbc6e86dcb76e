"""Replicas as Hugging Face Jobs: one labelled Job per attempt.

Knows the Jobs API of huggingface_hub. Leaves the run's bucket and what a replica does to others. The service

- has no idempotency key. An attempt's labels are its key: look for them before launching and again afterwards.
  Launchers that raced all keep the oldest job, and each cancels its own surplus. A double may live for a moment, until
  then fenced by the replica's claim in the bucket.
- tells no exit code. COMPLETED is 0. For ERROR the last output line `DILOCO_EXIT {json}` of a replica says more: one
  look at the log per job that ended so.
- has no word for a preemption. A replica that was asked to leave says 75 in that line: PREEMPTED. An ERROR without the
  line is FAILED, reason "lost": a crash (out of memory, say) looks the same, and has to spend the error budget. A job
  that the service deleted or forgot is PREEMPTED, reason "lost".
- has no word for a time-out. The limit travels as a label; a job that failed or was ended after that long TIMED_OUT.
"""

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from executors.contract import (
    BY_EXIT_CODE,
    EXIT_DONE,
    ExecutorClock,
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    MissingSdk,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    SystemExecutorClock,
    plain_options,
)
from executors.function_launch import parse_exit_line
from executors.remote_base import (
    LABEL_ATTEMPT,
    LABEL_REPLICA,
    LABEL_RUN,
    RemoteExecutor,
    attempt_labels,
    attempt_name,
    check_resources,
    env_within,
    run_label,
)

LABEL_TIMEOUT = "diloco-timeout-s"  # no reply of the service holds the limit
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,100}")
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_READ_TIMEOUT_S = 10.0
_EXIT_TAIL_LINES = 5

# Per hour, as seen 2026-11; `hf jobs hardware` lists what holds now.
_HOURLY_USD = {
    "t4-small": 0.40,
    "l4x1": 0.80,
    "a10g-small": 1.00,
    "l40sx1": 1.80,
    "a100-large": 2.50,
    "h200": 5.00,
}

_BY_STAGE = {
    "SCHEDULING": (ReplicaState.PENDING, ""),
    "RUNNING": (ReplicaState.RUNNING, ""),
    "COMPLETED": (ReplicaState.SUCCEEDED, "exit"),
    "CANCELED": (ReplicaState.CANCELLED, "user"),
    "ERROR": (ReplicaState.FAILED, "lost"),
    "DELETED": (ReplicaState.PREEMPTED, "lost"),
}


class HFJobsExecutor(RemoteExecutor):
    """Runs each attempt as a Hugging Face Job. Needs a token that may write Jobs, and positive credit.

    `resources` of a request: `hardware`, as below.

    Args:
        hardware: what `hf jobs hardware` lists, such as "cpu-basic", "t4-small", "a100-large".
        image: Docker image of the jobs, "python:3.11" if None; one that brings torch is much faster to start.
        namespace: user or organisation that owns and pays the jobs; the token's own user if None.
        token: a Hugging Face token; what `hf auth login` or HF_TOKEN left if None.
        timeout: limit of a job that asks for none, such as "24h", "90m" or a number of seconds.
        secrets: secret environment variables of every job.
        env: environment variables of every job.
        endpoint: URL of the Hub; HF_ENDPOINT or https://huggingface.co if None.
        clock: time, for tests.
    """

    name = "hf-jobs"

    def __init__(
        self,
        hardware: str = "cpu-basic",
        *,
        image: str | None = None,
        namespace: str | None = None,
        token: str | None = None,
        timeout: str | float = "24h",
        secrets: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        clock: ExecutorClock | None = None,
    ) -> None:
        self.options = plain_options(locals())
        if not hardware:
            raise ValueError("hardware is empty. Name one that `hf jobs hardware` lists, such as 'cpu-basic'.")
        self._hardware, self._image = hardware, image or "python:3.11"
        self._timeout_s = seconds_of(timeout)
        self._secrets, self._env = dict(secrets or {}), dict(env or {})
        self._given_namespace, self._token, self._given_endpoint = namespace, token, endpoint
        self._clock = clock or SystemExecutorClock()
        self._found_namespace: str | None = None
        self._lock = threading.Lock()
        self._cancelled: set[str] = set()
        self._told_codes: dict[str, int | None] = {}  # by job in ERROR, so that its log is read once

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The arguments of `run_job`, secrets redacted. `namespace` None: the token's own user."""
        job = self._job(request)
        return {**job, "secrets": dict.fromkeys(job["secrets"], "<redacted>"), "namespace": self._given_namespace}

    def _job(self, request: LaunchRequest) -> dict[str, Any]:
        return job_arguments(
            request,
            hardware=self._hardware,
            image=self._image,
            timeout_s=self._timeout_s,
            env=self._env,
            secrets=self._secrets,
        )

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        job = self._job(request)
        labels = {name: job["labels"][name] for name in (LABEL_RUN, LABEL_REPLICA, LABEL_ATTEMPT)}
        jobs = self._list(labels)
        if jobs:
            return self._handle(request.run_id, _kept(jobs))
        try:
            with _errors_of(f"launching {attempt_name(request)} on {job['flavor']}", launching=True):
                own = str(self._api().run_job(**job, namespace=self._namespace()).id)
        except ExecutorDenied:
            raise
        except ExecutorError:
            jobs = self._list(labels)  # perhaps only the reply was lost
            if not jobs:
                raise
            return self._handle(request.run_id, _kept(jobs))
        jobs = self._list(labels)
        if all(job["id"] != own for job in jobs):
            jobs.append(self._get(f"/{own}"))
        kept = _kept(jobs)
        if kept["id"] != own:  # another launcher was first
            self._cancel(own, self._namespace())
        return self._handle(request.run_id, kept)

    def _handle(self, run_id: str, job: Mapping[str, Any]) -> ReplicaHandle:
        labels = job["labels"]
        return ReplicaHandle(
            executor=self.name,
            run_id=run_id,
            replica_id=int(labels[LABEL_REPLICA]),
            attempt=int(labels[LABEL_ATTEMPT]),
            native_id=job["id"],
            native={"endpoint": self._endpoint(), "namespace": self._namespace(), "job_id": job["id"]},
        )

    def hourly_usd(self, request: LaunchRequest) -> float | None:
        """The price of one replica's hour, None where it is not known here."""
        return _HOURLY_USD.get(str(request.resources.get("hardware", self._hardware)))

    # -- watching ------------------------------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        self._check_endpoint(handle)
        try:
            return self._status(handle, self._get(f"/{handle.native_id}", handle.native["namespace"]))
        except _Gone:
            return self._gone(handle.native_id)
        except ExecutorDenied:
            raise
        except ExecutorError as error:
            return ReplicaStatus(ReplicaState.UNKNOWN, message=str(error))

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """One listing per run; what it does not show is polled alone."""
        if len(handles) < 2:
            return super().poll_many(handles)
        seen: dict[str, dict[str, Any]] = {}
        for run_id, namespace in sorted({(h.run_id, h.native["namespace"]) for h in handles}):
            try:
                jobs = self._list({LABEL_RUN: run_label(run_id)}, namespace)
            except ExecutorDenied:
                raise
            except ExecutorError as error:
                return [ReplicaStatus(ReplicaState.UNKNOWN, message=str(error)) for _ in handles]
            seen |= {job["id"]: job for job in jobs}
        return [self._status(h, seen[h.native_id]) if h.native_id in seen else self.poll(h) for h in handles]

    def _status(self, handle: ReplicaHandle, job: Mapping[str, Any]) -> ReplicaStatus:
        status = status_of(job)
        if status.native_state == "DELETED":
            return self._gone(handle.native_id, status.native_state)
        if status.native_state == "CANCELED" and handle.native_id in self._cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", None, "CANCELED", status.message)
        if status.state is not ReplicaState.FAILED:
            return status
        return status_of(job, self._told_code(handle))

    def _gone(self, job_id: str, native_state: str = "gone") -> ReplicaStatus:
        if job_id in self._cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", None, native_state)
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", None, native_state, "the service has forgotten the job")

    def _told_code(self, handle: ReplicaHandle) -> int | None:
        """The exit code that the replica told in its last line of output, if it could."""
        if handle.native_id not in self._told_codes:
            try:
                told = parse_exit_line(self.logs(handle, tail=_EXIT_TAIL_LINES)) or {}
            except ExecutorError:
                return None  # the job has ended all the same; the next poll looks again
            code = told.get("code")
            self._told_codes[handle.native_id] = code if isinstance(code, int) else None
        return self._told_codes[handle.native_id]

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ends the job; other processes see CANCELLED too. Whether SIGTERM comes first is the service's choice."""
        self._check_endpoint(handle)
        self._cancel(handle.native_id, handle.native["namespace"])

    def _cancel(self, job_id: str, namespace: str) -> None:
        try:
            with _errors_of(f"cancelling job {job_id}"):
                self._api().cancel_job(job_id=job_id, namespace=namespace)
        except _Gone:
            return
        except ExecutorError:
            try:
                stage = self._get(f"/{job_id}", namespace)["status"]["stage"]
            except _Gone:
                return
            if not _BY_STAGE.get(stage, (ReplicaState.UNKNOWN, ""))[0].ended:
                raise
            return  # refused, because it had ended
        self._cancelled.add(job_id)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Nothing for a job that is gone. Without `follow`, a running job's log may take the SDK 5 s to read."""
        self._check_endpoint(handle)
        job_id, namespace = handle.native_id, handle.native["namespace"]
        try:
            with _errors_of(f"reading the log of job {job_id}"):
                for line in self._api().fetch_job_logs(job_id=job_id, namespace=namespace, follow=follow, tail=tail):
                    yield line.rstrip("\n")
        except _Gone:
            return

    def find(self, run_id: str) -> list[ReplicaHandle]:
        attempts: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for job in self._list({LABEL_RUN: run_label(run_id)}):
            key = int(job["labels"][LABEL_REPLICA]), int(job["labels"][LABEL_ATTEMPT])
            attempts.setdefault(key, []).append(job)
        return [self._handle(run_id, _kept(jobs)) for _, jobs in sorted(attempts.items())]

    # -- the service ---------------------------------------------------------------------------------------------

    def _api(self) -> Any:
        return _sdk().HfApi(endpoint=self._endpoint(), token=self._token)

    def _endpoint(self) -> str:
        return str(self._given_endpoint or _sdk().constants.ENDPOINT).rstrip("/")

    def _namespace(self) -> str:
        if self._given_namespace is not None:
            return self._given_namespace
        with self._lock:  # whoami has a strict rate limit
            if self._found_namespace is None:
                self._found_namespace = str(self._read(f"{self._endpoint()}/api/whoami-v2").json()["name"])
            return self._found_namespace

    def _check_endpoint(self, handle: ReplicaHandle) -> None:
        """Our token goes nowhere but to our own endpoint, whatever a handle says."""
        if handle.native["endpoint"] != self._endpoint():
            raise ExecutorError(
                f"job {handle.native_id} is at {handle.native['endpoint']}, this executor talks to {self._endpoint()}. "
                "Give the executor that endpoint, or set HF_ENDPOINT."
            )

    def _get(self, path: str, namespace: str | None = None) -> dict[str, Any]:
        return dict(self._read(f"{self._endpoint()}/api/jobs/{namespace or self._namespace()}{path}").json())

    def _list(self, labels: Mapping[str, str], namespace: str | None = None) -> list[dict[str, Any]]:
        """All jobs that carry these labels, ended ones too."""
        url: str | None = f"{self._endpoint()}/api/jobs/{namespace or self._namespace()}"
        params: dict[str, Any] | None = {"label": [f"{name}={value}" for name, value in labels.items()]}
        jobs: list[dict[str, Any]] = []
        try:
            while url:
                page = self._read(url, params)
                jobs += page.json()
                url, params = page.links.get("next", {}).get("url"), None
        except _Gone as error:  # it is the namespace that is not there
            raise ExecutorDenied(str(error)) from None
        # Looked through again: adopting another attempt's job, should a server ignore the filter, would be worse.
        return [job for job in jobs if labels.items() <= (job.get("labels") or {}).items()]

    def _read(self, url: str, params: Mapping[str, Any] | None = None) -> Any:
        """A GET by the SDK's own session: its `inspect_job` waits forever, its `list_jobs` retries for minutes."""
        utils = _sdk().utils
        if self._token is None and _sdk().get_token() is None:
            raise ExecutorDenied("there is no Hugging Face token here. Run `hf auth login`, or set HF_TOKEN.")
        with _errors_of(f"reading {url}"):
            headers = utils.build_hf_headers(token=self._token)
            response = utils.get_session().get(url, params=params, headers=headers, timeout=_READ_TIMEOUT_S)
            utils.hf_raise_for_status(response)
            response.json()
        return response


# -- the request ------------------------------------------------------------------------------------------------------


def job_arguments(
    request: LaunchRequest,
    *,
    hardware: str,
    image: str,
    timeout_s: int,
    env: Mapping[str, str],
    secrets: Mapping[str, str],
) -> dict[str, Any]:
    """The arguments of `run_job`, less the namespace. Raises ValueError for what the service would refuse."""
    check_resources(request, ["hardware"])
    limit_s = timeout_s if request.timeout_s is None else seconds_of(request.timeout_s)
    labels = {**attempt_labels(request), "name": attempt_name(request), LABEL_TIMEOUT: str(limit_s)}
    for name, value in labels.items():
        if not (_LABEL.fullmatch(name) and _LABEL.fullmatch(value)):
            raise ValueError(
                f"label {name}={value!r} is not one that Hugging Face takes. Use 1 to 100 of A-Z, a-z, 0-9, _ and -."
            )
    return {
        "image": request.image or image,
        "command": list(request.command),
        "env": {**env, **env_within(request, limit_s)},
        "secrets": {**secrets, **request.secrets},
        "flavor": str(request.resources.get("hardware", hardware)),
        "timeout": limit_s,
        "labels": labels,
    }


def seconds_of(timeout: str | float) -> int:
    """Whole seconds of "24h", "90m", "30s", "2d" or a number, rounded up. Raises ValueError."""
    match = _TIMEOUT.fullmatch(str(timeout))
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"timeout {timeout!r} is no time limit. Write '24h', '90m' or a number of seconds above 0.")
    return math.ceil(seconds)


# -- the reply --------------------------------------------------------------------------------------------------------


def status_of(job: Mapping[str, Any], told_code: int | None = None) -> ReplicaStatus:
    """What a job's description says. `told_code`: the exit code that the replica printed, for a job in ERROR."""
    stage, message = str(job["status"]["stage"]), str(job["status"].get("message") or "")
    state, reason = _BY_STAGE.get(stage, (ReplicaState.UNKNOWN, ""))
    if stage in ("ERROR", "CANCELED") and _ran_to_its_limit(job):
        return ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", None, stage, message)
    if stage == "ERROR" and told_code not in (None, EXIT_DONE):  # after a 0, something else went wrong
        state, reason = BY_EXIT_CODE.get(told_code or 0, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, reason, told_code, stage, message)
    return ReplicaStatus(state, reason, EXIT_DONE if stage == "COMPLETED" else None, stage, message)


def _ran_to_its_limit(job: Mapping[str, Any]) -> bool:
    """By the service's clock. A little less than the limit will do, because nobody says what its timer starts with."""
    limit, started, finished = (job.get("labels") or {}).get(LABEL_TIMEOUT), job.get("startedAt"), job.get("finishedAt")
    if not (limit and started and finished):
        return False
    ran_s = (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
    return ran_s >= int(limit) - min(1.0, 0.01 * int(limit))


def _kept(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one that every launcher of an attempt agrees on."""
    return min(jobs, key=lambda job: (datetime.fromisoformat(job["createdAt"]), job["id"]))


# -- errors -----------------------------------------------------------------------------------------------------------


class _Gone(ExecutorError):
    """The service knows no such job."""


def _sdk() -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise MissingSdk(
            "HFJobsExecutor needs huggingface_hub, which is not installed: pip install 'diloco-orchestrator[hf]'"
        ) from None
    return huggingface_hub


@contextmanager
def _errors_of(what: str, launching: bool = False) -> Iterator[None]:
    """Whatever the SDK raises becomes an error of ours."""
    http_error = _sdk().errors.HfHubHTTPError
    try:
        yield
    except http_error as error:
        words = getattr(error, "server_message", None) or error.response.reason_phrase
        raise _error_of_status(error.response.status_code, f"{what}: Hugging Face says {words!r}", launching) from None
    except (*http_error.__bases__, ValueError) as error:  # the HTTP library's own: httpx or, with later SDKs, httpx2
        raise ExecutorError(
            f"{what}: {type(error).__name__}: {error}. Look whether huggingface.co answers from here, and try again."
        ) from None


def _error_of_status(code: int, told: str, launching: bool) -> ExecutorError:
    told = f"{told} (HTTP {code})."
    if code in (401, 403):
        return ExecutorDenied(f"{told} Check the token (HF_TOKEN, `hf auth login`) and its right to write Jobs.")
    if code == 402:
        return ExecutorDenied(f"{told} Jobs need positive credit: see https://huggingface.co/settings/billing.")
    if code == 404 and not launching:
        return _Gone(f"{told} Check the job's id and the namespace.")
    if launching and code in (429, 503):  # not documented; nothing else could be meant that later would not cure
        return NoCapacity(f"{told} Try again later, or choose other hardware.")
    if 400 <= code < 500 and code not in (408, 409, 425, 429):
        return ExecutorDenied(f"{told} Correct the request: hardware, image, namespace, labels.")
    return ExecutorError(f"{told} This may pass; try again.")
