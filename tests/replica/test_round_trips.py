"""Round trips of a round: how often a replica waits for a reply between its last inner step and the next base.

Counted at a real S3 server. Every HTTP request that arrives there takes one second of virtual time and nothing else
takes any, so the seconds are the requests that had to wait for the ones before them, on every machine.
"""

import random
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import urlsplit

import pytest
from faulty_proxy import FaultyProxy, Faults
from protocol_fleet import Fleet, answer, tiny_model
from virtual_time import VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.protocol.records import Stamp
from diloco_orchestrator.snapshots.layout import ModelFiles, trainable
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.retrying import RetryingStore
from diloco_orchestrator.store.s3 import open_s3
from replica.process.attempt import claim_attempt
from replica.rounds.participant import Participant

T = TypeVar("T")

ROUNDS = 2
ROUND_S = 1e4  # longer than any of them takes


class SecondPerRequest:
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


def round_trips(fleet: Fleet, proxy: FaultyProxy) -> list[list[float]]:
    """The round trips of each replica in each round, if the inner steps of all end at the same moment."""
    time = VirtualTime()
    taken: list[list[float]] = [[] for _ in range(fleet.replicas)]

    def replica(replica_id: int, clock: VirtualClock) -> None:
        participant = join(fleet, replica_id, clock, proxy)
        for round_ in range(1, ROUNDS + 1):
            clock.sleep(ROUND_S * round_ - clock.now())
            answer(participant, 1.0)
            participant.close()
            taken[replica_id].append(clock.now() - ROUND_S * round_)

    for replica_id in range(fleet.replicas):
        time.spawn(f"replica {replica_id}", lambda clock, i=replica_id: replica(i, clock))
    time.run()
    return taken


def join(fleet: Fleet, replica_id: int, clock: VirtualClock, proxy: FaultyProxy) -> Participant:
    store = RetryingStore(SecondPerRequest(fleet.engine, proxy, clock), clock, random.Random(replica_id))
    stamp, model = Stamp(f"replica {replica_id}", clock.wall_time), tiny_model()
    attempt = claim_attempt(store, replica_id, None, clock, stamp, background=VirtualBackground(clock))
    parameters = trainable(model)
    return Participant.join(attempt, parameters, [tuple(parameters)], ModelFiles.of(model))


@pytest.mark.parametrize("quorum", ["all", None])
@pytest.mark.parametrize("replicas", [2, 8, 32])
def test_a_round_takes_seven_round_trips_whatever_the_number_of_replicas(engine, replicas, quorum):
    store, proxy = engine
    fleet = Fleet(replicas=replicas, rounds=ROUNDS + 1, store=store, quorum=quorum)
    taken = round_trips(fleet, proxy)
    print(taken)
    assert len(fleet.commits()) == ROUNDS
    assert max(map(max, taken)) <= 7
