"""DiLoCo training whose only infrastructure is a bucket.

Every public name is importable from here and is loaded at first use: importing this package loads no torch.
"""

from typing import TYPE_CHECKING

__version__ = "0.3.0"

# Where each public name is defined. Type checkers read the imports below; a test keeps both equal.
_HOMES = {
    "diloco_orchestrator.allreduce.object_store": ("ObjectStoreAllReduce",),
    "diloco_orchestrator.code_archive.pack": ("CodeBundle",),
    "diloco_orchestrator.config": (
        "GuardConfig",
        "OuterConfig",
        "RetentionConfig",
        "RetryConfig",
        "RunConfig",
        "RunSettings",
        "TimingConfig",
    ),
    "diloco_orchestrator.errors": (
        "AllReduceTimeout",
        "BaseDiverged",
        "ConfigError",
        "DilocoError",
        "HeldoutItemInTraining",
        "ModelMismatch",
        "NoSuchRun",
        "ObjectMissing",
        "PayloadCorrupt",
        "Preempted",
        "QuorumLost",
        "RecordInvalid",
        "RecordTooNew",
        "RecordTooOld",
        "RoundError",
        "RoundReused",
        "RunFailed",
        "RunFolderTaken",
        "RunNotFinished",
        "StoreDenied",
        "StoreError",
        "StoreFull",
        "StoreUnavailable",
        "Superseded",
        "WorkloadEndedEarly",
    ),
    "diloco_orchestrator.executors.contract": (
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
        "Unavailable",
    ),
    "diloco_orchestrator.executors.eks_jobs": ("EKSExecutor",),
    "diloco_orchestrator.executors.hf_jobs": ("HFJobsExecutor",),
    "diloco_orchestrator.executors.kubernetes_jobs": ("KubernetesExecutor",),
    "diloco_orchestrator.executors.local_process": ("LocalProcessExecutor",),
    "diloco_orchestrator.executors.mixed": ("MixedExecutor",),
    "diloco_orchestrator.executors.modal_sandboxes": ("ModalExecutor",),
    "diloco_orchestrator.executors.remote_base": ("RemoteExecutor",),
    "diloco_orchestrator.executors.slurm_jobs": ("SlurmExecutor",),
    "diloco_orchestrator.guard.evidence": ("Evidence",),
    "diloco_orchestrator.guard.heldout": (
        "CollapseStopError",
        "HeldOutGuard",
        "TripwireStatus",
        "kl_token_trust_filter",
    ),
    "diloco_orchestrator.guard.sequential": ("SequentialGuard",),
    "diloco_orchestrator.guard.set_size": ("items_needed",),
    "diloco_orchestrator.inspection.audit": ("Audit", "audit"),
    "diloco_orchestrator.inspection.pull": ("pull",),
    "diloco_orchestrator.inspection.push": ("PushedSnapshot", "push"),
    "diloco_orchestrator.inspection.status": (
        "RoundRow",
        "RunReader",
        "RunStatus",
    ),
    "diloco_orchestrator.inspection.verify": (
        "Verification",
        "verify",
    ),
    "diloco_orchestrator.inspection.whatif": (
        "WhatIf",
        "whatif",
    ),
    "diloco_orchestrator.join.executor": ("JoinExecutor",),
    "diloco_orchestrator.launching.plan": (
        "LaunchPlan",
        "plan_launch",
    ),
    "diloco_orchestrator.outer.outer_step": ("Nesterov",),
    "diloco_orchestrator.protocol.verdict": ("Verdict", "VerdictKind"),
    "diloco_orchestrator.replica.context": (
        "ReplicaContext",
        "ReplicaSession",
    ),
    "diloco_orchestrator.replica.interop.guard_callback": ("HeldOutGuardCallback",),
    "diloco_orchestrator.replica.interop.hf": (
        "ReplicaCallback",
        "train_as_replica",
    ),
    "diloco_orchestrator.replica.interop.reward_taps": ("tap",),
    "diloco_orchestrator.replica.interop.torchft": ("ObjectStoreManager",),
    "diloco_orchestrator.replica.probe": ("KLProbe", "token_mean_kl"),
    "diloco_orchestrator.replica.training.diloco_loop": (
        "DiLoCoLoop",
        "make_diloco_outer_loop",
    ),
    "diloco_orchestrator.replica.training.round_hooks": ("RoundView",),
    "diloco_orchestrator.launching.run": (
        "Run",
        "RunResult",
        "attach",
        "launch",
    ),
    "diloco_orchestrator.split.manifest": ("HeldoutManifest",),
    "diloco_orchestrator.split.split": ("HeldoutSplit", "SplitItem", "Splitting"),
    "diloco_orchestrator.store.open_store": ("open_store",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from diloco_orchestrator.allreduce.object_store import ObjectStoreAllReduce as ObjectStoreAllReduce
    from diloco_orchestrator.code_archive.pack import CodeBundle as CodeBundle
    from diloco_orchestrator.config import GuardConfig as GuardConfig
    from diloco_orchestrator.config import OuterConfig as OuterConfig
    from diloco_orchestrator.config import RetentionConfig as RetentionConfig
    from diloco_orchestrator.config import RetryConfig as RetryConfig
    from diloco_orchestrator.config import RunConfig as RunConfig
    from diloco_orchestrator.config import RunSettings as RunSettings
    from diloco_orchestrator.config import TimingConfig as TimingConfig
    from diloco_orchestrator.errors import AllReduceTimeout as AllReduceTimeout
    from diloco_orchestrator.errors import BaseDiverged as BaseDiverged
    from diloco_orchestrator.errors import ConfigError as ConfigError
    from diloco_orchestrator.errors import DilocoError as DilocoError
    from diloco_orchestrator.errors import HeldoutItemInTraining as HeldoutItemInTraining
    from diloco_orchestrator.errors import ModelMismatch as ModelMismatch
    from diloco_orchestrator.errors import NoSuchRun as NoSuchRun
    from diloco_orchestrator.errors import ObjectMissing as ObjectMissing
    from diloco_orchestrator.errors import PayloadCorrupt as PayloadCorrupt
    from diloco_orchestrator.errors import Preempted as Preempted
    from diloco_orchestrator.errors import QuorumLost as QuorumLost
    from diloco_orchestrator.errors import RecordInvalid as RecordInvalid
    from diloco_orchestrator.errors import RecordTooNew as RecordTooNew
    from diloco_orchestrator.errors import RecordTooOld as RecordTooOld
    from diloco_orchestrator.errors import RoundError as RoundError
    from diloco_orchestrator.errors import RoundReused as RoundReused
    from diloco_orchestrator.errors import RunFailed as RunFailed
    from diloco_orchestrator.errors import RunFolderTaken as RunFolderTaken
    from diloco_orchestrator.errors import RunNotFinished as RunNotFinished
    from diloco_orchestrator.errors import StoreDenied as StoreDenied
    from diloco_orchestrator.errors import StoreError as StoreError
    from diloco_orchestrator.errors import StoreFull as StoreFull
    from diloco_orchestrator.errors import StoreUnavailable as StoreUnavailable
    from diloco_orchestrator.errors import Superseded as Superseded
    from diloco_orchestrator.errors import WorkloadEndedEarly as WorkloadEndedEarly
    from diloco_orchestrator.executors.contract import CollectTimeout as CollectTimeout
    from diloco_orchestrator.executors.contract import ExecutorDenied as ExecutorDenied
    from diloco_orchestrator.executors.contract import ExecutorError as ExecutorError
    from diloco_orchestrator.executors.contract import LaunchError as LaunchError
    from diloco_orchestrator.executors.contract import LaunchRequest as LaunchRequest
    from diloco_orchestrator.executors.contract import MissingSdk as MissingSdk
    from diloco_orchestrator.executors.contract import NoCapacity as NoCapacity
    from diloco_orchestrator.executors.contract import ReplicaFailed as ReplicaFailed
    from diloco_orchestrator.executors.contract import ReplicaHandle as ReplicaHandle
    from diloco_orchestrator.executors.contract import ReplicaResult as ReplicaResult
    from diloco_orchestrator.executors.contract import ReplicaState as ReplicaState
    from diloco_orchestrator.executors.contract import ReplicaStatus as ReplicaStatus
    from diloco_orchestrator.executors.contract import ServerlessExecutor as ServerlessExecutor
    from diloco_orchestrator.executors.contract import Unavailable as Unavailable
    from diloco_orchestrator.executors.eks_jobs import EKSExecutor as EKSExecutor
    from diloco_orchestrator.executors.hf_jobs import HFJobsExecutor as HFJobsExecutor
    from diloco_orchestrator.executors.kubernetes_jobs import KubernetesExecutor as KubernetesExecutor
    from diloco_orchestrator.executors.local_process import LocalProcessExecutor as LocalProcessExecutor
    from diloco_orchestrator.executors.mixed import MixedExecutor as MixedExecutor
    from diloco_orchestrator.executors.modal_sandboxes import ModalExecutor as ModalExecutor
    from diloco_orchestrator.executors.remote_base import RemoteExecutor as RemoteExecutor
    from diloco_orchestrator.executors.slurm_jobs import SlurmExecutor as SlurmExecutor
    from diloco_orchestrator.guard.evidence import Evidence as Evidence
    from diloco_orchestrator.guard.heldout import CollapseStopError as CollapseStopError
    from diloco_orchestrator.guard.heldout import HeldOutGuard as HeldOutGuard
    from diloco_orchestrator.guard.heldout import TripwireStatus as TripwireStatus
    from diloco_orchestrator.guard.heldout import kl_token_trust_filter as kl_token_trust_filter
    from diloco_orchestrator.guard.sequential import SequentialGuard as SequentialGuard
    from diloco_orchestrator.guard.set_size import items_needed as items_needed
    from diloco_orchestrator.inspection.audit import Audit as Audit
    from diloco_orchestrator.inspection.audit import audit as audit
    from diloco_orchestrator.inspection.pull import pull as pull
    from diloco_orchestrator.inspection.push import PushedSnapshot as PushedSnapshot
    from diloco_orchestrator.inspection.push import push as push
    from diloco_orchestrator.inspection.status import RoundRow as RoundRow
    from diloco_orchestrator.inspection.status import RunReader as RunReader
    from diloco_orchestrator.inspection.status import RunStatus as RunStatus
    from diloco_orchestrator.inspection.verify import Verification as Verification
    from diloco_orchestrator.inspection.verify import verify as verify
    from diloco_orchestrator.inspection.whatif import WhatIf as WhatIf
    from diloco_orchestrator.inspection.whatif import whatif as whatif
    from diloco_orchestrator.join.executor import JoinExecutor as JoinExecutor
    from diloco_orchestrator.launching.plan import LaunchPlan as LaunchPlan
    from diloco_orchestrator.launching.plan import plan_launch as plan_launch
    from diloco_orchestrator.launching.run import Run as Run
    from diloco_orchestrator.launching.run import RunResult as RunResult
    from diloco_orchestrator.launching.run import attach as attach
    from diloco_orchestrator.launching.run import launch as launch
    from diloco_orchestrator.outer.outer_step import Nesterov as Nesterov
    from diloco_orchestrator.protocol.verdict import Verdict as Verdict
    from diloco_orchestrator.protocol.verdict import VerdictKind as VerdictKind
    from diloco_orchestrator.replica.context import ReplicaContext as ReplicaContext
    from diloco_orchestrator.replica.context import ReplicaSession as ReplicaSession
    from diloco_orchestrator.replica.interop.guard_callback import HeldOutGuardCallback as HeldOutGuardCallback
    from diloco_orchestrator.replica.interop.hf import ReplicaCallback as ReplicaCallback
    from diloco_orchestrator.replica.interop.hf import train_as_replica as train_as_replica
    from diloco_orchestrator.replica.interop.reward_taps import tap as tap
    from diloco_orchestrator.replica.interop.torchft import ObjectStoreManager as ObjectStoreManager
    from diloco_orchestrator.replica.probe import KLProbe as KLProbe
    from diloco_orchestrator.replica.probe import token_mean_kl as token_mean_kl
    from diloco_orchestrator.replica.training.diloco_loop import DiLoCoLoop as DiLoCoLoop
    from diloco_orchestrator.replica.training.diloco_loop import make_diloco_outer_loop as make_diloco_outer_loop
    from diloco_orchestrator.replica.training.round_hooks import RoundView as RoundView
    from diloco_orchestrator.split.manifest import HeldoutManifest as HeldoutManifest
    from diloco_orchestrator.split.split import HeldoutSplit as HeldoutSplit
    from diloco_orchestrator.split.split import SplitItem as SplitItem
    from diloco_orchestrator.split.split import Splitting as Splitting
    from diloco_orchestrator.store.open_store import open_store as open_store
else:

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            from diloco_orchestrator.errors import unknown_name

            raise AttributeError(unknown_name(f"name in {__name__}", name, _HOME_OF))
        from importlib import import_module

        return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
