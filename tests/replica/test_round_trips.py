"""Round trips of a round: how often a replica waits for a reply between its last inner step and the next base.

Counted at a real S3 server. Every HTTP request that arrives there takes one second of virtual time and nothing else
takes any, so the seconds are the requests that had to wait for the ones before them, on every machine.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
import torch
from faulty_proxy import Faults, FaultyProxy
from protocol_fleet import FAST, Fleet, tiny_model
from sessions import constant_steps
from virtual_time import VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.retrying import RetryingStore
from diloco_orchestrator.store.s3 import open_s3
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext

T = TypeVar("T")

ROUND_S = 100.0  # longer than anybody needs for joining or for ending a round
LIVE = 3  # replicas that take part; contributions of the others are copies: fewer requests, and the same round trips


class SecondPerRequest(Store):
    """A store whose calls take as many virtual seconds as they send requests to the server. One call runs at a time."""

    def __init__(self, store: Store, proxy: FaultyProxy, clock: VirtualClock) -> None:
        self.url = store.url
        self._store = store
        self._proxy = proxy
        self._clock = clock

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._timed(lambda: self._store.get(key, start, end))

    def put(self, key: str, data: bytes) -> None:
        self._timed(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return self._timed(lambda: self._store.create(key, data))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._timed(lambda: self._store.list(prefix, start_after))

    def delete(self, key: str) -> None:
        self._timed(lambda: self._store.delete(key))

    def _timed(self, call: Callable[[], T]) -> T:
        before = self._proxy.requests.total()
        try:
            return call()
        finally:
            self._clock.sleep(self._proxy.requests.total() - before)


@pytest.fixture
def engine(s3_server, bucket) -> Iterator[tuple[Store, FaultyProxy]]:
    """A store in an empty bucket, and the proxy that counts its requests."""
    where = urlsplit(s3_server.url)
    proxy = FaultyProxy((where.hostname, where.port), Faults())
    options = s3_server.options(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    try:
        yield open_s3(f"s3://{bucket}/run", options), proxy
    finally:
        proxy.close()


class Race:
    """Sessions that take one inner step in every round, all at the same moment: at every multiple of `ROUND_S`."""

    def __init__(self, fleet: Fleet, proxy: FaultyProxy) -> None:
        self.round_trips: dict[tuple[int, int], float] = {}  # by round and replica, from the step to the next base
        self.time = VirtualTime()
        self._fleet = fleet
        self._proxy = proxy

    def spawn(self, replica_id: int, rounds: int) -> None:
        """Let a replica train for so many rounds, then leave."""
        self.time.spawn(f"replica {replica_id}", lambda clock: self._train(replica_id, rounds, clock))

    def _train(self, replica_id: int, rounds: int, clock: VirtualClock) -> None:
        store = RetryingStore(SecondPerRequest(self._fleet.engine, self._proxy, clock), clock, random.Random(0))
        stamp, background = Stamp(f"replica {replica_id}", clock.wall_time), VirtualBackground(clock)

        def should_leave() -> bool:
            return (rounds, replica_id) in self.round_trips

        def score(model: torch.nn.Module, items: Sequence[int]) -> list[float]:  # is called with every new base
            round_ = int(clock.now() // ROUND_S)
            self.round_trips[round_, replica_id] = clock.now() - round_ * ROUND_S
            return [1.0] * len(items)

        constant_steps(
            ReplicaContext(claim_attempt(store, replica_id, None, clock, stamp, should_leave, background)),
            tiny_model(),
            lambda batch: 1.0,
            take_s=lambda: clock.sleep(ROUND_S - clock.now() % ROUND_S),
            heldout=score,
            heldout_items=list(range(64)),
        )


def copy_contribution(store: Store, round_: int, replica_id: int) -> None:
    """Put replica 0's contribution in the bucket as another replica's."""
    manifest = Contribution.from_bytes(store.get(keys.contribution(round_, 0)), "")
    store.create(keys.payload(round_, replica_id, 1, 0), store.get(keys.payload(round_, 0, 1, 0)))
    if not list(store.list(keys.attempts(replica_id))):
        claim_attempt(store, replica_id, None, ManualClock(), Stamp(f"copy {replica_id}", lambda: 0.0))
    key = AttemptRecords(store).claim_key(replica_id, 1)
    assert key is not None
    claim = sha256_hex(store.get(key))
    theirs = manifest.model_copy(update={"replica_id": replica_id, "claim_sha256": claim})
    store.create(keys.contribution(round_, replica_id), theirs.to_bytes())


def fleet_of(replicas: int, store: Store, **settings: Any) -> Fleet:
    timing = {**FAST, "poll_s": 10.0}
    return Fleet(replicas, 9, store, sync_every=1, replica_state="round", snapshot_every=9, timing=timing, **settings)


@pytest.mark.parametrize("quorum", [pytest.param("all", marks=pytest.mark.slow), None])
@pytest.mark.parametrize("replicas", [2, *(pytest.param(many, marks=pytest.mark.slow) for many in (8, 32))])
def test_a_round_takes_seven_round_trips_at_most_whatever_the_number_of_replicas(engine, replicas, quorum):
    store, proxy = engine
    fleet, live = fleet_of(replicas, store, quorum=quorum), range(min(replicas, LIVE))
    race = Race(fleet, proxy)
    for replica_id in live:
        race.spawn(replica_id, rounds=2)
    for round_ in (1, 2):
        for replica_id in range(LIVE, replicas):  # before the others list the round's manifests
            race.time.at(ROUND_S * round_ + 1.5, lambda r=round_, i=replica_id: copy_contribution(store, r, i))
    race.time.run()
    assert [len(commit.answers) for commit in fleet.commits()] == [replicas, replicas]
    # Payload, manifest, list, manifests, payloads, commit; who loses the race for the commit reads the winner's.
    for round_ in (1, 2):
        seen = sorted(race.round_trips[round_, replica_id] for replica_id in live)
        met = round_ == 1  # of each attempt that was not met before, its intent is read and then its claim
        assert seen == [6 + met, *([7 + met] * (len(live) - 1))]


def test_who_was_late_in_the_last_round_costs_the_others_no_round_trip(engine):
    store, proxy = engine
    fleet = fleet_of(3, store, quorum=1)
    race = Race(fleet, proxy)
    race.spawn(0, rounds=3), race.spawn(1, rounds=3), race.spawn(2, rounds=1)
    race.time.at(2.9 * ROUND_S, lambda: copy_contribution(store, 2, 2))
    race.time.run()
    assert [len(commit.answers) for commit in fleet.commits()] == [3, 2, 2]
    assert [commit.roster for commit in fleet.commits()] == [(0, 1, 2), (0, 1), (0, 1, 2)]
    assert sorted(race.round_trips[3, replica_id] for replica_id in (0, 1)) == [6, 7]
