"""Executors launch replicas on machines. Imports nothing else of the project; their classes load at first use."""

import importlib
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.executors import names
from diloco_orchestrator.executors.answers import Failure as Failure
from diloco_orchestrator.executors.command_line import CommandLine as CommandLine
from diloco_orchestrator.executors.constructor_options import plain_options as plain_options
from diloco_orchestrator.executors.contract import CollectTimeout as CollectTimeout
from diloco_orchestrator.executors.contract import Composite as Composite
from diloco_orchestrator.executors.contract import ExecutorDenied as ExecutorDenied
from diloco_orchestrator.executors.contract import ExecutorError as ExecutorError
from diloco_orchestrator.executors.contract import LaunchError as LaunchError
from diloco_orchestrator.executors.contract import LaunchRequest as LaunchRequest
from diloco_orchestrator.executors.contract import MissingSdk as MissingSdk
from diloco_orchestrator.executors.contract import NoCapacity as NoCapacity
from diloco_orchestrator.executors.contract import PricesMachines as PricesMachines
from diloco_orchestrator.executors.contract import Recreatable as Recreatable
from diloco_orchestrator.executors.contract import ReplicaFailed as ReplicaFailed
from diloco_orchestrator.executors.contract import ReplicaHandle as ReplicaHandle
from diloco_orchestrator.executors.contract import ReplicaResult as ReplicaResult
from diloco_orchestrator.executors.contract import ReplicaState as ReplicaState
from diloco_orchestrator.executors.contract import ReplicaStatus as ReplicaStatus
from diloco_orchestrator.executors.contract import ServerlessExecutor as ServerlessExecutor
from diloco_orchestrator.executors.contract import Unavailable as Unavailable
from diloco_orchestrator.executors.contract import in_order as in_order
from diloco_orchestrator.executors.mixed import MixedExecutor as MixedExecutor
from diloco_orchestrator.executors.registry import OURS
from diloco_orchestrator.executors.remote_base import RemoteExecutor as RemoteExecutor
from diloco_orchestrator.executors.remote_base import attempt_labels as attempt_labels
from diloco_orchestrator.executors.remote_base import attempt_name as attempt_name
from diloco_orchestrator.executors.remote_base import ended_status as ended_status
from diloco_orchestrator.executors.remote_base import env_within as env_within
from diloco_orchestrator.executors.remote_base import limited as limited
from diloco_orchestrator.executors.remote_base import run_selector as run_selector

_HOME_OF = {symbol: home for home, _, symbol in (each.partition(":") for each in OURS.values())}
_OFFERED = [
    *_HOME_OF,
    *(name for name, each in globals().items() if getattr(each, "__module__", "").startswith(__package__ or "")),
]

if TYPE_CHECKING:
    from diloco_orchestrator.executors.eks_jobs import EKSExecutor as EKSExecutor
    from diloco_orchestrator.executors.hf_jobs import HFJobsExecutor as HFJobsExecutor
    from diloco_orchestrator.executors.kubernetes_jobs import KubernetesExecutor as KubernetesExecutor
    from diloco_orchestrator.executors.local_process import LocalProcessExecutor as LocalProcessExecutor
    from diloco_orchestrator.executors.modal_sandboxes import ModalExecutor as ModalExecutor
    from diloco_orchestrator.executors.slurm_jobs import SlurmExecutor as SlurmExecutor
else:  # hidden from type checkers, for which it would turn every misspelt name into Any

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(names.unknown_name("name in executors", name, _OFFERED))
        return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(_OFFERED)


if __name__ == "executors":  # imported by the short name
    from diloco_orchestrator.short_names import give_short_name

    give_short_name(__name__)
