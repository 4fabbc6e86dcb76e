"""Replicas whose credentials the bucket refuses: one attempt each, and one line that says why."""

import os
from pathlib import Path
from unittest import mock

import clouds
import pytest
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
