"""The fast S3 server and the shaped link behave as the store and the network that they stand for."""

from itertools import pairwise

import pytest
from fast_s3 import FastS3, running_fast_s3
from shaped_proxy import Direction, links_before

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store


@pytest.fixture(scope="module")
def server():
    with running_fast_s3() as found:
        yield found


def store_at(server: FastS3, url: str, prefix: str) -> Store:
    return open_store(f"s3://bucket/{prefix}", {"key": "k", "secret": "s", "endpoint_url": url})


def check_promises(store: Store) -> None:
    """What every store promises, in short."""
    assert store.create("k/1", b"one") is True
    assert store.create("k/1", b"two") is False
    store.put("k/2", b"0123456789")
    assert (store.get("k/1"), store.get("k/2"), store.get("k/2", 2, 5)) == (b"one", b"0123456789", b"234")
    assert [(info.key, info.size) for info in store.list("k/")] == [("k/1", 3), ("k/2", 10)]
    assert [info.key for info in store.list("k/", start_after="k/1")] == ["k/2"]
    store.delete("k/1")
    store.delete("k/1")
    with pytest.raises(ObjectMissing):
        store.get("k/1")


def test_the_fast_server_keeps_a_stores_promises(server: FastS3):
    check_promises(store_at(server, server.url, "direct"))


def test_a_listing_of_several_pages_is_complete_and_in_order(server: FastS3):
    store = store_at(server, server.url, "pages")
    names = [f"x/{index:04d}" for index in range(1203)]
    for name in names:
        store.put(name, b"")
    server.requests()
    assert [info.key for info in store.list("x/")] == names
    assert server.requests() == {"LIST": 2}


def test_requests_are_counted_by_kind_and_forgotten_objects_are_gone(server: FastS3):
    store = store_at(server, server.url, "counted")
    server.requests()
    store.create("a/payload/1", b"1")
    store.put("a/other", b"1")
    store.get("a/other")
    assert server.requests() == {"CREATE": 1, "PUT": 1, "GET": 1}
    assert server.requests() == {}
    assert server.forget("a/payload/") == 1
    assert [info.key for info in store.list("a/")] == ["a/other"]


def test_files_of_a_folder_are_objects_from_the_start(tmp_path):
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    (tmp_path / "bucket" / "run" / "run.json").write_bytes(b"{}")
    with running_fast_s3(tmp_path) as own:
        assert store_at(own, own.url, "run").get("run.json") == b"{}"


def test_every_byte_passes_a_shaped_link_once(server: FastS3):
    rates = {"up_bytes_per_s": 50e6, "down_bytes_per_s": 50e6, "rtt_s": 0.002}
    with links_before(server.url, 2, **rates) as (link, idle):
        store = store_at(server, link.url, "link")
        check_promises(store)
        body = bytes(range(256)) * 4000
        store.put("big", body)
        before = link.down.passed
        assert store.get("big") == body
        assert len(body) <= link.down.passed - before < len(body) + 2000
        assert link.up.passed > len(body)
        assert idle.up.passed == idle.down.passed == 0


def test_a_direction_takes_bytes_one_after_another():
    direction = Direction(bytes_per_s=1000.0)
    left_at = [direction.send(500) for _ in range(4)]
    assert all(late - early >= 0.5 for early, late in pairwise(left_at))
    assert direction.passed == 2000
