"""Replicas as Hugging Face Jobs: one labelled Job per attempt.

Requests and replies as data are in `hf_objects`, calls in `hf_api`. Features that the service lacks, and their
substitutes:

- An idempotency key. The labels of an attempt identify it: they are looked up before a launch and again after it.
  Launchers that raced all keep the oldest job and cancel their own. Until then a second job may run for a moment; the
  attempt's claim in the bucket makes it exit.
- Exit codes. COMPLETED is 0. For ERROR the code is read from the replica's exit line, by one read of the log per job.
- A stage for preemptions. PREEMPTED is an exit line with code 75. An ERROR without an exit line is FAILED, reason
  "lost", because a crash (such as out of memory) looks the same and has to spend the budget for errors. A job that
  the service deleted or no longer knows is PREEMPTED, reason "lost".
- A stage for time limits. The limit is kept as a label; a job that failed or was ended after that long is TIMED_OUT.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_orchestrator.executors.clock import Clock
from diloco_orchestrator.executors.constructor_options import plain_options, withheld
from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    ExecutorError,
    Identity,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
    in_order,
)
from diloco_orchestrator.executors.hf_api import HFJobsApi
from diloco_orchestrator.executors.hf_objects import (
    LIVE_STAGES,
    Job,
    JobOptions,
    has_ended,
    job_arguments,
    kept,
    seconds_of,
    status_of,
    volumes_of,
)
from diloco_orchestrator.executors.names import unknown_name
from diloco_orchestrator.executors.prices import HF_JOBS, Price, listed_tflops
from diloco_orchestrator.executors.process_contract import parse_exit_line
from diloco_orchestrator.executors.remote_base import (
    LABEL_ATTEMPT,
    LABEL_REPLICA,
    LABEL_RUN,
    RemoteExecutor,
    attempt_labels,
    attempt_name,
    run_label,
)

_EXIT_TAIL_LINES = 5


class HFJobsExecutor(RemoteExecutor):
    """Runs each attempt as a Hugging Face Job. Needs a token that may write Jobs, and positive credit.

    Args:
        hardware: what `hf jobs hardware` lists, such as "cpu-basic", "t4-small", "a100-large", or "a100x8" for replicas
            of eight ranks.
        image: Docker image of the jobs, "python:3.11" if None; one that brings torch is much faster to start.
        namespace: user or organisation that owns and pays the jobs; the token's own user if None.
        token: a Hugging Face token; what `hf auth login` or HF_TOKEN left if None.
        timeout: limit of a job that asks for none, such as "24h", "90m" or a number of seconds.
        secrets: secret environment variables of every job.
        env: environment variables of every job.
        volumes: what is mounted, as `hf jobs run --volume` writes it: "hf://datasets/org/name:/data:ro",
            "hf://buckets/org/name:/mnt:rw".
        hourly_usd: what one replica's machine costs in US dollars an hour; by default what the service says.
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
        volumes: Sequence[str] = (),
        hourly_usd: float | str | None = None,
        endpoint: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.options, self.withheld = plain_options(locals()), withheld(locals())
        super().__init__(hourly_usd=hourly_usd, clock=clock)
        if not hardware:
            raise ValueError("hardware is empty. Name one that `hf jobs hardware` lists, such as 'cpu-basic'.")
        self._options = JobOptions(
            hardware,
            image or "python:3.11",
            seconds_of(timeout),
            dict(env or {}),
            dict(secrets or {}),
            volumes_of(volumes),
        )
        self._api = HFJobsApi(endpoint, token, namespace)
        self._exit_codes: dict[str, int | None] = {}  # of jobs in ERROR, so that each log is read once

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The arguments of the SDK's `run_job` for an attempt, secrets redacted.

        A `namespace` of None stands for the token's own user.
        """
        job = job_arguments(request, self._options)
        secrets = dict.fromkeys(job["secrets"], "<redacted>")
        return {**job, "secrets": secrets, "namespace": self._api.given_namespace}

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        job, labels = job_arguments(request, self._options), attempt_labels(request)
        jobs = self._api.find(labels)
        if jobs:
            return self._handle(request.run_id, kept(jobs))
        try:
            own = self._api.run(job, f"launching {attempt_name(request)} on {job['flavor']}")
        except ExecutorDenied:
            raise
        except ExecutorError:
            jobs = self._api.find(labels)  # the job may run although the reply was lost
            if not jobs:
                raise
            return self._handle(request.run_id, kept(jobs))
        jobs = self._api.find(labels)
        if all(job["id"] != own for job in jobs):  # not listed yet
            created = self._api.get(own, self._api.namespace)
            if created is None:
                raise Unavailable(f"job {own} was created and cannot be read yet. Launch the attempt again.")
            jobs.append(created)
        oldest = kept(jobs)
        if oldest["id"] != own:  # another launcher was first
            self._cancel(own, self._api.namespace)
        return self._handle(request.run_id, oldest)

    def _handle(self, run_id: str, job: Job) -> ReplicaHandle:
        native = {"endpoint": self._api.endpoint, "namespace": self._api.namespace, "job_id": job["id"]}
        return self.handle_of(run_id, job["labels"], job["id"], native)

    def identity(self) -> Identity:
        return Identity(frozenset([*self._options.secrets, *self._options.env]))

    def check_machine(self) -> None:
        kinds = self._api.hardware()
        if kinds is not None and self._options.hardware not in kinds:
            raise ValueError(unknown_name("hardware", self._options.hardware, kinds))

    def _listed_price(self, request: LaunchRequest) -> Price | None:
        kinds = self._api.hardware()
        if kinds is None:
            return HF_JOBS.price(self._options.hardware)
        usd = kinds.get(self._options.hardware)
        tflops = listed_tflops(self._options.hardware)
        return None if usd is None else Price(usd, "Hugging Face's list of hardware, now", tflops)

    # -- polling -------------------------------------------------------------------------------------------------

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        for handle in handles:
            self._check_endpoint(handle)
        return super().poll_many(handles)

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses, by one listing per run of jobs that have not ended; others are requested alone."""
        if len(handles) == 1:
            job = self._api.get(handles[0].native_id, handles[0].native["namespace"])
            return [self._gone(handles[0].native_id) if job is None else self._status(handles[0], job)]
        listed: dict[str, Job] = {}
        for run_id, namespace in sorted({(h.run_id, h.native["namespace"]) for h in handles}):
            jobs = self._api.find({LABEL_RUN: run_label(run_id)}, namespace, LIVE_STAGES)
            listed |= {job["id"]: job for job in jobs}
        return [self._status(h, listed[h.native_id]) if h.native_id in listed else self.poll(h) for h in handles]

    def _status(self, handle: ReplicaHandle, job: Job) -> ReplicaStatus:
        status = status_of(job)
        if status.native_state == "DELETED":
            return self._gone(handle.native_id, status.native_state)
        if status.native_state == "CANCELED" and handle.native_id in self._cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", None, "CANCELED", status.message)
        if status.state is not ReplicaState.FAILED:
            return status
        return status_of(job, self._exit_code(handle))

    def _gone(self, job_id: str, native_state: str = "gone") -> ReplicaStatus:
        return self.gone(job_id, "the service no longer knows the job", native_state)

    def _exit_code(self, handle: ReplicaHandle) -> int | None:
        """The code in the exit line of a job in ERROR; None if it printed none, or if the log cannot be read now."""
        if handle.native_id not in self._exit_codes:
            try:
                fields = parse_exit_line(self.logs(handle, tail=_EXIT_TAIL_LINES)) or {}
            except ExecutorError:
                return None  # not remembered, so that the next poll reads the log again
            code = fields.get("code")
            self._exit_codes[handle.native_id] = code if isinstance(code, int) else None
        return self._exit_codes[handle.native_id]

    def cancel(self, handle: ReplicaHandle) -> None:
        """End the attempt's job; every process then sees CANCELLED. The service decides about SIGTERM."""
        self._check_endpoint(handle)
        self._cancel(handle.native_id, handle.native["namespace"])

    def _cancel(self, job_id: str, namespace: str) -> None:
        try:
            if self._api.cancel(job_id, namespace):
                self._cancelled.add(job_id)
        except ExecutorError:
            job = self._api.get(job_id, namespace)
            if job is not None and not has_ended(job):
                raise
            # Otherwise the service refused because the job had ended.

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines of the job's output; none if it was deleted. Without `follow`, a running job's may take 5 s."""
        self._check_endpoint(handle)
        yield from self._api.log_lines(handle.native_id, handle.native["namespace"], follow, tail)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        attempts: dict[tuple[str | None, str | None], list[Job]] = {}
        for job in self._api.find({LABEL_RUN: run_label(run_id)}):
            labels = job["labels"] or {}
            attempts.setdefault((labels.get(LABEL_REPLICA), labels.get(LABEL_ATTEMPT)), []).append(job)
        return in_order(self._handle(run_id, kept(jobs)) for jobs in attempts.values())

    def _check_endpoint(self, handle: ReplicaHandle) -> None:
        """Raise `ExecutorError` for an attempt at another endpoint (Hub), which must not get our token."""
        if handle.native["endpoint"] != self._api.endpoint:
            raise ExecutorError(
                f"job {handle.native_id} is at {handle.native['endpoint']}, this executor talks to "
                f"{self._api.endpoint}. Give the executor that endpoint, or set HF_ENDPOINT."
            )
