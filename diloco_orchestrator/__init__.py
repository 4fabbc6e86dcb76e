"""DiLoCo training whose only infrastructure is a bucket.

Everything a user needs is importable from here, loaded at first use: importing this package loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "diloco_orchestrator.allreduce.object_store": ("ObjectStoreAllReduce",),
    "diloco_orchestrator.config": ("GuardConfig", "OuterConfig", "RetryConfig", "RunConfig", "TimingConfig"),
    "diloco_orchestrator.code_archive.pack": ("Code",),
    "diloco_orchestrator.run": ("Run", "RunResult", "attach", "launch"),
    "diloco_orchestrator.inspection.status": ("RoundRow", "RunReader", "RunStatus"),
    "diloco_orchestrator.errors": (
        "AllReduceTimeout",
        "BaseDiverged",
        "ConfigError",
        "DilocoError",
        "ModelMismatch",
        "NoSuchRun",
        "PayloadCorrupt",
        "QuorumLost",
        "RoundReused",
        "RunFailed",
        "RunFolderTaken",
        "StoreError",
    ),
    "diloco_orchestrator.guard": (
        "CollapseStopError",
        "HeldOutGuard",
        "TripwireStatus",
        "kl_token_trust_filter",
    ),
    "diloco_orchestrator.outer.outer_step": ("Nesterov",),
    "diloco_orchestrator.store.open_store": ("open_store",),
    "diloco_orchestrator.executors": (
        "EKSExecutor",
        "HFJobsExecutor",
        "KubernetesExecutor",
        "LocalProcessExecutor",
        "MixedExecutor",
        "ModalExecutor",
        "ServerlessExecutor",
    ),
    "diloco_orchestrator.replica.context": ("ReplicaContext",),
    "diloco_orchestrator.replica.interop.torchft": ("MockManager", "ObjectStoreManager"),
    "diloco_orchestrator.replica.training.outer_loop": ("make_diloco_outer_loop",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from diloco_orchestrator.allreduce.object_store import ObjectStoreAllReduce as ObjectStoreAllReduce
    from diloco_orchestrator.config import OuterConfig as OuterConfig
    from diloco_orchestrator.config import RunConfig as RunConfig
    from diloco_orchestrator.executors.local_process import LocalProcessExecutor as LocalProcessExecutor
    from diloco_orchestrator.run import Run as Run
    from diloco_orchestrator.run import attach as attach
    from diloco_orchestrator.run import launch as launch


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        from diloco_orchestrator.errors import unknown_name

        raise AttributeError(unknown_name(f"name in {__name__}", name, _HOME_OF))
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
