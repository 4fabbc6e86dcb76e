"""Uploads over a slow line: a request may take as long as its bytes do, and on a fast line a lost one shows soon."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import boto3
import pytest
from fast_s3 import running_fast_s3
from shaped_proxy import links_before

from diloco_orchestrator.clock import ManualClock, SystemClock
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
    assert lose(limits, clock) == LEAST_S
    assert limits.limit_s(SHARD) == UploadLimits().limit_s(SHARD)


def lose(limits: UploadLimits, clock: ManualClock, size: int = SHARD) -> float:
    with suppress(StoreUnavailable), limits.timed(size) as limit_s:
        clock.advance(limit_s)
        raise StoreUnavailable("timed out")
    return limit_s


def test_uploads_that_are_lost_over_a_line_thinner_than_any_get_more_time_until_they_are_done():
    clock = ManualClock()
    limits, needs_s = UploadLimits(clock), 5 * SHARD / SLOWEST
    given = [lose(limits, clock) for _ in range(3)]
    assert given == [given[0], 2 * given[0], 4 * given[0]] and given[2] < needs_s < limits.limit_s(SHARD)
    with limits.timed(SHARD):
        clock.advance(needs_s)
    assert limits.limit_s(SHARD) > needs_s


def test_four_uploads_that_are_lost_together_count_as_one():
    clock = ManualClock()
    limits = UploadLimits(clock)
    with suppress(StoreUnavailable), ExitStack() as together:
        limit_s = max(together.enter_context(limits.timed(SHARD)) for _ in range(4))
        clock.advance(limit_s)
        raise StoreUnavailable("timed out")
    assert limits.limit_s(SHARD) == 2 * limit_s


def test_a_small_write_that_is_lost_says_nothing_about_the_rate_of_the_line():
    clock = ManualClock()
    limits = UploadLimits(clock)
    assert lose(limits, clock, size=1000) == LEAST_S
    assert limits.limit_s(SHARD) == UploadLimits().limit_s(SHARD)


def signed_to(port: int, folder: Path) -> PresignedStore:
    requests = Requests(ends=0.0, read={}, create={}, put={"signed": f"http://127.0.0.1:{port}/bench/run/signed"})
    (folder / "requests").write_bytes(requests.to_bytes())
    return PresignedStore("s3://bench/run", folder / "requests")


@pytest.mark.slow
def test_an_upload_of_which_nobody_takes_bytes_ends_after_half_a_minute_and_says_so(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts, and takes what its buffers hold
        port, clock = listener.getsockname()[1], SystemClock()
        own = open_s3("s3://bench/run", {"endpoint_url": f"http://127.0.0.1:{port}", "key": "any", "secret": "any"})

        def took_s(store: Store, key: str) -> float:
            began = clock.now()
            with pytest.raises(StoreUnavailable, match=r"took no more bytes|timed out"):
                store.put(key, bytes(SHARD))
            return clock.now() - began

        with ThreadPoolExecutor() as pool:
            took = [pool.submit(took_s, own, "own"), pool.submit(took_s, signed_to(port, tmp_path), "signed")]
            assert all(LEAST_S - 1 < each.result() < 3 * LEAST_S < UploadLimits().limit_s(SHARD) for each in took)


def test_a_signed_upload_to_where_nobody_listens_has_ten_seconds_to_connect(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(4):  # more than the queue of those to be accepted
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        began = SystemClock().now()
        with pytest.raises(StoreUnavailable, match="timed out"):
            signed_to(full.getsockname()[1], tmp_path).put("signed", bytes(SHARD))
        assert SystemClock().now() - began < LEAST_S


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
