"""The only place with retries: repeats transient faults of another store, and settles creates whose reply was lost.

What deserves another try is exactly `StoreUnavailable`; everything else is final and passes through at once.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from diloco_orchestrator.clock import Backoff, Clock
from diloco_orchestrator.errors import ObjectMissing, StoreUnavailable
from diloco_orchestrator.store.base import ObjectInfo, Store

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How long a fault may last. Pauses double, each drawn evenly from zero to its bound (full jitter)."""

    first_pause_s: float = 0.2  # about one round trip to a far bucket
    longest_pause_s: float = 10.0  # throttling asks for seconds, not minutes
    total_s: float = 90.0  # rides out a minute without network


class RetryingStore:
    """Keeps the promises of `Store` through transient faults of `store`."""

    def __init__(self, store: Store, clock: Clock, rng: random.Random, policy: RetryPolicy | None = None) -> None:
        self._store = store
        self._clock = clock
        self._rng = rng
        self._policy = policy or RetryPolicy()

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._retry(lambda: self._store.get(key, start, end))

    def put(self, key: str, data: bytes) -> None:
        self._retry(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        def attempt() -> bool:
            # What stands may be ours, from a call whose reply was lost, or that a library or proxy sent twice. Records
            # carry a write id, so equal bytes are.
            return self._store.create(key, data) or self._stands(key, data)

        return self._retry(attempt)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._retry(lambda: iter(list(self._store.list(prefix, start_after))))

    def delete(self, key: str) -> None:
        self._retry(lambda: self._store.delete(key))

    def _stands(self, key: str, data: bytes) -> bool:
        try:
            return self._store.get(key) == data
        except ObjectMissing as error:  # whatever was in the way is gone: create it anew
            raise StoreUnavailable(str(error)) from error

    def _retry(self, call: Callable[[], T]) -> T:
        """`call()` until it succeeds, fails for good, or the time is up."""
        failing_since: float | None = None  # a long transfer that breaks has its whole patience still before it
        bounds = Backoff(self._policy.first_pause_s, self._policy.longest_pause_s).pauses()
        tries = 0
        while True:
            tries += 1
            try:
                return call()
            except StoreUnavailable as error:
                failing_since = self._clock.now() if failing_since is None else failing_since
                spent = self._clock.now() - failing_since
                if spent >= self._policy.total_s:
                    raise StoreUnavailable(f"{error} Tried {tries} times in {spent:.0f} s.") from error
            self._clock.sleep(min(self._rng.uniform(0, next(bounds)), self._policy.total_s - spent))
