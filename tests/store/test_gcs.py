"""A fake-gcs-server, by obstore and gcsfs: unusual letters, a missing bucket, a run. The contract: `test_contract`."""

import json
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import pytest
from genuine_gcs import Gcs
from real_runs import FAST, digests

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import StoreError
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.store.open_store import INTERACTIVE, open_store
from diloco_orchestrator.store.presigned import CREATES
from diloco_orchestrator.store.signers import GcsSigner, Operation

pytestmark = pytest.mark.slow
SCHEMES = ["gs", "fsspec+gs"]


@pytest.fixture
def bucket(gcs: Gcs) -> str:
    return gcs.make_bucket(f"bucket-{uuid4().hex[:12]}")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("folder", ["a b~*%20c", "ü/a+b=c&d,e;it's (one)!:@$"])
def test_a_folder_with_unusual_letters_is_one_folder(gcs: Gcs, bucket: str, scheme: str, folder: str):
    url, root = f"{scheme}://{bucket}/{folder}", f"{scheme}://{bucket}"
    store = open_store(url, gcs.options(url))
    assert store.create(f"k/{folder}", b"0123") and not store.create(f"k/{folder}", b"other")
    assert store.get(f"k/{folder}", 1, 3) == b"12" and [info.key for info in store.list("k/")] == [f"k/{folder}"]
    assert [info.key for info in open_store(root, gcs.options(root)).list("")] == [f"{folder}/k/{folder}"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_missing_bucket_is_told(gcs: Gcs, scheme: str):
    url = f"{scheme}://nobody-made-it/x"
    store = open_store(url, gcs.options(url), retry=INTERACTIVE)
    with pytest.raises(StoreError, match=r"Check the bucket's name"):
        store.create("key", b"x")


def test_a_whole_run_has_the_bits_of_one_in_a_folder(gcs: Gcs, bucket: str, tmp_path: Path):
    given = {**FAST, "replicas": 2, "rounds": 2, "sync_every": 3, "env": {"OMP_NUM_THREADS": "1"}}
    executor = LocalProcessExecutor(tmp_path / "executor")
    launch("tiny_workloads:train", store=str(tmp_path / "bucket"), executor=executor, **given).wait()
    url = f"gs://{bucket}/runs/a b"
    run = launch("tiny_workloads:train", store=url, storage_options=gcs.options(url), executor=executor, **given)
    assert run.wait().status == "completed"
    reader = RunReader(open_store(url, gcs.options(url)))
    assert [commit.base_digest for commit in reader.commits()] == digests(tmp_path / "bucket")
    assert verify_run(reader.store).agrees


@pytest.mark.parametrize("operation", ["read", "create", "put"])
@pytest.mark.parametrize("key", ["rounds/00000001/commit.json", "ü/a+b=c&d,e;it's (one)!:@$~*%20"])
def test_requests_are_signed_as_by_googles_own_library(gcs: Gcs, operation: Operation, key: str):
    """It comes with gcsfs."""
    from google.cloud.storage._signing import generate_signed_url_v4  # type: ignore[import-untyped]
    from google.oauth2.service_account import Credentials  # type: ignore[import-untyped]

    options = {"service_account_key": json.dumps(gcs.account)}
    ours = GcsSigner("gs://bucket/runs/a b", options, ManualClock(1.8e9)).url_of(operation, key, 900.0)
    theirs = generate_signed_url_v4(
        Credentials.from_service_account_info(gcs.account),
        resource="/bucket/" + quote(f"runs/a b/{key}", safe="/~"),
        expiration=900,
        method="GET" if operation == "read" else "PUT",
        headers=dict(CREATES["gs"]) if operation == "create" else {},  # to which it adds
        _request_timestamp="20270115T080000Z",
    )
    assert ours == theirs
