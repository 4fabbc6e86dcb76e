"""Modal Sandboxes as plain data: the arguments of a Sandbox for an attempt, and the status that its end reports.

Makes no calls: they are in `modal_sandboxes`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from diloco_orchestrator.executors.contract import BY_EXIT_CODE, LaunchRequest, ReplicaState, ReplicaStatus
from diloco_orchestrator.executors.process_contract import EXIT_DONE
from diloco_orchestrator.executors.remote_base import attempt_labels, attempt_name, env_within

MAX_TIMEOUT_S = 86400  # Modal's own limit for a Sandbox
_GPU = re.compile(r"[A-Za-z][\w.-]*!?(:[1-9]\d*)?")


@dataclass(frozen=True)
class Machine:
    """The resources of a Sandbox. Raises ValueError for values that Modal would refuse."""

    gpu: str | None = None
    cpu: float | None = None  # cores
    memory: int | None = None  # MiB
    region: str | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None and not (isinstance(self.gpu, str) and _GPU.fullmatch(self.gpu)):
            raise ValueError(f"gpu={self.gpu!r} is not of the form 'A100' or 'A100:2'.")
        if self.cpu is not None and not (isinstance(self.cpu, (int, float)) and self.cpu > 0):
            raise ValueError(f"cpu={self.cpu!r} is no number of cores above 0.")
        if self.memory is not None and not (isinstance(self.memory, int) and self.memory > 0):
            raise ValueError(f"memory={self.memory!r} is no whole number of MiB above 0.")
        if self.region is not None and not (isinstance(self.region, str) and self.region):
            raise ValueError(f"region={self.region!r} is no name of a region, such as 'us-east'.")


class SandboxArguments(TypedDict):
    """The arguments that create a Sandbox, as JSON; the request's secrets are redacted. `image` None: Modal's own."""

    app: str
    environment: str | None
    name: str
    tags: dict[str, str]
    command: list[str]
    image: str | None
    env: dict[str, str]
    secrets: dict[str, str]
    named_secrets: list[str]
    timeout: int
    gpu: str | None
    cpu: float | None
    memory: int | None
    region: str | None
    include_oidc_identity_token: bool


# -- the request ------------------------------------------------------------------------------------------------------


def sandbox_arguments(
    request: LaunchRequest,
    *,
    app: str,
    environment: str | None,
    image: str | None,
    machine: Machine,
    timeout_s: int,
    named_secrets: Sequence[str],
    oidc: bool,
) -> SandboxArguments:
    """The arguments for the Sandbox of an attempt. Raises ValueError for a time limit that Modal does not support."""
    limit_s = timeout_s if request.timeout_s is None else whole_timeout(request.timeout_s)
    return {
        "app": app,
        "environment": environment,
        "name": attempt_name(request),
        "tags": attempt_labels(request),
        "command": list(request.command),
        "image": image,
        "env": env_within(request, limit_s),
        "secrets": dict.fromkeys(request.secrets, "<redacted>"),
        "named_secrets": list(named_secrets),
        "timeout": limit_s,
        "gpu": machine.gpu,
        "cpu": machine.cpu,
        "memory": machine.memory,
        "region": machine.region,
        "include_oidc_identity_token": oidc,
    }


def whole_timeout(timeout_s: float) -> int:
    """The time limit in whole seconds, rounded up. Raises ValueError if Modal does not run a Sandbox that long."""
    if not 1 <= timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s={timeout_s!r}: Modal runs a Sandbox for 1 to {MAX_TIMEOUT_S} seconds.")
    return math.ceil(timeout_s)


# -- the reply --------------------------------------------------------------------------------------------------------

RUNNING = "UNSPECIFIED"
# State by how a Sandbox ended (`GenericResult.GenericStatus`, without its prefix).
_BY_STATUS = {
    RUNNING: (ReplicaState.RUNNING, ""),
    "TERMINATED": (ReplicaState.PREEMPTED, "lost"),  # or cancelled, in which case the Sandbox has a tag
    "TIMEOUT": (ReplicaState.TIMED_OUT, "deadline"),
    "IDLE_TIMEOUT": (ReplicaState.TIMED_OUT, "deadline"),
    "INIT_FAILURE": (ReplicaState.FAILED, "image"),
    "INTERNAL_FAILURE": (ReplicaState.PREEMPTED, "lost"),
    "MEMORY_MANAGER_EVICTION": (ReplicaState.FAILED, "oom"),
    "MEMORY_THRASHING_EVICTION": (ReplicaState.FAILED, "oom"),
    "KERNEL_OOM_KILL": (ReplicaState.FAILED, "oom"),
}
_BY_CODE = {  # State by exit code, for SUCCESS and FAILURE: the process ended by itself.
    **BY_EXIT_CODE,
    137: (ReplicaState.PREEMPTED, "lost"),  # killed from outside; Modal reports no more
    143: (ReplicaState.PREEMPTED, "lost"),
}


def status_of(end: str, code: int | None) -> ReplicaStatus:
    """The status of a Sandbox. `end`: as `modal_api.end_of` returns it; `code`: exit code, None while it runs."""
    if end in ("SUCCESS", "FAILURE") and code is not None:
        state, reason = _BY_CODE.get(code, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, reason, code, end, "" if code == EXIT_DONE else f"exit code {code}")
    state, reason = _BY_STATUS.get(end, (ReplicaState.UNKNOWN, ""))
    return ReplicaStatus(state, reason, code, end, "" if end == RUNNING else f"Modal says {end}")
