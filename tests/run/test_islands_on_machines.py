"""Replicas of ranks on two machines, pods of a loopback Kubernetes or nodes of a genuine Slurm: losses and notices."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clouds
import pytest
from real_runs import FAST, digests, reader_of, taken_away_in_mid_round, wait_for

from diloco_orchestrator import Run, launch
from diloco_orchestrator.inspection.verify import verify
from diloco_orchestrator.run_log.attempts import AttemptRecords
from executors.contract import ReplicaHandle

pytestmark = pytest.mark.slow

Start = Callable[..., tuple[Run, Path]]
SHARDED = {"model": "fsdp", "hidden": 31}


@pytest.fixture
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[clouds.Cloud]:
    with getattr(clouds, request.param)(tmp_path) as cloud:
        yield cloud


@pytest.fixture
def start(cloud: clouds.Cloud, tmp_path_factory: pytest.TempPathFactory) -> Start:
    def start(**settings: Any) -> tuple[Run, Path]:
        bucket = tmp_path_factory.mktemp("island") / "bucket"
        settings = {**FAST, "replicas": 1, "ranks_per_replica": 2, "rounds": 3, "sync_every": 4, "seed": 3, **settings}
        settings["env"] = {"OMP_NUM_THREADS": "1"}
        return launch("island_workloads:train", executor=cloud.executor(), store=str(bucket), **settings), bucket

    return start


@pytest.mark.parametrize("cloud", ["kubernetes_pods", "kubernetes_pods_with_ipv6", "slurm_nodes"], indirect=True)
def test_an_island_that_loses_a_machine_says_which_and_ends_with_the_same_bits(start: Start, tmp_path: Path):
    undisturbed, expected = start(args=SHARDED)
    undisturbed.wait()
    fault = {"what": "supervisor", "replica": 0, "rank": 1, "step": 6, "once": str(tmp_path / "once")}
    run, bucket = start(args={**SHARDED, "fault": fault})
    run.wait()
    assert digests(bucket) == digests(expected) and verify(str(bucket)).agrees
    attempts = reader_of(bucket).attempts
    ended, again = attempts.exit(0, 1), attempts.exit(0, 2)
    assert ended is not None and ended.code == 1
    assert re.match("rank 1 of 2 was lost with machine 1 of this replica", ended.reason), ended.reason
    log = (bucket / "replicas/0/attempts/1/log.txt").read_text()
    assert "the stacks of rank 0, because rank 1 of 2 was lost" in log or "rank 0 ended too" in log
    assert again is not None and again.code == 0


@pytest.mark.parametrize("cloud", ["slurm_nodes"], indirect=True)
def test_an_island_whose_second_node_slurm_takes_down_starts_anew_and_ends_with_the_same_bits(
    start: Start, cloud: clouds.Cloud, tmp_path: Path
):
    undisturbed, expected = start(args=SHARDED)
    undisturbed.wait()
    fault = {"what": "sleep", "replica": 0, "rank": 1, "step": 6, "once": str(tmp_path / "once")}
    run, bucket = start(args={**SHARDED, "fault": fault})
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    wait_for((tmp_path / "once").exists, "the middle of round 2")
    attempts = reader_of(bucket).attempts
    _take_away(cloud, attempts)
    waiting.join()
    assert digests(bucket) == digests(expected) and verify(str(bucket)).agrees
    again = attempts.exit(0, 2)
    assert again is not None and again.code == 0


@pytest.mark.parametrize("cloud", ["kubernetes_pods"], indirect=True)
def test_a_machine_that_is_taken_away_has_the_part_published_and_the_island_goes_on(start: Start, cloud: clouds.Cloud):
    settings = {"replicas": 2, "ranks_per_replica": [2, 1], "quorum": 1, "rounds": 1, "sync_every": 10_000}
    run, bucket = start(args={"model": "ddp", "hidden": 31}, **settings)
    taken_away_in_mid_round(run, bucket, lambda attempts: _take_away(cloud, attempts))


def _take_away(cloud: clouds.Cloud, attempts: AttemptRecords) -> None:
    """Have the provider take away the last machine of replica 0's first attempt."""
    handle = attempts.handle(0, 1)
    assert handle is not None
    cloud.preempt(ReplicaHandle.from_json(handle.handle))
