"""Replicas as jobs of a Ray cluster: one job per attempt, submitted under the attempt's name through its dashboard.

`ray_api` makes the calls. Ray runs a job's command once, on a node that has the resources, and never again.
"""

import os
import re
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from diloco_orchestrator.executors.clock import Clock
from diloco_orchestrator.executors.constructor_options import plain_options, withheld
from diloco_orchestrator.executors.contract import (
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
    in_order,
)
from diloco_orchestrator.executors.names import words_of
from diloco_orchestrator.executors.ray_api import Job, RayApi
from diloco_orchestrator.executors.remote_base import (
    LABEL_RUN,
    RemoteExecutor,
    attempt_labels,
    attempt_name,
    ended_status,
    limited,
    run_label,
)

_FOLLOW_S = 1.0  # pause before a log is read again, which Ray's API gives only whole
_GRACE_S = 120  # from SIGTERM to SIGKILL of a job that is stopped; Ray's own default of 3 s is too short to publish in
_PACKAGE, _SECRETS = "diloco_secrets", "secrets.sh"
_STARTED = "DILOCO_STARTED"  # variable with the line that separates Ray's output about a job from the job's own
_COMMAND = "DILOCO_COMMAND"  # variable with the command: Ray repeats the entrypoint in a job's log

# Reads the secrets from the package that Ray has unpacked on the node, deletes them there, and runs the command.
_ENTRYPOINT = (
    f'set -f; IFS=:; for place in $PYTHONPATH; do file="$place/{_PACKAGE}/{_SECRETS}"; '
    f'if [ -f "$file" ]; then . "$file"; rm -f "$file"; fi; done; unset IFS; set +f; '
    f'printf "%s\\n" "${_STARTED}"; eval "exec ${_COMMAND}"'
)
# Why Ray calls a job failed whose command did not end by itself.
_FAILED = {
    "JOB_SUPERVISOR_ACTOR_DIED": (ReplicaState.PREEMPTED, "lost"),  # with its node
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": (ReplicaState.PREEMPTED, "lost"),
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": (ReplicaState.FAILED, "no_capacity"),
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": (ReplicaState.FAILED, "no_capacity"),
    "RUNTIME_ENV_SETUP_FAILURE": (ReplicaState.FAILED, "image"),
}
_MEMORY = re.compile(r"(\d+)([KMGT]?)")
_MESSAGE = 300  # characters of Ray's message about a failed job, which holds the end of its log


@dataclass(frozen=True)
class _Machine:
    """The resources that a replica requests of its node. Raises ValueError for a malformed size, such as of memory."""

    gpu: int | None
    cpu: int | None
    memory: int | str | None
    resources: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.gpu, bool) or (self.gpu or 0) < 0:
            raise ValueError(f"gpu={self.gpu!r} is no number of GPUs: write 1, for one for each rank.")
        if self.cpu is not None and self.cpu < 1:
            raise ValueError(f"cpu={self.cpu!r}: a replica needs one CPU or more.")
        self.fields(None)

    def fields(self, request: LaunchRequest | None) -> dict[str, Any]:
        """The resources as fields of a job's request; without one, of a replica of one process."""
        gpus = request.gpus(self.gpu or 0, f"gpu={self.gpu}") if request is not None else self.gpu
        given: dict[str, Any] = {"entrypoint_num_gpus": gpus, "entrypoint_num_cpus": self.cpu}
        if self.memory is not None:
            match = _MEMORY.fullmatch(str(self.memory))
            if match is None:
                raise ValueError(f"memory={self.memory!r} is no size. Write bytes, or like '16G'.")
            given["entrypoint_memory"] = int(match[1]) * 1024 ** " KMGT".index(match[2] or " ")
        if self.resources:
            given["entrypoint_resources"] = dict(map(_resource, self.resources))
        # Ray runs a job that reserves nothing on the head node, so all replicas would be there.
        return {name: value for name, value in given.items() if value} or {"entrypoint_num_cpus": 1}


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        return name, float(amount)
    except ValueError:
        raise ValueError(
            f"resources={text!r}: write NAME=AMOUNT, such as 'accelerator_type:A100=0.001' (`ray status` lists them)."
        ) from None


class RayExecutor(RemoteExecutor):
    """Runs each attempt as a job of a Ray cluster (VMs, KubeRay, Anyscale), through the address of its dashboard.

    What `python` lacks is installed into it with pip: name an environment of its own, or let `runtime_env` make one.

    Args:
        address: The dashboard, such as "http://127.0.0.1:8265"; RAY_API_SERVER_ADDRESS, or that one, if None.
        gpu: 1 for a GPU for each rank of a replica, or their number; none by default.
        cpu: CPUs that each replica reserves: 1 if it reserves nothing else.
        memory: Memory that each replica reserves, such as "16G".
        resources: Further resources of a node, such as "accelerator_type:A100=0.001".
        runtime_env: Ray's runtime environment, such as {"uv": ["torch==2.9.1", "datasets"]}.
        python: Interpreter on the nodes.
        hourly_usd: What one replica's machine costs in US dollars an hour, for max_cost_usd and `status`.
        clock: Time, for tests.
    """

    name = "ray"

    def __init__(
        self,
        *,
        address: str | None = None,
        gpu: int | None = None,
        cpu: int | None = None,
        memory: int | str | None = None,
        resources: Sequence[str] = (),
        runtime_env: Mapping[str, Any] | None = None,
        python: str = "python",
        hourly_usd: float | str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.options, self.withheld = plain_options(locals()), withheld(locals())
        super().__init__(hourly_usd=hourly_usd, clock=clock)
        found = address or os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265"
        if not found.startswith(("http://", "https://")):
            raise ValueError(f"address={found!r}: give that of Ray's dashboard, such as 'http://127.0.0.1:8265'.")
        if "@" in urlsplit(found).netloc:
            raise ValueError(
                "address holds a name or a password, and run.json and errors show addresses. Leave them out, and give "
                "the header that they stand for in RAY_JOB_HEADERS."
            )
        self._api = RayApi(found)
        self._machine = _Machine(gpu, cpu, memory, words_of(resources))
        self._runtime_env = dict(runtime_env or {})
        self._python = python

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The body of the request that submits the attempt's job, and the names of its secrets."""
        plan: dict[str, Any] = {"job": self._job(request, "<its secrets>" if request.secrets else None)}
        if request.secrets:
            plan["secrets"] = dict.fromkeys(request.secrets, "<redacted>")
        return plan

    def _job(self, request: LaunchRequest, package: str | None) -> dict[str, Any]:
        """The attempt's job as the body of a request. `package`: URI of its secrets, or None."""
        given = self._runtime_env
        program = [self._python, *request.command[1:]] if request.command[0] == "python" else request.command
        variables = {
            **given.get("env_vars", {}),
            **request.env,
            _COMMAND: shlex.join(limited(program, request.timeout_s)),
            _STARTED: _separator(request),
            "RAY_JOB_STOP_WAIT_TIME_S": str(_GRACE_S),
        }
        modules = [*given.get("py_modules", []), *([package] if package else [])]
        runtime_env = {**given, "env_vars": variables, **({"py_modules": modules} if modules else {})}
        return {
            "submission_id": attempt_name(request),
            "entrypoint": _ENTRYPOINT,
            "runtime_env": runtime_env,
            "metadata": attempt_labels(request),
            **self._machine.fields(request),
        }

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Submit the attempt's job, or adopt the one of its name: the cluster creates a name once.

        Secrets travel as a package that the job reads and deletes: Ray shows a job's environment on its dashboard, and
        writes it into its logs.
        """
        name = attempt_name(request)
        native = {"timed": request.timeout_s is not None}
        package = None
        if request.secrets:
            text = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in request.secrets.items())
            package = self._api.upload(f"_ray_pkg_{uuid.uuid4().hex}.zip", {f"{_PACKAGE}/{_SECRETS}": text})
        if not self._api.submit(self._job(request, package), f"launching {name}"):
            found = self._api.job(name)
            return self.handle_of(request.run_id, found.get("metadata"), name, native)
        return ReplicaHandle(self.name, request.run_id, request.replica_id, request.attempt, name, native)

    # -- polling -------------------------------------------------------------------------------------------------

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        jobs = self._api.jobs()
        return [self._status(handle, jobs.get(handle.native_id)) for handle in handles]

    def _status(self, handle: ReplicaHandle, job: Job | None) -> ReplicaStatus:
        if job is None:
            return self.gone(handle.native_id, "Ray no longer knows the job")
        state, message = str(job["status"]), str(job.get("message") or "").partition("\n")[0][:_MESSAGE]
        code = job.get("driver_exit_code")
        match state:
            case "PENDING":
                waits = "no_capacity" if "resources" in message else ""
                return ReplicaStatus(ReplicaState.PENDING, waits, None, state, message)
            case "RUNNING":
                return ReplicaStatus(ReplicaState.RUNNING, "", None, state)
            case "SUCCEEDED":
                return ended_status(0, state)
            case "STOPPED":
                return ReplicaStatus(ReplicaState.CANCELLED, "user", None, state, message)
            case "FAILED" if isinstance(code, int):
                return ended_status(code, state, timed=bool(handle.native.get("timed")))
            case "FAILED":
                known = _FAILED.get(str(job.get("error_type")), (ReplicaState.FAILED, "exit"))
                return ReplicaStatus(*known, None, state, message)
        return ReplicaStatus(ReplicaState.UNKNOWN, native_state=state, message=f"Ray's state {state!r} is not known")

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stop the attempt's job: SIGTERM, and SIGKILL two minutes later; a waiting job stops as it begins."""
        if self._api.stop(handle.native_id):
            self._cancelled.add(handle.native_id)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines of the job's output, which Ray keeps on its node; none once the node or the job is gone."""
        shown: int | None = None
        while True:
            ended = not follow or self.poll(handle).state.ended
            lines = self._lines(handle, whole=ended)
            if shown is None:
                shown = 0 if tail is None else max(0, len(lines) - tail)
            yield from lines[shown:]
            shown = max(shown, len(lines))
            if ended:
                return
            self._clock.sleep(_FOLLOW_S)

    def _lines(self, handle: ReplicaHandle, whole: bool) -> list[str]:
        """Lines of the attempt's own output in its job's log, without those that Ray printed before.

        `whole`: the last one too, which a running process may not have finished.
        """
        try:
            text = self._api.log(handle.native_id)
        except Unavailable:
            if self.poll(handle).reason == "lost":  # with its node, whose agent had the log
                return []
            raise
        before, started, output = text.rpartition(f"{_separator(handle)}\n")
        if not started and not whole:
            return []  # Ray's own output, which only explains a job that never began
        lines = (output if started else before + output).splitlines(keepends=True)
        if not whole and lines and not lines[-1].endswith("\n"):
            lines.pop()
        # Ray may write its line about the entrypoint after the first lines of the job.
        ours = (line for line in lines if not line.startswith(f"Running entrypoint for job {handle.native_id}:"))
        return [line.rstrip("\r\n") for line in ours]

    def find(self, run_id: str) -> list[ReplicaHandle]:
        label = run_label(run_id)
        return in_order(
            self.handle_of(run_id, job.get("metadata"), job_id, {"timed": _is_timed(job)})
            for job_id, job in self._api.jobs().items()
            if (job.get("metadata") or {}).get(LABEL_RUN) == label
        )


def _separator(attempt: LaunchRequest | ReplicaHandle) -> str:
    """The line that separates Ray's own output, at the beginning of a job's log, from that of the attempt."""
    return f"-- {attempt_name(attempt)} --"


def _is_timed(job: Job) -> bool:
    """Whether the job's command runs under a time limit of its request."""
    variables = (job.get("runtime_env") or {}).get("env_vars") or {}
    return str(variables.get(_COMMAND, "")).startswith("timeout ")
