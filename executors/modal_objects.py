"""Modal Sandboxes as plain data: the arguments of a Sandbox for an attempt, and the status from its end.

`modal_sandboxes` makes the calls.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.executors.contract import BY_EXIT_CODE, LaunchRequest, ReplicaState, ReplicaStatus
from diloco_orchestrator.executors.names import unknown_name
from diloco_orchestrator.executors.process_contract import EXIT_DONE
from diloco_orchestrator.executors.remote_base import attempt_labels, attempt_name, env_within

if TYPE_CHECKING:
    from modal import Image

_WORDS = 500  # letters of what Modal says about an end: a traceback of an image's start may be long
MAX_TIMEOUT_S = 86400  # Modal's own limit for a Sandbox
_GPU = re.compile(r"[A-Za-z][\w.-]*[!+]?(:[1-9]\d*)?")  # H100! is no better one, B200+ may be a better one


@dataclass(frozen=True)
class SandboxOptions:
    """The user's settings for each replica's Sandbox. Raises ValueError for values that Modal would refuse."""

    app: str
    environment: str | None  # of the App, of named Secrets and of named Volumes; None: the profile's
    image: "str | Image | None"  # name in a registry, an image of the SDK's, or Modal's slim Debian
    gpu: tuple[str, ...]  # types in order of preference; empty: none
    cpu: float | None  # cores
    memory: int | None  # MiB
    timeout_s: int
    region: tuple[str, ...]  # any of these; empty: anywhere
    mounts: Mapping[str, Any]  # by path, of `mounts_of`
    secrets: tuple[str, ...]  # names of Modal Secrets
    oidc: bool

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,63}", self.app):
            raise ValueError(
                f"app={self.app!r} is no name that Modal takes: letters, digits, '-', '_' and '.', at most 63."
            )
        for gpu in self.gpu:
            found = _GPU.fullmatch(gpu) if isinstance(gpu, str) else None
            if found is None:
                raise ValueError(f"gpu={gpu!r} is not of the form 'A100' or 'A100:8'.")
        if self.cpu is not None and not (isinstance(self.cpu, (int, float)) and self.cpu > 0):
            raise ValueError(f"cpu={self.cpu!r} is no number of cores above 0.")
        if self.memory is not None and not (isinstance(self.memory, int) and self.memory > 0):
            raise ValueError(f"memory={self.memory!r} is no whole number of MiB above 0.")
        if not all(isinstance(region, str) and region for region in self.region):
            raise ValueError(f"region={self.region!r} holds no names of regions, such as 'us-east'.")


@dataclass(frozen=True)
class Mount:
    """A mount under a path: a named Volume, or a bucket by the arguments of `CloudBucketMount`."""

    volume: str = ""
    bucket: Mapping[str, Any] = field(default_factory=dict)  # `secret` as the name of a Modal Secret

    def to_json(self) -> Any:
        return self.volume or dict(self.bucket)


def mounts_of(given: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Mounts by path, from `ModalExecutor(volumes=…)`: a `Mount` for names and arguments, SDK objects unchanged.

    Raises ValueError for a path that is not absolute, a text without "=", or an unknown argument of a bucket's mount.
    """
    if isinstance(given, str):
        raise ValueError(f"volumes={given!r} is one string. Write {{'/data': 'NAME'}}.")
    pairs = list(given.items()) if isinstance(given, Mapping) else [_pair(text) for text in given]
    found: dict[str, Any] = {}
    for path, what in pairs:
        if not str(path).startswith("/"):
            raise ValueError(f"volumes: {path!r} is no absolute path, such as '/data'.")
        if isinstance(what, Mapping):
            for name in what:
                if name not in _BUCKET_ARGUMENTS:
                    raise ValueError(f"volumes[{path!r}]: {unknown_name('argument', name, _BUCKET_ARGUMENTS)}")
            if "bucket_name" not in what:
                raise ValueError(f"volumes[{path!r}] names no bucket. Add bucket_name.")
        found[str(path)] = Mount(volume=what) if isinstance(what, str) else what
        if isinstance(what, Mapping):
            found[str(path)] = Mount(bucket=dict(what))
    return found


def _pair(text: str) -> tuple[str, str]:
    path, equals, name = text.partition("=")
    if not equals or not name:
        raise ValueError(f"volumes: {text!r} is not of the form /path=NAME.")
    return path, name


_BUCKET_ARGUMENTS = (  # of the SDK's CloudBucketMount
    "bucket_name",
    "bucket_endpoint_url",
    "key_prefix",
    "secret",
    "oidc_auth_role_arn",
    "read_only",
    "requester_pays",
    "force_path_style",
)


# -- the request ------------------------------------------------------------------------------------------------------


def sandbox_arguments(request: LaunchRequest, options: SandboxOptions) -> dict[str, Any]:
    """An attempt's Sandbox as JSON, secrets redacted. Raises ValueError for a time limit that Modal forbids."""
    limit_s = options.timeout_s if request.timeout_s is None else whole_timeout(request.timeout_s)
    mounts = options.mounts.items()
    return {
        "app": options.app,
        "environment": options.environment,
        "name": attempt_name(request),
        "tags": attempt_labels(request),
        "command": list(request.command),
        "image": None if options.image is None else request.pinned(str(options.image)),
        "env": env_within(request, limit_s),
        "secrets": dict.fromkeys(request.secrets, "<redacted>"),
        "named_secrets": list(options.secrets),
        "timeout": limit_s,
        "gpu": [gpus_of(gpu, request) for gpu in options.gpu],
        "cpu": options.cpu,
        "memory": options.memory,
        "region": list(options.region),
        "volumes": {path: each.to_json() if isinstance(each, Mount) else str(each) for path, each in mounts},
        "include_oidc_identity_token": options.oidc,
    }


def gpus_of(gpu: str, request: LaunchRequest) -> str:
    """A type of GPU with the number of them for a request: "A100" for a replica of eight ranks is "A100:8".

    Raises ValueError if the type is given with another number than the ranks.
    """
    name, _, given = gpu.partition(":")
    count = request.gpus(int(given or 1), f"gpu={gpu!r}")
    return name if count == 1 else f"{name}:{count}"


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


def status_of(end: str, code: int | None, said: str = "") -> ReplicaStatus:
    """The status of an attempt from its Sandbox. `end`: how it ended, in Modal's terms; `code`: exit code; `said`:
    message.

    Modal reports the code 0 for a process that never started, so 0 counts only if the process ended.
    """
    words = f": {' '.join(said.split())[:_WORDS]}" if said.strip() else ""
    if end in ("SUCCESS", "FAILURE") and code is not None:
        state, reason = _BY_CODE.get(code, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, reason, code, end, "" if code == EXIT_DONE else f"exit code {code}{words}")
    state, reason = _BY_STATUS.get(end, (ReplicaState.UNKNOWN, ""))
    return ReplicaStatus(state, reason, code or None, end, "" if end == RUNNING else f"Modal says {end}{words}")
