"""Uploads over a slow line: a request may take as long as its bytes do, and on a fast line a lost one shows soon."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import boto3
import pytest
from fast_s3 import running_fast_s3
from shaped_proxy import links_before

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import StoreUnavailable
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.presigned import PresignedStore, Requests
from diloco_orchestrator.store.s3 import open_s3
from diloco_orchestrator.store.upload_limits import LEAST_S, SLOWEST, UploadLimits

SHARD = 64 * 2**20
RATE, SIZE = 150_000.0, 12_000_000  # of the line; of an object that takes longer than the least limit, buffers aside
assert SIZE / RATE > 2 * LEAST_S


def test_before_the_first_upload_a_line_may_be_as_slow_as_any():
    limits = UploadLimits()
    assert SHARD / SLOWEST <= limits.limit_s(SHARD) < 2 * SHARD / SLOWEST
    assert limits.limit_s(1000) == LEAST_S  # of a record


def test_after_fast_uploads_one_that_is_lost_shows_soon():
    limits = UploadLimits()
    for _ in range(2):
        with limits.timed(SHARD):
            pass
    assert limits.limit_s(SHARD) == LEAST_S


def test_an_upload_that_fails_early_says_nothing_about_the_line():
    limits = UploadLimits()
    with suppress(StoreUnavailable), limits.timed(SHARD):
        raise StoreUnavailable("the server is busy")
    assert limits.limit_s(SHARD) == UploadLimits().limit_s(SHARD)


def test_after_an_upload_that_was_lost_the_next_one_has_the_time_of_the_slowest_line():
    clock = ManualClock()
    limits = UploadLimits(clock)
    for _ in range(4):
        with limits.timed(SHARD):
            clock.advance(1.0)
    assert limits.limit_s(SHARD) == LEAST_S
    with suppress(StoreUnavailable), limits.timed(SHARD) as limit_s:
        clock.advance(limit_s)
        raise StoreUnavailable("timed out")
    assert limits.limit_s(SHARD) == UploadLimits().limit_s(SHARD)


@pytest.mark.slow
def test_a_line_that_turns_slow_costs_one_lost_upload():
    with running_fast_s3() as server, links_before(server.url, 1) as [link]:
        options = {"endpoint_url": link.url, "key": "any", "secret": "any", "region_name": "us-east-1"}
        store, data = open_s3("s3://bench/run", options), bytes(9_000_000)
        fast = [is_written(store, key, data) for key in "abc"]
        link.up.bytes_per_s = 225_000.0  # 40 s an upload
        slow = [is_written(store, key, data) for key in "ddef"]
        assert (fast, slow) == ([True, True, True], [False, True, True, True])


def is_written(store: Store, key: str, data: bytes) -> bool:
    try:
        store.put(key, data)
    except StoreUnavailable:
        return False
    return True


@pytest.mark.slow
def test_an_object_that_takes_longer_than_half_a_minute_is_written_and_read(tmp_path: Path):
    data = bytes(SIZE)
    with running_fast_s3() as server, links_before(server.url, 2) as links:
        for link in links:
            link.up.bytes_per_s = RATE
        options = [
            {"endpoint_url": link.url, "key": "any", "secret": "any", "region_name": "us-east-1"} for link in links
        ]
        client = boto3.client(
            "s3", endpoint_url=links[1].url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
        )
        where = {"Bucket": "bench", "Key": "run/signed", "IfNoneMatch": "*"}
        signed = tmp_path / "requests"
        create = {"signed": client.generate_presigned_url("put_object", Params=where)}
        signed.write_bytes(Requests(ends=0.0, read={}, create=create, put={}).to_bytes())
        stores = {"own": open_s3("s3://bench/run", options[0]), "signed": PresignedStore("s3://bench/run", signed)}
        with ThreadPoolExecutor() as pool:
            created = [pool.submit(store.create, key, data) for key, store in stores.items()]
            assert [each.result() for each in created] == [True, True]
        links[0].down.bytes_per_s = 2 * RATE
        for key in stores:
            assert open_s3("s3://bench/run", options[0]).get(key) == data
