"""Executors on loopback services, or a genuine Slurm or Ray, behind the same few words: what differs is one line."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from executors.contract import ReplicaHandle, ServerlessExecutor

if TYPE_CHECKING:
    from genuine_slurm import GenuineSlurm


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
def kubernetes(folder: Path, pod_ip: str = "", **options: Any) -> Iterator[Cloud]:
    from loopback_kubernetes import TOKEN, running_kubernetes

    from executors.kubernetes_jobs import KubernetesExecutor

    with running_kubernetes() as cluster:
        cluster.pod_ip = pod_ip or cluster.pod_ip
        config = cluster.write_kubeconfig(folder / "kubeconfig")
        given = {"kubeconfig": config, "image": "any", **options}
        yield Cloud(
            f"from executors import KubernetesExecutor; executor = KubernetesExecutor(**{given!r})",
            lambda: KubernetesExecutor(**given),
            lambda handle: cluster.preempt(handle.native["job"]),
            {},
            (TOKEN,),
        )


def kubernetes_pods(folder: Path) -> AbstractContextManager[Cloud]:
    """A pod for each rank."""
    return kubernetes(folder, ranks_per_machine=1)


def kubernetes_pods_with_ipv6(folder: Path) -> AbstractContextManager[Cloud]:
    """The same, in a cluster whose only replica of several pods has IPv6 addresses."""
    return kubernetes(folder, "::1", ranks_per_machine=1)


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
    with _slurm(folder) as (cluster, construct, make):

        def requeue(handle: ReplicaHandle) -> None:  # SIGTERM, 10 s later SIGKILL, and the job waits once more
            cluster.call("scontrol", "update", f"JobId={handle.native_id}", "Requeue=1")
            cluster.call("scontrol", "requeue", handle.native_id)

        yield Cloud(construct, make, requeue, cluster.environ)


@contextmanager
def slurm_nodes(folder: Path) -> Iterator[Cloud]:
    """A node for each rank; a preempted replica loses one of its nodes."""
    with _slurm(folder, {"ranks_per_machine": 1}, nodes=4, cpus=1) as (cluster, construct, make):

        def lose(handle: ReplicaHandle) -> None:
            nodes = cluster.call("scontrol", "show", "hostnames", cluster.node_of(handle.native_id)).split()
            cluster.take_down(nodes[-1])

        yield Cloud(construct, make, lose, cluster.environ)


def slurm_told(folder: Path) -> AbstractContextManager[Cloud]:
    """Preempted by a signal to the batch script, which the replica has replaced; no SIGKILL follows."""
    return _told(folder, "--batch")


def slurm_told_in_full(folder: Path) -> AbstractContextManager[Cloud]:
    """Preempted by a signal to every process of the job."""
    return _told(folder, "--full")


@contextmanager
def _told(folder: Path, whom: str) -> Iterator[Cloud]:
    with _slurm(folder) as (cluster, construct, make):

        def tell(handle: ReplicaHandle) -> None:
            cluster.call("scancel", "--signal=TERM", whom, handle.native_id)
            (folder / "release").touch()  # the held replica goes on, and leaves at its next step

        yield Cloud(construct, make, tell, cluster.environ)


@contextmanager
def slurm_with_grace(folder: Path) -> Iterator[Cloud]:
    """Preempted by a job of more priority, on a site that tells the job at the beginning of the grace time."""
    options = "SlurmctldParameters=preempt_send_user_signal"
    with _slurm(folder, nodes=4, cpus=1, options=options) as (cluster, construct, make):
        cluster.call("scontrol", "update", "PartitionName=spare", "GraceTime=600")

        def preempt(handle: ReplicaHandle) -> None:
            cluster.preempt(f"--nodelist={cluster.node_of(handle.native_id)}")
            show = ["scontrol", "show", "job", handle.native_id]
            cluster.wait(lambda: "PreemptTime=None" not in cluster.call(*show), "its grace time has begun")
            (folder / "release").touch()

        yield Cloud(construct, make, preempt, cluster.environ)


@contextmanager
def slurm_losing_a_node(folder: Path) -> Iterator[Cloud]:
    """One replica per node; the node of the preempted one is taken down."""
    with _slurm(folder, nodes=4, cpus=1) as (cluster, construct, make):

        def lose(handle: ReplicaHandle) -> None:
            cluster.take_down(cluster.node_of(handle.native_id))

        yield Cloud(construct, make, lose, cluster.environ)


@contextmanager
def _slurm(
    folder: Path, given: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[tuple["GenuineSlurm", str, Callable[[], ServerlessExecutor]]]:
    """A cluster, the line that makes an executor of it, and an executor's maker. `given`: the executor's options."""
    from genuine_slurm import running_slurm

    from executors.slurm_jobs import SlurmExecutor

    made_of = {"directory": str(folder / "attempts"), **(given or {})}
    with running_slurm(folder / "slurm", **options) as cluster, exported(cluster.environ):
        construct = f"from executors import SlurmExecutor; executor = SlurmExecutor(**{made_of!r})"
        yield cluster, construct, lambda: SlurmExecutor(**made_of)


@contextmanager
def ray(folder: Path) -> Iterator[Cloud]:
    """One replica per node; the node of the preempted one loses its power, and another one is started."""
    from genuine_ray import TOKEN, running_ray

    from executors.ray_jobs import RayExecutor

    with running_ray(1, 1, 1) as cluster, exported(cluster.environ):
        options = {"address": cluster.address, "cpu": 1, "python": sys.executable}

        def preempt(handle: ReplicaHandle) -> None:
            cluster.cut_power(cluster.node_of(handle.native_id))
            cluster.start_node(cpus=1)

        yield Cloud(
            f"from executors import RayExecutor; executor = RayExecutor(**{options!r})",
            lambda: RayExecutor(**options),
            preempt,
            cluster.environ,
            (TOKEN,),
        )


@contextmanager
def exported(environ: Mapping[str, str]) -> Iterator[None]:
    """For what the SDKs read from this process's environment."""
    with mock.patch.dict(os.environ, environ):
        yield
