"""Buckets that keep versions, buckets that lock what is written, and runs that begin at once in one folder."""

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from fast_s3 import running_fast_s3
from protocol_fleet import Fleet, play
from s3_server import S3Server

from diloco_orchestrator.errors import RunFolderTaken, StoreError
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.probe import probe

COMPLIANCE = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}}


def versioned(server: S3Server, lock: bool = False) -> str:
    """A bucket that keeps versions. `lock`: and holds each version for a day."""
    name, client = f"bucket-{uuid4().hex[:12]}", server.client("s3")
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=lock)
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    if lock:
        client.put_object_lock_configuration(Bucket=name, ObjectLockConfiguration=COMPLIANCE)
    return name


@pytest.mark.parametrize(("engine", "lock"), [("auto", False), ("fsspec", False), ("fsspec", True)])
def test_what_was_deleted_may_be_created_again_though_its_versions_stay(s3_server: S3Server, engine: str, lock: bool):
    name = versioned(s3_server, lock)
    store = open_store(f"s3://{name}/run", s3_server.options(), engine=engine)
    probe(store)
    store.put("beat", b"1")
    store.put("beat", b"2")
    assert store.get("beat") == b"2" and not store.create("beat", b"3")
    store.delete("beat")
    assert list(store.list("")) == [] and store.create("beat", b"4") and store.get("beat") == b"4"
    kept = s3_server.client("s3").list_object_versions(Bucket=name, Prefix="run/beat")
    assert [version["Size"] for version in kept["Versions"]] == [1, 1, 1]


def test_a_bucket_that_locks_what_is_written_is_refused_with_what_to_do(s3_server: S3Server):
    store = open_store(f"s3://{versioned(s3_server, lock=True)}/run", s3_server.options())
    with pytest.raises(StoreError, match=r"retention.*fsspec\+s3://"):
        probe(store)


def test_of_runs_that_begin_at_once_in_one_folder_one_is_there_and_is_whole():
    with running_fast_s3() as server:
        options = {"key": "anybody", "secret": "anything", "endpoint_url": server.url}

        def begun(rounds: int) -> Fleet | None:
            try:
                return Fleet(replicas=1, rounds=rounds, store=open_store("s3://bucket/run", options))
            except RunFolderTaken:
                return None

        with ThreadPoolExecutor(4) as pool:
            found = [fleet for fleet in pool.map(begun, [2, 3, 4, 5]) if fleet is not None]
        assert len(found) == 1
        play(found[0].join_all(), [1.0])
        assert verify_run(found[0].store).agrees
