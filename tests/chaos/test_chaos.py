"""A real run over a signed S3 server behind a faulty network, its processes killed, stopped and preempted at random."""

from pathlib import Path

import pytest
from chaos_run import Chaos
from faulty_proxy import Faults, proxy_before
from real_runs import FAST
from s3_server import S3Server

from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.retrying import RetryPolicy

SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.mark.parametrize(
    "fault", ["reset", "lost_reply", "refused", "truncated", pytest.param("stalled", marks=pytest.mark.slow), "slow"]
)
def test_the_store_keeps_its_promises_through_each_fault_of_the_network(s3_server: S3Server, bucket: str, fault: str):
    share = 0.05 if fault == "stalled" else 0.25
    with proxy_before(s3_server.url, Faults(**{fault: share}), seed=1) as (proxy, url):
        options = s3_server.options(endpoint_url=url)
        store = open_store(f"s3://{bucket}/x", options, retry=RetryPolicy(first_pause_s=0.01, longest_pause_s=0.2))
        for index in range(12):
            data = bytes([index]) * 3000
            assert store.create(f"k/{index:02d}", data) is True
            assert store.create(f"k/{index:02d}", b"other") is False
            assert store.get(f"k/{index:02d}") == data
        assert [info.key for info in store.list("k/")] == [f"k/{index:02d}" for index in range(12)]
        assert proxy.met[fault] > 0


@pytest.mark.slow
def test_a_run_is_disturbed_and_its_bucket_agrees(tmp_path: Path, s3_server: S3Server, bucket: str, monkeypatch):
    settings = {**FAST, "quorum": None, "replicas": 3, "rounds": 100_000, "sync_every": 5, "args": {"pause_s": 0.05}}
    settings["timing"] = {**settings["timing"], "poll_s": 0.2, "heartbeat_s": 1.0}
    settings["retry"] = {"backoff_s": 0.0, "max_errors": 1000}
    with proxy_before(s3_server.url, Faults.all_at(0.004), seed=2) as (proxy, url):
        environ = {**s3_server.environ(), "AWS_ENDPOINT_URL": url}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{bucket}/run"
        chaos = Chaos(tmp_path, url, "tiny_workloads:train", settings, environ, [SUPPORT], proxy, broken_s=3.0)
        report = chaos.run(seconds=0.0, faults_per_hour=1200.0, seed=3, rounds=3, faults=4)
    assert report.disagreement == ""
    assert report.faults and sum(proxy.met.values()) > proxy.met["passed"]
    assert report.applied >= 3 and report.participation > 0
