"""Hugging Face Jobs as plain data: the arguments of a job for an attempt, and the status of a job from its reply.

`hf_api` makes the calls.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

from diloco_orchestrator.executors.answers import odd_reply
from diloco_orchestrator.executors.contract import BY_EXIT_CODE, LaunchRequest, ReplicaState, ReplicaStatus
from diloco_orchestrator.executors.process_contract import EXIT_DONE
from diloco_orchestrator.executors.remote_base import attempt_labels, attempt_name, env_within

LABEL_TIMEOUT = "diloco-timeout-s"  # the limit, which no reply of the service holds
_COUNTED = re.compile(r"x(\d+)$")
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_VOLUME = re.compile(
    r"hf://(?:(?P<kind>models|datasets|spaces|buckets)/)?(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(?P<path>/[^:]*)?"
    r":(?P<mount>/[^:]*)(?::(?P<mode>ro|rw))?"
)


class JobStage(TypedDict):
    """The `status` of a Hugging Face Job in the service's replies."""

    stage: str
    message: str | None


class Job(TypedDict):
    """A Hugging Face Job as the service describes it, without the fields that are not used here."""

    id: str
    createdAt: str
    startedAt: str | None
    finishedAt: str | None
    labels: dict[str, str] | None
    status: JobStage


# -- the request ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobOptions:
    """The user's settings for the Hugging Face Job of each attempt."""

    hardware: str
    image: str
    timeout_s: int
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    volumes: Sequence[Mapping[str, Any]] = ()  # of `volumes_of`


def job_arguments(request: LaunchRequest, options: JobOptions) -> dict[str, Any]:
    """The arguments of the SDK's `run_job` for an attempt. The request's env, secrets and limit take precedence."""
    limit_s = options.timeout_s if request.timeout_s is None else seconds_of(request.timeout_s)
    if request.ranks > 1 and (gpus := gpus_of(options.hardware)) not in (0, request.ranks):
        raise ValueError(
            f"hardware={options.hardware!r} has {gpus} GPU{'s' * (gpus > 1)}, and replica {request.replica_id} has "
            f"{request.ranks} ranks, each of which trains on one. Take hardware with {request.ranks}, as a100x8 has 8 "
            f"(`hf jobs hardware` lists it), or set ranks_per_replica={gpus} (--ranks)."
        )
    return {
        "image": request.pinned(options.image),
        "command": list(request.command),
        "env": {**options.env, **env_within(request, limit_s)},
        "secrets": {**options.secrets, **request.secrets},
        "flavor": options.hardware,
        "timeout": limit_s,
        "labels": {**attempt_labels(request), "name": attempt_name(request), LABEL_TIMEOUT: str(limit_s)},
        "volumes": [dict(each) for each in options.volumes],
    }


def gpus_of(hardware: str) -> int:
    """The GPUs of a kind of hardware by its name, as Hugging Face names them: 0 of "cpu-xl", 8 of "a100x8"."""
    match = _COUNTED.search(hardware)
    return int(match[1]) if match else 0 if hardware.startswith("cpu") else 1


def volumes_of(given: Sequence[str]) -> list[dict[str, Any]]:
    """`hf`'s command line form of volumes as the SDK's arguments. Raises ValueError for a bad or repeated one."""
    if isinstance(given, str):
        raise ValueError(f"volumes={given!r} is one string. Write a list, [{given!r}].")
    found: list[dict[str, Any]] = []
    for text in given:
        match = _VOLUME.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"volumes: {text!r} is not of the form hf://datasets/OWNER/NAME:/PATH:ro (models, datasets, spaces, "
                "buckets)."
            )
        if any(each["mount_path"] == match["mount"] for each in found):
            raise ValueError(f"volumes: two are mounted at {match['mount']}. Give each a path of its own.")
        found.append(
            {
                "type": (match["kind"] or "models").removesuffix("s"),
                "source": f"{match['owner']}/{match['name']}",
                "mount_path": match["mount"],
                "read_only": None if match["mode"] is None else match["mode"] == "ro",
                "path": (match["path"] or "").strip("/") or None,
            }
        )
    return found


def seconds_of(timeout: str | float) -> int:
    """Whole seconds of "24h", "90m", "30s", "2d" or a number, rounded up. Raises ValueError for anything else."""
    match = _TIMEOUT.fullmatch(str(timeout))
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"timeout {timeout!r} is no time limit. Write '24h', '90m' or a number of seconds above 0.")
    return math.ceil(seconds)


def hourly_usd_of(hardware: Mapping[str, Any]) -> float | None:
    """US dollars an hour from one entry of the service's list of hardware; None for a price in an unknown unit."""
    hours = {"second": 3600, "minute": 60, "hour": 1}.get(str(hardware.get("unitLabel")))
    usd = hardware.get("unitCostUSD")
    return None if hours is None or not isinstance(usd, int | float) else usd * hours


# -- the reply --------------------------------------------------------------------------------------------------------


def job_of(reply: Any, what: str) -> Job:
    """The Hugging Face Job in a reply. Raises `Unavailable` if the reply is no job. `what`: the action, for errors."""
    status = reply.get("status") if isinstance(reply, dict) else None
    if not (
        isinstance(status, dict)
        and isinstance(status.get("stage"), str)
        and isinstance(reply.get("id"), str)
        and reply["id"]
        and isinstance(reply.get("labels") or {}, dict)
        and _is_time(reply.get("createdAt"))
        and all(_is_time(reply.get(name)) for name in ("startedAt", "finishedAt") if reply.get(name) is not None)
    ):
        raise odd_reply(what, "a job", reply)
    job: Job = reply
    return job


def jobs_of(reply: Any, what: str) -> list[Job]:
    """The jobs on a page of Hugging Face's listing. Raises `Unavailable` for another reply. `what`: the action."""
    if not isinstance(reply, list):
        raise odd_reply(what, "a list of jobs", reply)
    return [job_of(each, what) for each in reply]


def hardware_of(reply: Any, what: str) -> dict[str, float | None]:
    """US dollars an hour by name of hardware, None in an unknown unit. Raises `Unavailable` if the reply lists none."""
    if not (isinstance(reply, list) and reply and all(isinstance(each, dict) and "name" in each for each in reply)):
        raise odd_reply(what, "a list of hardware", reply)
    return {str(each["name"]): hourly_usd_of(each) for each in reply}


def _is_time(text: Any) -> bool:
    try:
        datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return False
    return True


BY_STAGE = {
    "SCHEDULING": (ReplicaState.PENDING, ""),
    "RUNNING": (ReplicaState.RUNNING, ""),
    "COMPLETED": (ReplicaState.SUCCEEDED, "exit"),
    "CANCELED": (ReplicaState.CANCELLED, "user"),
    "ERROR": (ReplicaState.FAILED, "lost"),
    "DELETED": (ReplicaState.PREEMPTED, "lost"),
}


LIVE_STAGES = tuple(stage for stage, (state, _) in BY_STAGE.items() if not state.ended)


def has_ended(job: Job) -> bool:
    return BY_STAGE.get(job["status"]["stage"], (ReplicaState.UNKNOWN, ""))[0].ended


def status_of(job: Job, exit_code: int | None = None) -> ReplicaStatus:
    """The status of an attempt from its Hugging Face Job. `exit_code`: from a failed job's exit line, or None."""
    stage, message = str(job["status"]["stage"]), str(job["status"].get("message") or "")
    if stage == "ERROR" and job.get("finishedAt") and not job.get("startedAt"):
        # The service documents none of its texts, so they are passed on and not read.
        message = f"the job never started (image, hardware or capacity): {message or 'the service does not say why'}"
    state, reason = BY_STAGE.get(stage, (ReplicaState.UNKNOWN, ""))
    if stage in ("ERROR", "CANCELED") and _ran_to_its_limit(job):
        return ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", None, stage, message)
    if stage == "ERROR" and exit_code is not None and exit_code != EXIT_DONE:  # after a 0, something else went wrong
        state, reason = BY_EXIT_CODE.get(exit_code, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, reason, exit_code, stage, message)
    return ReplicaStatus(state, reason, EXIT_DONE if stage == "COMPLETED" else None, stage, message)


def _ran_to_its_limit(job: Job) -> bool:
    """Whether the job ran as long as its time limit, by the service's clock.

    A second or 1 % less counts too, because the service does not document when its timer starts.
    """
    limit, started, finished = (job.get("labels") or {}).get(LABEL_TIMEOUT), job.get("startedAt"), job.get("finishedAt")
    if not (limit and started and finished):
        return False
    ran_s = (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
    return ran_s >= int(limit) - min(1.0, 0.01 * int(limit))


def kept(jobs: Sequence[Job]) -> Job:
    """The oldest of several Hugging Face Jobs of one attempt: racing launchers keep it and cancel the others."""
    return min(jobs, key=lambda job: (datetime.fromisoformat(job["createdAt"]), job["id"]))
