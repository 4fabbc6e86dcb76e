"""The bucket of a simulated run, and each process's network before it: slow, failing, and within a store's promises.

A `get` that begins after an object was created sees it, as docs/reference/protocol.md section 1 says. Of an object that
was overwritten less than `stale_s` ago it may see the version before, and listings may lag behind by `listing_lag_s`,
which is more than a store may do: snapshot 0, from which every replica begins within seconds, is listed at once.
"""

import random
from collections.abc import Iterator
from typing import Any

from simulation_plan import Plan
from virtual_time import VirtualClock, VirtualTime

from diloco_orchestrator.errors import StoreFull, StoreUnavailable
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.memory import MemoryStore

_FIRST_SNAPSHOT = keys.snapshot(0, "").rstrip("/")  # of any version


class InvariantBroken(AssertionError):
    """Names the invariant (I1 to I10) and the seed."""


class Bucket(MemoryStore):
    """The truth. Remembers when each object was written, and that no object of the log ever changes."""

    def __init__(self, time: VirtualTime, plan: Plan) -> None:
        super().__init__("memory://simulation")
        self._time = time
        self._plan = plan
        self.written_at: dict[str, float] = {}
        self.commits: dict[str, bytes] = {}
        self.sent: dict[str, bytes] = {}  # every object that was created, as its writer sent it
        self.lost: set[str] = set()  # keys whose first write was acknowledged and not kept
        self.before: dict[str, bytes] = {}  # the last version but one of each object that was overwritten
        self.stale_reads = 0

    def rot(self, round_: int, replica_id: int) -> None:
        """Damage a payload that is there now."""
        for info in list(self.list(f"{keys.payloads(round_)}{replica_id}/")):
            data = self.get(info.key)
            super().put(info.key, bytes([data[0] ^ 1]) + data[1:])

    def put(self, key: str, data: bytes) -> None:
        if key in self._objects:
            self.before[key] = self._objects[key]
        super().put(key, data)
        self._note(key, data)

    def create(self, key: str, data: bytes) -> bool:
        if any(key.startswith(f"{keys.payloads(r)}{i}/") for r, i in self._plan.lost_payloads if key not in self.lost):
            self.lost.add(key)
            self.sent[key] = data
            return True
        made = super().create(key, data)
        if made:
            self.sent[key] = data
            self._note(key, data)
            self._maybe_corrupt(key, data)
        return made

    def forge(self, key: str, data: bytes) -> bool:
        """Write an object as somebody does who may write to the bucket and is no process of the run."""
        return self.create(key, data)

    def _note(self, key: str, data: bytes) -> None:
        self.written_at[key] = self._time.now
        if key.endswith("commit.json") and self.commits.setdefault(key, data) != data:
            raise InvariantBroken(f"I1: {key} was written twice")

    def _maybe_corrupt(self, key: str, data: bytes) -> None:
        for round_, replica_id in self._plan.corrupt_payloads:
            shard = keys.parse_payload(key)
            if shard is not None and (shard.round, shard.replica_id, shard.take) == (round_, replica_id, 1):
                super().put(key, bytes([data[0] ^ 1]) + data[1:])


class Network(Store):
    """One process's way to the bucket: takes time, fails, loses replies, repeats itself."""

    def __init__(self, bucket: Bucket, plan: Plan, clock: VirtualClock, chance: random.Random, trace: Any) -> None:
        self.url = bucket.url
        self._bucket = bucket
        self._plan = plan
        self._clock = clock
        self._chance = chance
        self._trace = trace

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        def read() -> bytes:
            if self._reads_stale(key):
                self._bucket.stale_reads += 1
                return self._bucket.before[key][start:end]
            return self._bucket.get(key, start, end)

        return self._call("get", key, read)

    def _reads_stale(self, key: str) -> bool:
        if not self._plan.stale_s or key not in self._bucket.before:
            return False
        is_new = self._clock.now() < self._bucket.written_at[key] + self._plan.stale_s
        return is_new and self._chance.random() < 0.5

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, lambda: self._bucket.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        def send() -> bool:
            made = self._bucket.create(key, data)
            if self._chance.random() < self._plan.twice:
                return self._bucket.create(key, data)  # the client's own library sent it again
            return made

        return self._call("create", key, send)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        seen = self._call("list", prefix, lambda: list(self._bucket.list(prefix, start_after)))
        newest = self._clock.now() - self._plan.listing_lag_s
        lagging = self._plan.listing_lag_s and self._chance.random() < 0.5

        def is_old(key: str) -> bool:
            return self._bucket.written_at.get(key, 0.0) <= newest or key.startswith(_FIRST_SNAPSHOT)

        return iter([info for info in seen if not lagging or is_old(info.key)])

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self._bucket.delete(key))

    def _call(self, verb: str, key: str, call: Any) -> Any:
        plan, now = self._plan, self._clock.now()
        self._clock.sleep(self._chance.uniform(0, plan.latency_s))
        stormy = any(begin <= now < end for begin, end in plan.storms) and self._chance.random() < 0.9
        refused = verb in ("put", "create") and any(begin <= now < end for begin, end in plan.no_writes)
        cut = any(begin <= now < end for begin, end in plan.no_network)
        if cut or stormy or refused or self._chance.random() < plan.fail:
            raise StoreUnavailable(f"cannot {verb} {key}: 503 (simulated)")
        if verb in ("put", "create") and any(begin <= now < end for begin, end in plan.full):
            raise StoreFull(f"cannot {verb} {key}: no space left (simulated)")
        result = call()
        self._trace(self._clock, verb, key)
        self._clock.sleep(self._chance.uniform(0, plan.latency_s))
        if self._chance.random() < plan.lose_reply:
            raise StoreUnavailable(f"no reply to {verb} {key} (simulated)")
        return result
