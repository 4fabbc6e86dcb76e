"""Replicas whose credentials the bucket refuses: one attempt each, and one line that says why."""

import json
import os
from pathlib import Path
from unittest import mock

import clouds
import pytest
from cli_support import diloco
from real_runs import FAST
from s3_server import S3Server

from diloco_orchestrator import RunFailed, RunReader, launch
from diloco_orchestrator.store.open_store import open_store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["modal", "hf_jobs"])
def test_credentials_that_the_bucket_refuses_end_the_run_at_once_and_say_so(
    name: str, s3_server: S3Server, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The launcher's own are good, and stay here; endpoint and region travel."""
    refused = {"AWS_ACCESS_KEY_ID": s3_server.key, "AWS_SECRET_ACCESS_KEY": "another-secret-0011223344"}
    url = f"s3://{bucket}/run"
    with getattr(clouds, name)(tmp_path) as cloud, mock.patch.dict(os.environ, s3_server.environ()):
        settings = {**FAST, "replicas": 2, "rounds": 2, "secrets": refused}
        executor = cloud.executor()
        with mock.patch.dict(os.environ, cloud.environ):
            run = launch("tiny_workloads:train", store=url, executor=executor, **settings)
            with pytest.raises(RunFailed, match=r"StoreDenied: cannot .*SignatureDoesNotMatch"):
                run.wait(timeout=90)
        reader = RunReader(open_store(url, s3_server.options()))
        assert [reader.attempts.numbers(replica_id) for replica_id in range(2)] == [[1], [1]]
    assert "another-secret" not in caplog.text


@pytest.mark.parametrize("name", ["local", "modal", "hf_jobs", "kubernetes", "slurm"])
def test_the_doctor_examines_a_replicas_machine_from_over_there(
    name: str, s3_server: S3Server, bucket: str, tmp_path: Path
):
    with getattr(clouds, name)(tmp_path) as cloud:
        environ = {**s3_server.environ(), **cloud.environ}
        own = {
            "slurm": ["--directory", str(tmp_path / "attempts")],
            "kubernetes": ["--kubeconfig", str(tmp_path / "kubeconfig"), "--image", "any"],
        }.get(name, [])
        where = ["doctor", f"s3://{bucket}/x", "--executor", cloud.executor().name, *own, "--json"]
        keys = ["--secret", "AWS_ACCESS_KEY_ID", "--secret", "AWS_SECRET_ACCESS_KEY"]
        done = diloco(*where, *keys, cwd=tmp_path, environ=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        found = {each["name"].partition(" over there: ")[2]: each for each in json.loads(done.stdout)}
        named = ["machine", "memory", "disk", "torch", "arithmetic", "store", "latency", "throughput", "clock"]
        assert [each for each in named if not found[each]["ok"]] == []
        assert s3_server.secret not in done.stdout + done.stderr
        wrong = {**environ, "AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"}
        if name == "hf_jobs":  # the launcher's own are refused first
            assert diloco(*where, *keys, cwd=tmp_path, environ=wrong).returncode == 1
    store = open_store(f"s3://{bucket}/x", s3_server.options())
    assert list(store.list("")) == []
