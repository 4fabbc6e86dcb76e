"""Replicas of two ranks on two pods of a loopback Kubernetes, with real processes over gloo: losses and notices."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_kubernetes import LoopbackKubernetes, running_kubernetes
from real_runs import FAST, digests, reader_of, wait_for

from diloco_orchestrator import Run, launch
from diloco_orchestrator.inspection.verify import verify
from executors.kubernetes_jobs import KubernetesExecutor

pytestmark = pytest.mark.slow

Start = Callable[..., tuple[Run, Path]]


@pytest.fixture
def cluster() -> Iterator[LoopbackKubernetes]:
    with running_kubernetes() as cluster:
        yield cluster


@pytest.fixture
def start(cluster: LoopbackKubernetes, tmp_path_factory: pytest.TempPathFactory) -> Start:
    def start(**settings: Any) -> tuple[Run, Path]:
        folder = tmp_path_factory.mktemp("island")
        kubeconfig = cluster.write_kubeconfig(folder / "kubeconfig")
        executor = KubernetesExecutor(kubeconfig=kubeconfig, image="any", ranks_per_machine=1)
        settings = {**FAST, "replicas": 1, "ranks_per_replica": 2, "rounds": 3, "sync_every": 4, "seed": 3, **settings}
        settings["env"] = {"OMP_NUM_THREADS": "1"}
        bucket = folder / "bucket"
        return launch("island_workloads:train", executor=executor, store=str(bucket), **settings), bucket

    return start


def test_an_island_that_loses_a_machine_says_which_and_ends_with_the_same_bits(start: Start, tmp_path: Path):
    args = {"model": "fsdp", "hidden": 31}
    undisturbed, expected = start(args=args)
    undisturbed.wait()
    fault = {"what": "supervisor", "replica": 0, "rank": 1, "step": 6, "once": str(tmp_path / "once")}
    run, bucket = start(args={**args, "fault": fault}, retry={"backoff_s": 0.0})
    run.wait()
    assert digests(bucket) == digests(expected) and verify(str(bucket)).agrees
    attempts = reader_of(bucket).attempts
    ended = attempts.exit(0, 1)
    assert ended is not None and ended.code == 1
    assert re.match("rank 1 of 2 was lost with machine 1 of this replica", ended.reason), ended.reason
    log = (bucket / "replicas/0/attempts/1/log.txt").read_text()
    assert "the stacks of rank 0, because rank 1 of 2 was lost" in log or "rank 0 ended too" in log
    again = attempts.exit(0, 2)
    assert again is not None and again.code == 0


def test_a_machine_that_is_taken_away_has_the_part_published_and_the_island_goes_on(
    start: Start, cluster: LoopbackKubernetes
):
    settings = {"replicas": 2, "ranks_per_replica": [2, 1], "quorum": 1, "rounds": 1, "sync_every": 10_000}
    run, bucket = start(args={"model": "ddp", "hidden": 31}, **settings)
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    attempts = reader_of(bucket).attempts

    def is_training() -> bool:
        beat = attempts.heartbeat(0, 1)
        return beat is not None and beat.inner_step > 5

    wait_for(is_training, "an inner step")
    handle = attempts.handle(0, 1)
    assert handle is not None
    cluster.preempt(handle.handle["native"]["job"])  # the second pod
    waiting.join()
    ended, again = attempts.exit(0, 1), attempts.exit(0, 2)
    assert ended is not None and (ended.code, ended.reason) == (75, "preempted")
    manifest = json.loads((bucket / "rounds/00000001/contributions/0.json").read_text())
    assert 5 < manifest["origins"][0]["steps"] < 10_000
    assert again is not None and again.code == 0
