"""Executors: where replicas run. Imports nothing of the rest of the project; loaded at first use."""

import importlib
from typing import Any

from executors.names import unknown_name

_HOMES = {
    "executors.contract": (
        "CollectTimeout",
        "ExecutorDenied",
        "ExecutorError",
        "LaunchError",
        "LaunchRequest",
        "MissingSdk",
        "NoCapacity",
        "ReplicaFailed",
        "ReplicaHandle",
        "ReplicaResult",
        "ReplicaState",
        "ReplicaStatus",
        "ServerlessExecutor",
    ),
    "executors.eks_jobs": ("EKSExecutor",),
    "executors.hf_jobs": ("HFJobsExecutor",),
    "executors.kubernetes_jobs": ("KubernetesExecutor",),
    "executors.local_process": ("LocalProcessExecutor",),
    "executors.mixed": ("MixedExecutor",),
    "executors.modal_sandboxes": ("ModalExecutor",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(unknown_name("name in executors", name, _HOME_OF))
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
