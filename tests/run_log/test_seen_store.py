"""A run as its supervisor and its display have seen it: who asks again costs a request only after a pause."""

import random
from functools import partial
from itertools import islice

import pytest
from protocol_fleet import Fleet, play
from scripted import CountingStore

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.protocol import keys, pace
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.store.retrying import RetryingStore


@pytest.fixture
def engine() -> CountingStore:
    return CountingStore()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def seen(engine, clock) -> SeenStore:
    return SeenStore.of(RetryingStore(engine, clock, random.Random(0)), clock)


def is_there(store: SeenStore, key: str) -> bool:
    try:
        store.get(key)
    except ObjectMissing:
        return False
    return True


def test_what_is_absent_is_asked_for_once_in_a_pause_whoever_asks(engine, clock, seen):
    for _ in range(10):
        assert not is_there(seen, keys.result(1)) and list(SeenStore.of(seen, clock).list(keys.SNAPSHOTS)) == []
    assert engine.calls == {"GET": 1, "LIST": 1}
    engine.put(keys.result(1), b"{}")
    clock.advance(2.0)
    assert is_there(seen, keys.result(1))


def test_what_this_process_writes_or_deletes_it_sees_at_once(engine, seen):
    key = keys.intent(0, 1)
    assert not is_there(seen, key) and not list(seen.list(keys.REPLICAS))
    assert seen.create(key, b"1")
    assert is_there(seen, key) and [info.key for info in seen.list(keys.REPLICAS)] == [key]
    seen.delete(key)
    assert not list(seen.list(keys.REPLICAS))


def test_a_create_that_lost_shows_what_came_first(engine, seen):
    key = keys.commit(1)
    assert not is_there(seen, key)
    engine.put(key, b"theirs")
    assert not seen.without_read_back().create(key, b"ours")
    assert seen.get(key) == b"theirs"


def test_after_forgetting_everything_is_asked_for_anew(engine, seen):
    assert not is_there(seen, keys.halt(1)) and not list(seen.list(keys.LEGS))
    engine.put(keys.halt(1), b"{}")
    seen.forget()
    assert is_there(seen, keys.halt(1)) and [info.key for info in seen.list(keys.LEGS)] == [keys.halt(1)]


def test_listings_that_replicas_decide_by_are_never_remembered(engine, seen):
    for prefix in (keys.contributions(1), keys.attempts(0), keys.wants(1), keys.ROUNDS):
        assert not list(seen.list(prefix))
        engine.put(f"{prefix}new", b"")
        assert [info.key for info in seen.list(prefix)][:1] == [f"{prefix}new"]
        engine.delete(f"{prefix}new")


def test_pauses_follow_the_round_that_ended_last(clock):
    fleet = Fleet(replicas=2, rounds=3, store=CountingStore())
    seen = SeenStore(fleet.store, clock)
    assert seen.round_s == 0.0
    clock.advance(7.0)
    assert seen.round_s == 7.0  # none has ended: as long as this process has waited for it


def test_the_commit_after_one_that_was_seen_is_not_asked_for_before_a_round_has_passed():
    store, clock = CountingStore(), ManualClock()
    fleet = Fleet(replicas=1, rounds=3, store=store, clock=clock)
    replica, seen = fleet.join(0, clock=clock), SeenStore(fleet.store, clock)
    log = RunLog(seen)
    log.begins()
    clock.advance(100.0)
    play([replica], [1.0])
    seen.follow(log)
    assert seen.round_s >= 100.0
    store.calls.clear()
    clock.advance(seen.round_s - 1.0)
    seen.follow(log)
    assert store.calls["GET"] == 0
    clock.advance(2.0)
    seen.follow(log)
    assert store.calls["GET"] == 1


@pytest.mark.parametrize("replicas", [1, 4, 64])
@pytest.mark.parametrize("round_s", [0.0, 25.0, 1800.0])
def test_a_limit_of_requests_slows_polls_and_never_what_finds_a_hung_replica(round_s, replicas):
    config = make_config({"entrypoint": "m:f", "replicas": replicas})
    apart_s, hung_s = pace.apart_s(config, 1000), config.retry.hung_after_s
    assert apart_s == 0.5 * (4 * replicas + 10) and pace.apart_s(config, None) == 0.0
    assert pace.longest_wait_s(config, round_s, apart_s) >= apart_s
    assert list(islice(pace.waiting(config, round_s, 0.1, apart_s).pauses(), 40))[-1] >= apart_s
    beats, read = pace.heartbeat_s(config, round_s, apart_s), pace.heartbeats_read_s(config, round_s, apart_s)
    assert min(apart_s, hung_s / 2.5 - config.timing.heartbeat_s) <= beats <= hung_s / 2.5
    assert min(apart_s, hung_s / 1.5) <= read <= hung_s / 1.5
    assert pace.heartbeats_read_again_s(config, apart_s) <= max(hung_s / 6, config.timing.heartbeat_s)


@pytest.mark.parametrize("round_s", [0.0, 0.5, 25.0, 1800.0, 86400.0])
def test_every_pause_follows_the_round_within_its_bounds(round_s):
    config = make_config({"entrypoint": "m:f"})
    beats, read = pace.heartbeat_s(config, round_s), pace.heartbeats_read_s(config, round_s)
    hung_s = config.retry.hung_after_s
    assert config.timing.heartbeat_s <= beats <= read and beats <= hung_s / 2.5 and read <= hung_s / 1.5
    assert beats % config.timing.heartbeat_s == 0  # heartbeats are due only when their writer is called
    assert config.timing.poll_s <= pace.longest_wait_s(config, round_s) <= 15.0
    listings = list(islice(pace.waiting(config, round_s, 0.02 * round_s).pauses(), 40))
    assert listings == sorted(listings)
    assert listings[-1] == pytest.approx(min(pace.longest_wait_s(config, round_s), 3.0))
    for open_s in (0.0, 0.5 * round_s, round_s, 10 * round_s):
        assert 1.0 <= pace.commits_read_s(round_s, open_s) <= 600.0
    assert pace.commits_read_s(round_s, round_s) <= max(1.0, round_s / 8)  # once it may be over, an eighth of it
    assert 1.0 <= pace.records_read_s(round_s) <= 15.0 and pace.seldom_read_s(round_s) <= 1800.0


class _Interrupted(str):
    """A key; while it is first compared another thread creates the object at the key `other`."""

    def __new__(cls, key: str, seen: SeenStore, other: str):
        made = super().__new__(cls, key)
        made.others = [partial(seen.create, other, b"theirs")]
        return made

    def startswith(self, prefix: str) -> bool:
        while self.others:
            self.others.pop()()
        return super().startswith(prefix)


def test_two_threads_may_create_objects_whose_listing_is_remembered(engine, seen):
    for prefix in (keys.LEGS, keys.REPLICAS, keys.SNAPSHOTS):
        assert not list(seen.list(prefix))
    assert seen.create(_Interrupted(keys.intent(0, 1), seen, keys.intent(7, 1)), b"ours")
    assert [info.key for info in seen.list(keys.REPLICAS)] == [keys.intent(0, 1), keys.intent(7, 1)]
