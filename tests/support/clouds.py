"""Executors on loopback services, or a genuine Slurm, behind the same few words: what differs is one line."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from executors.contract import ReplicaHandle, ServerlessExecutor


@dataclass(frozen=True)
class Cloud:
    """Where replicas run."""

    construct: str  # Python that binds `executor`, in any process with `environ`
    executor: Callable[[], ServerlessExecutor]
    preempt: Callable[[ReplicaHandle], None]
    environ: Mapping[str, str] = field(default_factory=dict)
    credentials: tuple[str, ...] = ()


@contextmanager
def local(folder: Path) -> Iterator[Cloud]:
    from executors.local_process import LocalProcessExecutor

    where = str(folder / "executor")
    yield Cloud(
        f"from executors import LocalProcessExecutor; executor = LocalProcessExecutor({where!r})",
        lambda: LocalProcessExecutor(where),
        lambda handle: os.kill(handle.native["pid"], signal.SIGKILL),  # a power cut: there is no notice here
    )


@contextmanager
def modal(folder: Path) -> Iterator[Cloud]:
    from loopback_modal import LoopbackModal

    from executors.modal_sandboxes import ModalExecutor

    with LoopbackModal() as server:
        client = server.client()
        yield Cloud(
            "from executors import ModalExecutor; executor = ModalExecutor('tests')",
            lambda: ModalExecutor("tests", client=client),
            lambda handle: server.preempt(handle.native_id),
            server.environ(),
            (server.token_secret,),
        )


@contextmanager
def hf_jobs(folder: Path) -> Iterator[Cloud]:
    from loopback_hf import LoopbackHF

    from executors.hf_jobs import HFJobsExecutor

    with LoopbackHF() as service:
        yield Cloud(
            "from executors import HFJobsExecutor; executor = HFJobsExecutor()",
            lambda: HFJobsExecutor(endpoint=service.endpoint, token=service.token),
            lambda handle: service.end(handle.native_id),
            service.environ,
            (service.token,),
        )


@contextmanager
def kubernetes(folder: Path) -> Iterator[Cloud]:
    from loopback_kubernetes import TOKEN, running_kubernetes

    from executors.kubernetes_jobs import KubernetesExecutor

    with running_kubernetes() as cluster:
        config = cluster.write_kubeconfig(folder / "kubeconfig")
        construct = f"KubernetesExecutor(kubeconfig={config!r}, image='any')"
        yield Cloud(
            f"from executors import KubernetesExecutor; executor = {construct}",
            lambda: KubernetesExecutor(kubeconfig=config, image="any"),
            lambda handle: cluster.preempt(handle.native["job"]),
            {},
            (TOKEN,),
        )


@contextmanager
def eks(folder: Path) -> Iterator[Cloud]:
    import loopback_eks
    from loopback_eks import CLUSTER, REGION

    from executors.eks_jobs import EKSExecutor

    with (
        loopback_eks.running_aws() as aws,
        exported(loopback_eks.environ(aws)),
        loopback_eks.running_cluster(aws) as cluster,
    ):
        construct = f"EKSExecutor({CLUSTER!r}, region={REGION!r}, image='any')"
        yield Cloud(
            f"from executors import EKSExecutor; executor = {construct}",
            lambda: EKSExecutor(CLUSTER, region=REGION, image="any"),
            lambda handle: cluster.preempt(handle.native["job"]),
            loopback_eks.environ(aws),
            (loopback_eks.SECRET_KEY,),
        )


@contextmanager
def slurm(folder: Path) -> Iterator[Cloud]:
    from genuine_slurm import running_slurm

    from executors.slurm_jobs import SlurmExecutor

    where = str(folder / "attempts")
    with running_slurm(folder / "slurm") as cluster, exported(cluster.environ):

        def requeue(handle: ReplicaHandle) -> None:  # SIGTERM, 10 s later SIGKILL, and the job waits once more
            cluster.call("scontrol", "update", f"JobId={handle.native_id}", "Requeue=1")
            cluster.call("scontrol", "requeue", handle.native_id)

        yield Cloud(
            f"from executors import SlurmExecutor; executor = SlurmExecutor(directory={where!r})",
            lambda: SlurmExecutor(directory=where),
            requeue,
            cluster.environ,
        )


@contextmanager
def exported(environ: Mapping[str, str]) -> Iterator[None]:
    """For what the SDKs read from this process's environment."""
    with mock.patch.dict(os.environ, environ):
        yield
