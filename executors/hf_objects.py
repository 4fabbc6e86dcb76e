"""Hugging Face Jobs as plain data: the arguments of a job for an attempt, and the status that a job's reply reports.

Makes no calls: they are in `hf_api`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from diloco_orchestrator.executors.contract import BY_EXIT_CODE, LaunchRequest, ReplicaState, ReplicaStatus
from diloco_orchestrator.executors.process_contract import EXIT_DONE
from diloco_orchestrator.executors.remote_base import attempt_labels, attempt_name, env_within

LABEL_TIMEOUT = "diloco-timeout-s"  # the limit, which no reply of the service holds
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

# US dollars an hour, read 2026-11; `hf jobs hardware` lists today's.
HOURLY_USD = {
    "t4-small": 0.40,
    "l4x1": 0.80,
    "a10g-small": 1.00,
    "l40sx1": 1.80,
    "a100-large": 2.50,
    "h200": 5.00,
}


class JobArguments(TypedDict):
    """Keyword arguments of the SDK's `run_job`."""

    image: str
    command: list[str]
    env: dict[str, str]
    secrets: dict[str, str]
    flavor: str
    timeout: int
    labels: dict[str, str]


class JobStage(TypedDict):
    """The `status` of a job in the service's replies."""

    stage: str
    message: str | None


class Job(TypedDict):
    """A job as the service describes it; fields that we do not read are left out."""

    id: str
    createdAt: str
    startedAt: str | None
    finishedAt: str | None
    labels: dict[str, str] | None
    status: JobStage


# -- the request ------------------------------------------------------------------------------------------------------


def job_arguments(
    request: LaunchRequest,
    *,
    hardware: str,
    image: str,
    timeout_s: int,
    env: Mapping[str, str],
    secrets: Mapping[str, str],
) -> JobArguments:
    """The `run_job` arguments for an attempt. The request's env, secrets and time limit win over those passed here."""
    limit_s = timeout_s if request.timeout_s is None else seconds_of(request.timeout_s)
    return {
        "image": image,
        "command": list(request.command),
        "env": {**env, **env_within(request, limit_s)},
        "secrets": {**secrets, **request.secrets},
        "flavor": hardware,
        "timeout": limit_s,
        "labels": {**attempt_labels(request), "name": attempt_name(request), LABEL_TIMEOUT: str(limit_s)},
    }


def seconds_of(timeout: str | float) -> int:
    """Whole seconds of "24h", "90m", "30s", "2d" or a number, rounded up. Raises ValueError for anything else."""
    match = _TIMEOUT.fullmatch(str(timeout))
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"timeout {timeout!r} is no time limit. Write '24h', '90m' or a number of seconds above 0.")
    return math.ceil(seconds)


# -- the reply --------------------------------------------------------------------------------------------------------

BY_STAGE = {
    "SCHEDULING": (ReplicaState.PENDING, ""),
    "RUNNING": (ReplicaState.RUNNING, ""),
    "COMPLETED": (ReplicaState.SUCCEEDED, "exit"),
    "CANCELED": (ReplicaState.CANCELLED, "user"),
    "ERROR": (ReplicaState.FAILED, "lost"),
    "DELETED": (ReplicaState.PREEMPTED, "lost"),
}


def has_ended(job: Job) -> bool:
    """Whether the job is in a final stage."""
    return BY_STAGE.get(job["status"]["stage"], (ReplicaState.UNKNOWN, ""))[0].ended


def status_of(job: Job, exit_code: int | None = None) -> ReplicaStatus:
    """The status that a job reports. `exit_code`: from the exit line of a job in ERROR, if it printed one."""
    stage, message = str(job["status"]["stage"]), str(job["status"].get("message") or "")
    state, reason = BY_STAGE.get(stage, (ReplicaState.UNKNOWN, ""))
    if stage in ("ERROR", "CANCELED") and _ran_to_its_limit(job):
        return ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", None, stage, message)
    if stage == "ERROR" and exit_code is not None and exit_code != EXIT_DONE:  # after a 0, something else went wrong
        state, reason = BY_EXIT_CODE.get(exit_code, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, reason, exit_code, stage, message)
    return ReplicaStatus(state, reason, EXIT_DONE if stage == "COMPLETED" else None, stage, message)


def _ran_to_its_limit(job: Job) -> bool:
    """Whether the job ran as long as its limit, by the service's clock.

    Less a second or 1 % of the limit also counts: the service does not document when its timer starts.
    """
    limit, started, finished = (job.get("labels") or {}).get(LABEL_TIMEOUT), job.get("startedAt"), job.get("finishedAt")
    if not (limit and started and finished):
        return False
    ran_s = (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
    return ran_s >= int(limit) - min(1.0, 0.01 * int(limit))


def kept(jobs: Sequence[Job]) -> Job:
    """The oldest of an attempt's jobs: the one that all launchers keep if they raced."""
    return min(jobs, key=lambda job: (datetime.fromisoformat(job["createdAt"]), job["id"]))
