"""Transient faults are ridden out, lost replies are settled, everything else passes through at once."""

import random
from collections.abc import Iterator

import pytest

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import LASTING
from diloco_orchestrator.store.retrying import RetryingStore, RetryPolicy, without_read_back


class FaultyStore(MemoryStore):
    """A memory store that raises what `faults` holds, one per call, before or after the call takes effect."""

    def __init__(self, *faults: Exception, after: bool = False) -> None:
        super().__init__()
        self.faults = list(faults)
        self.after = after
        self.calls = 0

    def _fail(self, after: bool) -> None:
        if after == self.after and self.faults:
            raise self.faults.pop(0)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.calls += 1
        self._fail(after=False)
        return super().get(key, start, end)

    def create(self, key: str, data: bytes) -> bool:
        self.calls += 1
        self._fail(after=False)
        won = super().create(key, data)
        self._fail(after=True)
        return won

    def put(self, key: str, data: bytes) -> None:
        self.calls += 1
        self._fail(after=False)
        super().put(key, data)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self.calls += 1
        self._fail(after=False)
        return super().list(prefix, start_after)


def retrying(store: FaultyStore, clock: ManualClock | None = None) -> RetryingStore:
    return RetryingStore(store, clock or ManualClock(), random.Random(1))


def hiccups(count: int) -> list[Exception]:
    return [StoreUnavailable("503 Slow Down.") for _ in range(count)]


def test_every_call_outlives_transient_faults():
    for call in (
        lambda s: s.put("key", b"x"),
        lambda s: s.create("key", b"x"),
        lambda s: list(s.list("")),
        lambda s: s.delete("key"),
    ):
        store = FaultyStore(*hiccups(5))
        call(retrying(store))


def test_a_create_whose_reply_was_lost_is_ours_when_it_reads_back():
    store = FaultyStore(*hiccups(1), after=True)
    assert retrying(store).create("key", b"with a write id") is True
    assert store.get("key") == b"with a write id"


def test_a_create_lost_to_somebody_else_meanwhile_is_not_ours():
    store = FaultyStore(*hiccups(1))
    MemoryStore.create(store, "key", b"theirs")
    assert retrying(store).create("key", b"ours") is False
    assert store.get("key") == b"theirs"


def test_a_create_that_a_library_sent_twice_is_ours():
    """The second of the two is told that an object stands; records carry a write id, so equal bytes are ours."""
    store = FaultyStore()
    store.create("key", b"same")
    assert retrying(store).create("key", b"same") is True


@pytest.mark.parametrize("fault", [ObjectMissing("gone"), StoreDenied("no"), StoreError("odd")])
def test_what_no_retry_mends_passes_through_at_once(fault: StoreError):
    store, clock = FaultyStore(fault), ManualClock()
    with pytest.raises(type(fault), match=str(fault)):
        retrying(store, clock).get("key")
    assert store.calls == 1 and clock.now() == 0


def test_patience_ends_and_the_error_tells_how_long_it_lasted():
    store, clock = FaultyStore(*hiccups(10_000)), ManualClock()
    with pytest.raises(StoreUnavailable, match=r"503 Slow Down\. Tried \d+ times in 9\d s\."):
        retrying(store, clock).get("key")
    assert 90 <= clock.now() <= 90 + RetryPolicy().longest_pause_s


def test_a_process_that_was_asked_to_leave_tries_for_a_short_time():
    leaving = [False]
    store, clock = FaultyStore(*hiccups(10_000)), ManualClock()
    patient = RetryingStore(store, clock, random.Random(1), LASTING, is_leaving=lambda: leaving[0] or clock.now() > 400)
    with pytest.raises(StoreUnavailable, match=r"Tried \d+ times in 4\d\d s"):
        patient.get("key")
    leaving[0], began = True, clock.now()
    with pytest.raises(StoreUnavailable):
        without_read_back(patient).create("key", b"x")
    assert 20 <= clock.now() - began <= 20 + LASTING.longest_pause_s


def test_a_long_transfer_that_breaks_has_its_whole_patience_before_it():
    """Two minutes of upload, then a reset: the time of the transfer itself is no fault."""
    clock = ManualClock()

    class Slow(FaultyStore):
        def put(self, key: str, data: bytes) -> None:
            clock.advance(120.0)
            super().put(key, data)

    store = Slow(*hiccups(1))
    retrying(store, clock).put("key", b"shard")
    assert store.calls == 2 and store.get("key") == b"shard"


def test_what_stood_in_the_way_of_a_create_and_went_is_no_answer():
    """A conflict without object: False, then nothing to read back; the create is tried anew."""

    class Conflicts(FaultyStore):
        def create(self, key: str, data: bytes) -> bool:
            if self.calls == 1:
                self.calls += 1
                return False
            return super().create(key, data)

    store = Conflicts(*hiccups(1))
    assert retrying(store).create("key", b"x") is True


def test_no_two_replicas_that_failed_together_try_again_together():
    """Pauses are drawn: a fleet that a store has turned away does not come back as one."""
    waited = set()
    for seed in range(5):
        clock = ManualClock()
        RetryingStore(FaultyStore(*hiccups(3)), clock, random.Random(seed)).create("key", b"x")
        waited.add(clock.now())
    assert len(waited) == 5


def test_pauses_grow_to_their_bound():
    clock = ManualClock()
    pauses: list[float] = []
    sleep = clock.sleep
    clock.sleep = lambda seconds: (pauses.append(seconds), sleep(seconds))[1]  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        retrying(FaultyStore(*hiccups(1000)), clock).get("key")
    policy = RetryPolicy()
    bounds = [min(policy.first_pause_s * 2**i, policy.longest_pause_s) for i in range(len(pauses))]
    assert all(0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert max(pauses) > policy.longest_pause_s / 2


@pytest.mark.parametrize(("reached", "patience_s"), [(False, 10.0), (True, 90.0)])
def test_a_wrong_address_fails_fast_and_an_outage_of_a_store_that_was_reached_does_not(reached, patience_s):
    clock, store = ManualClock(), FaultyStore()
    retried = RetryingStore(store, clock, random.Random(1), RetryPolicy(first_call_s=10.0))
    if reached:
        with pytest.raises(ObjectMissing):  # an answer too
            retried.get("run.json")
    store.faults = hiccups(1000)
    with pytest.raises(StoreUnavailable, match="Tried"):
        retried.get("run.json")
    assert clock.now() == pytest.approx(patience_s)
