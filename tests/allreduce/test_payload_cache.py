"""Payload bytes between verification and averaging: in memory up to a bound, beyond it in a file."""

import os

from diloco_orchestrator.allreduce.payload_cache import PayloadCache


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - one number, no paths


def test_bytes_beyond_the_bound_come_back_as_they_were_put():
    cache = PayloadCache(memory_bytes=10)
    bodies = {(f"key {i}", f"digest {i}"): bytes([i]) * (3 + i) for i in range(8)}
    for name, body in bodies.items():
        cache.put(name, body)
    assert {name: cache.get(name) for name in bodies} == bodies
    assert cache.get(("key 0", "digest 1")) is None
    cache.close()


def test_what_is_put_again_changes_nothing():
    cache = PayloadCache(memory_bytes=4)
    for body in (b"12", b"other"):
        cache.put(("key", "digest"), body)
    assert cache.get(("key", "digest")) == b"12"
    cache.close()


def test_a_cache_that_is_cleared_every_round_stays_in_memory():
    cache, before = PayloadCache(memory_bytes=10), open_files()
    for round_ in range(5):
        cache.put((f"round {round_}", "digest"), b"0123456789")
        assert open_files() == before
        cache.clear()
        assert cache.get((f"round {round_}", "digest")) is None


def test_a_file_serves_one_round_after_another_until_the_cache_is_closed():
    before = open_files()
    cache = PayloadCache(memory_bytes=1)
    for round_, bodies in enumerate(([b"many bytes", b"more"], [b"few", b"and others", b"still more"])):
        for index, body in enumerate(bodies):
            cache.put((f"{round_}.{index}", "digest"), body)
        assert [cache.get((f"{round_}.{index}", "digest")) for index in range(len(bodies))] == bodies
        assert cache.get((f"{round_ - 1}.0", "digest")) is None and open_files() == before + 1
        cache.clear()
    cache.close()
    assert open_files() == before
