"""A store that does not keep its promises is refused before a run begins."""

import threading
from collections.abc import Iterator

import pytest
from virtual_time import VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.errors import ObjectMissing, StoreDenied, StoreError
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.probe import probe


class IgnoresCreateOnly(MemoryStore):
    """As `rclone serve s3`: takes the header and overwrites."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


class LooksFirst(MemoryStore):
    """As fsspec's default: exists-check, then write."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Barrier(8)

    def create(self, key: str, data: bytes) -> bool:
        if any(info.key == key for info in self.list("")):
            return False
        if key.endswith("race"):
            self.looked.wait()
        self.put(key, data)
        return True


class ListsLate(MemoryStore):
    """As a client with a listing cache."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return iter([])


class ListsSome(MemoryStore):
    """As a bucket whose listing lags behind its writes: the newest object is not there yet."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return iter(list(super().list(prefix, start_after))[:1])


class FlattersAll(MemoryStore):
    """Keeps the first object, and tells every writer that it was the first."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        return True


class FlattersRacers(MemoryStore):
    """The same, but only to those who write at the same time."""

    def create(self, key: str, data: bytes) -> bool:
        return super().create(key, data) or key.endswith("race")


class Blind(MemoryStore):
    """As S3 to who may read and write but not list: what is missing is a 403."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            return super().get(key, start, end)
        except ObjectMissing:
            raise StoreDenied(f"cannot read {key}: AccessDenied.") from None


class ReadOnly(MemoryStore):
    def create(self, key: str, data: bytes) -> bool:
        raise StoreDenied("cannot create: AccessDenied.")


def test_the_first_error_is_told_though_cleaning_up_fails_too():
    class Broken(MemoryStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            raise StoreDenied("cannot read: AccessDenied.")

        def delete(self, key: str) -> None:
            raise StoreDenied("cannot delete: AccessDenied.")

    with pytest.raises(StoreDenied, match="cannot read"):
        probe(Broken())


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (IgnoresCreateOnly, StoreError, "ignores create-only writes.*Use a store that honours If-None-Match"),
        (LooksFirst, StoreError, "8 of 8 writers at once created"),
        (ListsLate, StoreError, "Switch listing caches off"),
        (ListsSome, StoreError, "Switch listing caches off"),
        (FlattersAll, StoreError, "a second create of .* won"),
        (FlattersRacers, StoreError, "8 of 8 writers at once created"),
        (ReadOnly, StoreDenied, "AccessDenied"),
        (Blind, StoreDenied, "cannot read .*-missing: AccessDenied"),
    ],
)
def test_stores_that_no_run_could_trust_are_refused_and_left_clean(kind, error, words):
    store = kind()
    with pytest.raises(error, match=words):
        probe(store)
    assert list(MemoryStore.list(store, "")) == []


def test_the_probe_takes_four_round_trips():
    """Counted in virtual seconds: every request takes one, and those that are sent together overlap."""
    seconds = []

    def run(clock: VirtualClock) -> None:
        probe(SecondPerCall(clock), VirtualBackground(clock))
        seconds.append(clock.now())

    world = VirtualTime()
    world.spawn("launcher", run, at=0.0)
    world.run(limit_s=100.0)
    assert seconds == [4.0]


def test_a_race_whose_winner_lost_its_reply_counts_as_won():
    class LosesReplies(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            return super().create(key, data) and not key.endswith("race")

    probe(LosesReplies())


class SecondPerCall(MemoryStore):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._clock.sleep(1.0)
        return super().get(key, start, end)

    def create(self, key: str, data: bytes) -> bool:
        self._clock.sleep(1.0)
        return super().create(key, data)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self._clock.sleep(1.0)
        return super().list(prefix, start_after)

    def delete(self, key: str) -> None:
        self._clock.sleep(1.0)
        super().delete(key)


class KeepsAll(MemoryStore):
    """As a bucket whose credentials may not delete, or one with object lock."""

    def delete(self, key: str) -> None:
        raise StoreDenied("cannot delete: AccessDenied.")


def test_where_nothing_may_be_deleted_a_run_begins_and_the_test_objects_are_named(caplog: pytest.LogCaptureFixture):
    store = KeepsAll()
    probe(store)
    left = [info.key for info in store.list("")]
    assert len(left) == 2 and all(key in caplog.text for key in left)
