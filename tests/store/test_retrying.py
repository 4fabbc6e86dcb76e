"""Faults that may pass are waited out, lost replies are settled, everything else passes through at once."""

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ConfigError, ObjectMissing, StoreDenied, StoreError, StoreFull, StoreUnavailable
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import LASTING, WATCHING
from diloco_orchestrator.store.retrying import RetryingStore, RetryPolicy, _Opened
from diloco_orchestrator.supervision.attempt_types import AttemptPolicy


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


def test_of_an_object_that_may_be_ours_no_more_is_read_than_ours_has():
    """Somebody else's may be as large as it likes: gigabytes went into memory."""

    class Reads(FaultyStore):
        largest = 0

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            data = super().get(key, start, end)
            self.largest = max(self.largest, len(data))
            return data

    store = Reads()
    store.put("key", b"ours" + bytes(2**20))
    assert not retrying(store).create("key", b"ours")
    assert store.largest == 5


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


@pytest.mark.parametrize("fault", [ObjectMissing("gone"), StoreDenied("no"), StoreFull("full"), StoreError("odd")])
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


def test_a_store_that_says_for_how_long_is_left_alone_for_so_long_and_a_window_at_the_most():
    for said_s, least_s, most_s in ((40.0, 80.0, 100.0), (1e6, 600.0, 750.0)):
        store, clock = FaultyStore(*(StoreUnavailable("429.", said_s) for _ in range(2))), ManualClock()
        RetryingStore(store, clock, random.Random(1), LASTING).put("key", b"x")
        assert store.calls == 3 and least_s <= clock.now() <= most_s


def test_a_process_that_was_asked_to_leave_tries_for_a_short_time():
    leaving = [False]
    store, clock = FaultyStore(*hiccups(10_000)), ManualClock()
    patient = RetryingStore(store, clock, random.Random(1), LASTING, is_leaving=lambda: leaving[0] or clock.now() > 400)
    with pytest.raises(StoreUnavailable, match=r"Tried \d+ times in 4\d\d s"):
        patient.get("key")
    leaving[0], began = True, clock.now()
    with pytest.raises(StoreUnavailable):
        patient.without_read_back().create("key", b"x")
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


# -- refusals and full disks ------------------------------------------------------------------------------------------

FORBIDDEN = "cannot read key in s3://b: AccessDenied."


def reached(store: FaultyStore, clock: ManualClock, **options: Any) -> RetryingStore:
    """A store of a replica, which has read and written here before."""
    found = RetryingStore(store, clock, random.Random(1), LASTING, **options)
    found.put("key", b"x")
    assert found.get("key") == b"x"
    return found


def test_a_refusal_for_some_seconds_is_waited_out_where_such_calls_were_allowed(caplog: pytest.LogCaptureFixture):
    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock)
    store.faults = [StoreDenied(FORBIDDEN) for _ in range(5)]
    assert found.get("key") == b"x" and clock.now() > 0
    told, over = caplog.messages
    assert told.startswith(FORBIDDEN) and "Waiting since 00:00:00 UTC, for 600 s more." in told
    assert "Every try reads the credentials again: renew them where they come from" in told
    assert over == "memory:// answers again."


def test_a_refusal_that_lasts_ends_as_that_of_a_provider_does_with_the_first_words(caplog: pytest.LogCaptureFixture):
    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock)
    store.faults = [StoreDenied(FORBIDDEN) for _ in range(1000)]
    with pytest.raises(StoreDenied, match=rf"{FORBIDDEN} Tried \d+ times in 600 s\."):
        found.get("key")
    assert clock.now() == pytest.approx(AttemptPolicy(1.0, 1.0).denied_for_s)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("total_s", "waited_s"), [(90.0, 90.0), (2.0, 2.0)])
def test_a_refusal_is_not_waited_for_longer_than_an_outage(total_s: float, waited_s: float):
    store, clock = FaultyStore(), ManualClock()
    found = RetryingStore(store, clock, random.Random(1), RetryPolicy(total_s=total_s))
    found.put("key", b"x")
    store.faults = [StoreDenied(FORBIDDEN) for _ in range(1000)]
    with pytest.raises(StoreDenied):
        found.put("key", b"y")
    assert clock.now() == pytest.approx(waited_s)


def test_what_was_never_allowed_is_refused_at_once():
    """Credentials that may read and not write: their words come at the first write, whatever was read before."""
    store, clock = FaultyStore(), ManualClock()
    found = RetryingStore(store, clock, random.Random(1), LASTING)
    with pytest.raises(ObjectMissing):
        found.get("key")
    store.faults = [StoreDenied("cannot write key: AccessDenied.")]
    with pytest.raises(StoreDenied, match=r"cannot write key: AccessDenied\.\n"):  # its section follows
        found.put("key", b"x")
    assert clock.now() == 0 and store.calls == 2


def test_refusals_after_a_long_outage_have_their_whole_time():
    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock)

    class Outage(FaultyStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if clock.now() < 3600.0:
                raise StoreUnavailable("503.")
            if clock.now() < 3900.0:
                raise StoreDenied(FORBIDDEN)
            return b"back"

    found._opened.store = Outage()
    assert found.get("key") == b"back"


def test_refusals_with_a_long_outage_between_them_are_not_in_a_row():
    """All together they last longer than the ten minutes of one row."""
    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock)

    class Disturbed(FaultyStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if clock.now() < 1200.0:
                raise StoreUnavailable("503.") if 400.0 < clock.now() < 750.0 else StoreDenied(FORBIDDEN)
            return b"back"

    found._opened.store = Disturbed()
    assert found.get("key") == b"back"


def test_a_refusal_that_recurs_between_other_faults_is_final_after_ten_minutes():
    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock)

    class RefusesInTurn(FaultyStore):
        tries = 0

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            self.tries += 1
            raise StoreUnavailable("503.") if self.tries % 2 else StoreDenied(FORBIDDEN)

    found._opened.store = RefusesInTurn()
    began = clock.now()
    with pytest.raises(StoreDenied):
        found.get("key")
    assert 600.0 <= clock.now() - began < 660.0


def test_a_store_that_refuses_has_been_reached():
    """What it refuses fails at once; an outage after that is no wrong address."""
    store, clock = FaultyStore(StoreDenied(FORBIDDEN), *hiccups(1000)), ManualClock()
    found = RetryingStore(store, clock, random.Random(0), RetryPolicy(first_call_s=10.0))
    with pytest.raises(StoreDenied):
        found.get("key")
    with pytest.raises(StoreUnavailable):
        found.get("key")
    assert clock.now() == pytest.approx(90.0)


def test_an_outage_that_is_over_is_told_once_and_the_next_one_anew(caplog: pytest.LogCaptureFixture):
    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock)
    for _ in range(2):
        store.faults = [StoreDenied(FORBIDDEN)]
        assert found.get("key") == found.get("key")
    assert [message.endswith("answers again.") for message in caplog.messages] == [False, True] * 2


def test_a_refused_store_is_opened_anew_by_one_of_its_threads_for_all():
    opened: list[FaultyStore] = []

    def reopen() -> FaultyStore:
        opened.append(FaultyStore(*[StoreDenied(FORBIDDEN)] * (2 if len(opened) < 1 else 0)))
        opened[-1].create("key", b"x") if not opened[-1].faults else None
        return opened[-1]

    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock, reopen=reopen)
    store.faults = [StoreDenied(FORBIDDEN)] * 1000
    assert found.get("key") == b"x" and len(opened) == 2
    assert found.without_read_back().create("other", b"1") is True and opened[1].get("other") == b"1"


def test_of_two_threads_that_were_refused_together_one_opens_the_store_anew():
    opened: list[FaultyStore] = []
    refused = FaultyStore()
    shared = _Opened(refused, lambda: opened.append(FaultyStore()) or opened[-1])
    for _ in range(2):
        assert shared.open_anew(refused) == ""
    assert len(opened) == 1 and shared.store is opened[0]


def test_a_store_that_cannot_be_opened_anew_is_tried_as_it_is_and_the_reason_told(caplog: pytest.LogCaptureFixture):
    def reopen() -> FaultyStore:
        raise ConfigError("cannot set up S3 access: the profile lab could not be found.")

    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock, reopen=reopen)
    store.faults = [StoreDenied(FORBIDDEN)]
    assert found.get("key") == b"x"
    assert "the profile lab could not be found. Waiting since" in caplog.messages[0]
    store.faults = [StoreDenied(FORBIDDEN)] * 1000
    with pytest.raises(StoreDenied, match=r"AccessDenied\. The store could not be opened anew: .* Tried"):
        found.get("key")


def test_a_disk_that_is_full_is_waited_for_as_an_outage_and_told_every_ten_minutes(caplog: pytest.LogCaptureFixture):
    store, clock = FaultyStore(), ManualClock()
    found = reached(store, clock)
    store.faults = [StoreFull("cannot write key in /runs: No space left on device. Free some space there.")] * 10_000
    with pytest.raises(StoreFull, match=r"Free some space there\. Tried \d+ times in 21600 s"):
        found.put("key", b"y")
    assert clock.now() == pytest.approx(LASTING.total_s)
    assert 30 <= len(caplog.messages) <= 36 and "Waiting since 00:00:00 UTC, for 21600 s more." in caplog.messages[0]
    store.faults = store.faults[:5]
    found.put("key", b"z")
    assert MemoryStore.get(store, "key") == b"z"


def test_a_full_disk_that_can_be_read_is_told_once_and_not_called_mended(caplog: pytest.LogCaptureFixture):
    class Full(MemoryStore):
        refusals = 5

        def put(self, key: str, data: bytes) -> None:
            self.refusals -= 1
            if self.refusals >= 0:
                raise StoreFull("No space left on device.")
            super().put(key, data)

    class ReadMeanwhile(ManualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            assert found.get("key") == b"x"

    store, clock = Full(), ReadMeanwhile()
    store.create("key", b"x")
    found = RetryingStore(store, clock, random.Random(1))
    found.get("key")
    found.put("other", b"y")
    assert [message[:23] for message in caplog.messages] == ["No space left on device", "memory:// answers again"]


def test_an_outage_is_told_after_a_while_and_then_every_ten_minutes(caplog: pytest.LogCaptureFixture):
    store, clock = FaultyStore(*hiccups(10_000)), ManualClock()
    with pytest.raises(StoreUnavailable):
        RetryingStore(store, clock, random.Random(1), LASTING).get("key")
    assert 30 <= len(caplog.messages) <= 36
    assert re.search(r"503 Slow Down\. Waiting since 00:00:00 UTC, for 21[45]\d\d s more\.$", caplog.messages[0])


def test_one_try_that_took_half_a_minute_and_was_lost_is_told(caplog: pytest.LogCaptureFixture):
    class Slow(FaultyStore):
        def create(self, key: str, data: bytes) -> bool:
            clock.advance(30.0)
            return super().create(key, data)

    store, clock = Slow(*hiccups(1)), ManualClock()
    assert RetryingStore(store, clock, random.Random(1), LASTING).create("key", b"x")
    told, over = caplog.messages
    assert told.startswith("503 Slow Down. Waiting since 00:00:30 UTC") and over == "memory:// answers again."


def test_who_watches_waits_for_days_and_is_told_each_kind_of_fault_once(caplog: pytest.LogCaptureFixture):
    """Two days without an answer, then three of refusals: a person may renew credentials whenever they see it."""
    store, clock = FaultyStore(), ManualClock()
    found = RetryingStore(store, clock, random.Random(1), WATCHING)
    found.put("key", b"x")
    assert found.get("key") == b"x"

    class Away(FaultyStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if clock.now() < 2 * 86400.0:
                raise StoreUnavailable("503 Slow Down.")
            if clock.now() < 5 * 86400.0:
                raise StoreDenied(FORBIDDEN)
            return b"back"

    found._opened.store = Away()
    assert found.get("key") == b"back"
    first, second, over = caplog.messages
    assert first == "503 Slow Down. Waiting since 00:00:00 UTC, until it answers."
    assert second.startswith(FORBIDDEN) and "renew them where they come from" in second
    assert over == "memory:// answers again."


def test_who_watches_is_refused_at_once_with_wrong_credentials_and_soon_at_a_wrong_address():
    clock = ManualClock()
    with pytest.raises(StoreDenied):
        RetryingStore(FaultyStore(StoreDenied(FORBIDDEN)), clock, random.Random(1), WATCHING).get("key")
    assert clock.now() == 0.0
    with pytest.raises(StoreUnavailable):
        RetryingStore(FaultyStore(*hiccups(1000)), clock, random.Random(1), WATCHING).get("key")
    assert clock.now() == pytest.approx(10.0)
