"""A replica whose ranks are on several machines is one object at its provider: what is asked for, and what it says."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback_kubernetes import LoopbackKubernetes, running_kubernetes

from executors import EKSExecutor, KubernetesExecutor, SlurmExecutor
from executors.contract import ExecutorDenied, LaunchRequest, ReplicaState, price_of
from executors.testing import ended_state, request_of, wait_until

NAME = "dl-contract-run-r0-a1"
# What each pod prints, and then waits until it is asked to leave.
_TELL = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
    "print(*(os.environ['DILOCO_' + n] for n in ('MACHINES', 'MACHINE', 'MEETING')), "
    "len(os.environ['DILOCO_MEETING_KEY']), flush=True); "
)
_STAY = _TELL + "signal.sigwait([signal.SIGTERM]); sys.exit(75 if os.environ['DILOCO_MACHINE'] == '0' else 0)"


@pytest.fixture
def cluster() -> Iterator[LoopbackKubernetes]:
    with running_kubernetes() as cluster:
        yield cluster


def executor_of(cluster: LoopbackKubernetes, folder: Path, **options: Any) -> KubernetesExecutor:
    kubeconfig = cluster.write_kubeconfig(folder / "kubeconfig")
    return KubernetesExecutor(kubeconfig=kubeconfig, image="any", ranks_per_machine=2, **options)


def of_four_ranks(code: str = _STAY, **options: Any) -> LaunchRequest:
    return replace(request_of(code, **options), ranks=4)


def test_a_replica_on_two_pods_is_an_indexed_job_with_a_headless_service(cluster: LoopbackKubernetes, tmp_path: Path):
    plan = executor_of(cluster, tmp_path, gpu=1).plan(of_four_ranks())
    spec = plan["job"]["spec"]
    assert [spec[name] for name in ("completionMode", "completions", "parallelism", "backoffLimit")] == [
        *("Indexed", 2, 2, 0)
    ]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert {"name": "DILOCO_MEETING", "value": f"{NAME}-0.{NAME}:29500"} in container["env"]
    assert spec["template"]["spec"]["subdomain"] == plan["service"]["metadata"]["name"] == NAME
    service = plan["service"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert plan["secret"]["stringData"] == {"DILOCO_MEETING_KEY": "<redacted>"}


def test_a_replica_that_fits_one_pod_is_a_job_as_ever(cluster: LoopbackKubernetes, tmp_path: Path):
    request = request_of(_STAY)
    usual = KubernetesExecutor(image="any").plan(request)
    assert executor_of(cluster, tmp_path).plan(request) == usual
    assert "completionMode" not in usual["job"]["spec"]


def test_the_pods_know_each_other(cluster: LoopbackKubernetes, tmp_path: Path):
    executor = executor_of(cluster, tmp_path)
    handle = executor.launch(of_four_ranks())
    wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "both run")
    wait_until(lambda: len(list(executor.logs(handle))) == 1, "it has spoken")
    (said,) = executor.logs(handle)  # of machine 0
    ip = next(each for each in cluster.objects("pods") if each["spec"]["hostname"] == f"{NAME}-0")["status"]["podIP"]
    assert said == f"2 0 {ip}:29500 32"
    assert executor.find("contract-run") == [handle] and handle.native["pods"] == 2


@pytest.mark.slow  # a deadline of Kubernetes is a second or more
def test_a_cancel_reaches_every_pod_and_keeps_it(cluster: LoopbackKubernetes, tmp_path: Path):
    executor = executor_of(cluster, tmp_path)
    handle = executor.launch(of_four_ranks())
    wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "both run")
    executor.cancel(handle)
    assert ended_state(executor, handle) is ReplicaState.CANCELLED
    assert all(each["status"]["phase"] == "Failed" for each in cluster.objects("pods"))  # both were told, and kept


def test_an_attempt_whose_second_pod_finds_no_node_is_pending(cluster: LoopbackKubernetes, tmp_path: Path):
    executor = executor_of(cluster, tmp_path)
    cluster.most_pods = 1
    handle = executor.launch(of_four_ranks())
    wait_until(lambda: len([p for p in cluster.objects("pods") if p["status"]["phase"] == "Running"]) == 1, "one runs")
    assert (executor.poll(handle).state, executor.poll(handle).native_state) == (ReplicaState.PENDING, "Unschedulable")


@pytest.mark.parametrize(
    ("code", "state", "exit_code"),
    [
        ("import os, sys; sys.exit(78 if os.environ['DILOCO_MACHINE'] == '1' else 0)", ReplicaState.FAILED, 78),
        ("import os, sys; sys.exit(75 if os.environ['DILOCO_MACHINE'] == '0' else 0)", ReplicaState.PREEMPTED, 75),
        ("", ReplicaState.SUCCEEDED, 0),
    ],
)
def test_the_machine_that_failed_says_how_the_attempt_ended(
    cluster: LoopbackKubernetes, tmp_path: Path, code: str, state: ReplicaState, exit_code: int
):
    executor = executor_of(cluster, tmp_path)
    handle = executor.launch(of_four_ranks(code))
    assert ended_state(executor, handle) is state
    assert executor.poll(handle).exit_code == exit_code


def test_a_pod_that_is_evicted_takes_the_attempt_with_it(cluster: LoopbackKubernetes, tmp_path: Path):
    executor = executor_of(cluster, tmp_path)
    handle = executor.launch(of_four_ranks())
    wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "both run")
    cluster.preempt(NAME)  # the second
    assert ended_state(executor, handle) is ReplicaState.PREEMPTED
    assert cluster.objects("pods") == []


def test_a_server_too_old_to_number_pods_is_denied(cluster: LoopbackKubernetes, tmp_path: Path):
    cluster.drops = {"completionMode"}
    with pytest.raises(ExecutorDenied, match=r"1\.24 or newer, or leave out ranks_per_machine"):
        executor_of(cluster, tmp_path).launch(of_four_ranks())
    assert cluster.objects("jobs") == []


def test_a_replica_on_two_nodes_is_one_job_whose_steps_are_asked_to_leave(tmp_path: Path):
    executor = SlurmExecutor(ranks_per_machine=2, gpu="a100", cpu=8, directory=tmp_path, python="/venv/bin/python")
    plan = executor.plan(replace(of_four_ranks("print()"), command=["python", "-c", "print('a b')"]))
    for word in ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gres=gpu:a100:2", "--signal=TERM@60"):
        assert word in plan["command"]
    assert plan["script"][-2].startswith("export DILOCO_MACHINES=2 DILOCO_MEETING_KEY=$(")
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [ "$1" != bash ]; do echo "$1"; shift; done; exec "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    begin, _, program = plan["script"][-1].partition("/venv/bin/python")
    assert program == " -c 'print('\"'\"'a b'\"'\"')'"
    script = "\n".join([plan["script"][-2], f"{begin}bash -c 'echo $DILOCO_MACHINE $DILOCO_MACHINES $DILOCO_MEETING'"])
    told = {"SLURM_PROCID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_JOB_ID": "1234567"}
    environ = {**told, "SLURM_CPUS_PER_TASK": "8", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    steps = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=120"]
    assert done.stdout.splitlines() == [*steps, "--cpus-per-task=8", "1 2 10.0.0.7:24567"]


@pytest.mark.parametrize("make", [SlurmExecutor, lambda **given: KubernetesExecutor(image="any", **given)])
def test_ranks_that_machines_cannot_share_equally_are_refused(make: Any):
    with pytest.raises(ValueError, match=r"replica 0 has 5 ranks, which 2 machines of at most 3"):
        make(ranks_per_machine=3).plan(replace(of_four_ranks(), ranks=5))
    with pytest.raises(ValueError, match=r"has 2 ranks on each machine, .* Set ranks_per_replica=16"):
        make(ranks_per_machine=2, gpu=8).plan(of_four_ranks())
    with pytest.raises(ValueError, match=r"ranks_per_machine=0 is no number of ranks"):
        make(ranks_per_machine=0)


def test_all_machines_of_a_replica_are_paid_for():
    given: dict[str, Any] = {"region": "us-east-1", "image": "any", "spot": False, "instance_type": "g6.xlarge"}
    executor = EKSExecutor("mine", ranks_per_machine=1, **given)
    one, three = (price_of(executor, LaunchRequest("run", 0, 1, [], ranks=ranks)) for ranks in (1, 3))
    assert one is not None and three is not None and three.hourly_usd == pytest.approx(3 * one.hourly_usd)
