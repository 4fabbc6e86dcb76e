"""Executors on loopback services that can be made to fail, for tests of outages and of quiet hours.

While a service is held it launches without ever finding a machine, so that nothing is started.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from scripted import STAMP, Scene

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from executors.contract import LaunchRequest, ReplicaHandle, ServerlessExecutor


@dataclass
class Service:
    """An executor and its loopback service. `calls`: requests that the service has met."""

    executor: ServerlessExecutor
    hold: Callable[[bool], None]
    break_with: Callable[[dict[str, Any]], None]
    heal: Callable[[], None]
    calls: Callable[[], int]
    machines: Callable[[], list[tuple[str, str]]]  # (replica, attempt) of every attempt that it was told to start
    parts: "tuple[Service, ...]" = ()


@contextmanager
def hugging_face(folder: Path) -> Iterator[Service]:
    from loopback_hf import LoopbackHF

    from executors.hf_jobs import HFJobsExecutor

    with LoopbackHF(page_size=100) as service:
        yield Service(
            HFJobsExecutor(endpoint=service.endpoint, token=service.token),
            service.hold,
            lambda fault: vars(service).update(fault),
            lambda: vars(service).update(failing=0, retry_after=None, delay_s=0.0, halves=False, odd=None),
            lambda: len(service.requests),
            lambda: [(j.labels["diloco-replica"], j.labels["diloco-attempt"]) for j in service.jobs.values()],
        )


@contextmanager
def kubernetes(folder: Path) -> Iterator[Service]:
    from loopback_kubernetes import running_kubernetes

    from executors.kubernetes_jobs import KubernetesExecutor

    with running_kubernetes() as cluster:
        kubeconfig = cluster.write_kubeconfig(folder / "kubeconfig")
        yield _of_cluster(cluster, KubernetesExecutor(kubeconfig=kubeconfig, image="any"))


@contextmanager
def eks(folder: Path) -> Iterator[Service]:
    import loopback_eks

    from executors.eks_jobs import EKSExecutor

    with ExitStack() as stack:
        aws = stack.enter_context(loopback_eks.running_aws())
        stack.enter_context(mock.patch.dict(os.environ, loopback_eks.environ(aws)))
        cluster = stack.enter_context(loopback_eks.running_cluster(aws))
        yield _of_cluster(cluster, EKSExecutor(loopback_eks.CLUSTER, region=loopback_eks.REGION, image="any"))


def _of_cluster(cluster: Any, executor: ServerlessExecutor) -> Service:
    def break_with(fault: dict[str, Any]) -> None:
        vars(cluster).update({"slow_s" if name == "delay_s" else name: value for name, value in fault.items()})

    def hold(on: bool) -> None:
        cluster.holding = on

    return Service(
        executor,
        hold,
        break_with,
        lambda: vars(cluster).update(failing=0, retry_after=None, slow_s=0.0, halves=False, odd=None),
        lambda: len(cluster.requests),
        lambda: [
            (job["metadata"]["labels"]["diloco-replica"], job["metadata"]["labels"]["diloco-attempt"])
            for job in cluster.objects("jobs")
        ],
    )


@contextmanager
def modal(folder: Path) -> Iterator[Service]:
    from grpclib import Status
    from loopback_modal import LoopbackModal

    from executors.modal_sandboxes import ModalExecutor

    with LoopbackModal() as server:
        server.page_size = 100
        by_http = {500: Status.INTERNAL, 503: Status.UNAVAILABLE, 504: Status.DEADLINE_EXCEEDED}

        def break_with(fault: dict[str, Any]) -> None:
            status = fault.get("failing", 0)
            server.failing, server.slow_s = by_http.get(status), fault.get("delay_s", 0.0)
            server.throttle_s = float(fault.get("retry_after", 2.0)) if status == 429 else None
            server.odd = fault.get("odd")

        yield Service(
            ModalExecutor("tests", client=server.client()),
            server.hold,
            break_with,
            lambda: break_with({}),
            lambda: len(server.requests),
            lambda: [(s.tags["diloco-replica"], s.tags["diloco-attempt"]) for s in server.sandboxes.values()],
        )


# Slurm's tools over a folder: each call is a line of `calls`; `fault`, where it exists, is what they all say as they
# fail, `odd` what they all print and succeed.
_TOOL = """#!/bin/sh
echo "{name} $*" >> '{folder}/calls'
[ -e '{folder}/fault' ] && {{ cat '{folder}/fault' >&2; exit 1; }}
[ -e '{folder}/odd' ] && {{ cat '{folder}/odd'; exit 0; }}
{lines}
"""
_SBATCH = """
for word in "$@"; do case $word in --job-name=*) name=${word#--job-name=};; esac; done
id=$(($(wc -l < "$FOLDER/jobs") + 1)); echo "$id $name" >> "$FOLDER/jobs"; echo "$id"
"""
_SQUEUE = """
while read -r id name; do
  printf '%-20s%-20s%-12s%-12s%-80s%s\\n' "$id" PENDING 0 0 "$name" Resources
done < "$FOLDER/jobs"
"""


@contextmanager
def slurm(folder: Path) -> Iterator[Service]:
    """Scripts in the place of Slurm's tools, whose messages are those of a genuine Slurm 22.05."""
    from executors.slurm_jobs import SlurmExecutor

    tools = folder / "slurm-tools"
    tools.mkdir()
    (tools / "jobs").touch()
    lines = {"sbatch": _SBATCH, "squeue": _SQUEUE, "scontrol": "echo ClusterName = tests", "scancel": "true"}
    for name, text in lines.items():
        program = _TOOL.format(name=name, folder=tools, lines=text.replace("$FOLDER", str(tools)))
        (tools / name).write_text(program)
        (tools / name).chmod(0o755)

    def machines() -> list[tuple[str, str]]:
        names = [line.split()[1] for line in (tools / "jobs").read_text().splitlines()]
        return [(name.rpartition("-r")[2].partition("-a")[0], name.rpartition("-a")[2]) for name in names]

    def break_with(fault: dict[str, Any]) -> None:
        if "odd" in fault:
            (tools / "odd").write_bytes(fault["odd"])
        else:
            (tools / "fault").write_text(fault["says"])

    def heal() -> None:
        for name in ("fault", "odd"):
            (tools / name).unlink(missing_ok=True)

    with mock.patch.dict(os.environ, {"PATH": f"{tools}:/usr/bin:/bin"}):
        yield Service(
            SlurmExecutor(directory=folder / "attempts"),
            lambda on: None,  # its jobs never start
            break_with,
            heal,
            lambda: len((tools / "calls").read_text().splitlines()) if (tools / "calls").exists() else 0,
            machines,
        )


@contextmanager
def mixed(folder: Path) -> Iterator[Service]:
    """Replica 0 on Hugging Face, the others on Kubernetes; the two services, which fail together, are `parts`."""
    from executors.mixed import MixedExecutor

    with hugging_face(folder) as first, kubernetes(folder) as second:

        def break_with(fault: dict[str, Any]) -> None:
            first.break_with(fault)
            second.break_with(fault)

        def heal() -> None:
            first.heal()
            second.heal()

        def hold(on: bool) -> None:
            first.hold(on)
            second.hold(on)

        yield Service(
            MixedExecutor([(first.executor, 1), (second.executor, 2)]),
            hold,
            break_with,
            heal,
            lambda: first.calls() + second.calls(),
            lambda: [*first.machines(), *second.machines()],
            (first, second),
        )


class OnThisMachine:
    """An executor whose replicas need no code archive, so that a store in memory will do."""

    shares_machine = True

    def __init__(self, executor: ServerlessExecutor, command: Sequence[str] = ("python", "-c", "pass")) -> None:
        self._executor = executor
        self._command = list(command)
        self.cancelled: list[ReplicaHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        return self._executor.launch(replace(request, command=self._command, secrets={}))

    def cancel(self, handle: ReplicaHandle) -> None:
        self.cancelled.append(handle)


def beat(scene: Scene, replica_id: int, counter: int, attempt: int = 1) -> None:
    """Write the heartbeat of a replica that trains."""
    record = Heartbeat(
        **STAMP(), replica_id=replica_id, attempt=attempt, counter=counter, phase="training", round=1, inner_step=0
    )
    scene.fleet.store.put(keys.heartbeat(replica_id, attempt), record.to_bytes())
