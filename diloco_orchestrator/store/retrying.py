"""`RetryingStore`: the only place with retries. It also resolves creates whose reply was lost.

Exactly the calls that raise `StoreUnavailable` are retried; every other error is raised at once.
"""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TypeVar

from diloco_orchestrator.clock import Backoff, Clock
from diloco_orchestrator.errors import ObjectMissing, StoreError, StoreUnavailable
from diloco_orchestrator.store.base import ObjectInfo, Store, open_file

log = logging.getLogger(__name__)
T = TypeVar("T")

_TOLD_AFTER_S = 90.0  # an outage that lasts for so long is logged


@dataclass(frozen=True)
class RetryPolicy:
    """How long a transient fault is retried. Each pause is uniform from 0 to a bound that doubles every time."""

    first_pause_s: float = 0.2  # about one round trip to a far bucket
    longest_pause_s: float = 10.0  # throttling asks for seconds, not minutes
    total_s: float = 90.0  # long enough for a minute without network
    first_call_s: float | None = None  # replaces total_s until one call has succeeded: a wrong URL fails fast
    leaving_s: float = 20.0  # replaces total_s for a process that was asked to end: it is killed soon


class RetryingStore:
    """The store interface over `store`, with retries of transient faults.

    Raises `StoreUnavailable` once a fault has lasted for `policy.total_s`. `rng`: draws the pauses; replicas need
    different seeds, or they retry in step. `is_leaving`: whether this process was asked to end.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        rng: random.Random,
        policy: RetryPolicy | None = None,
        *,
        read_back: bool = True,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._clock = clock
        self._rng = rng
        self._policy = policy or RetryPolicy()
        self._read_back = read_back
        self._is_leaving = is_leaving
        self._reached = False  # whether any call has succeeded

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._retry(lambda: self._store.get(key, start, end))

    def open_file(self, key: str) -> IO[bytes] | None:
        return self._retry(lambda: open_file(self._store, key))

    def put(self, key: str, data: bytes) -> None:
        self._retry(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        def attempt() -> bool:
            # An existing object may be ours, from a call whose reply was lost or that a library or proxy sent twice. If
            # its bytes are equal it is: every record has a write id of its own.
            return self._store.create(key, data) or (self._read_back and self._is_ours(key, data))

        return self._retry(attempt)

    def without_read_back(self) -> "RetryingStore":
        """This store as `without_read_back` returns it."""
        return RetryingStore(
            self._store, self._clock, self._rng, self._policy, read_back=False, is_leaving=self._is_leaving
        )

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._retry(lambda: iter(list(self._store.list(prefix, start_after))))

    def delete(self, key: str) -> None:
        self._retry(lambda: self._store.delete(key))

    def _is_ours(self, key: str, data: bytes) -> bool:
        """Whether the existing object has the bytes of our create. Raises `StoreUnavailable` if it is gone by now."""
        try:
            return self._store.get(key) == data
        except ObjectMissing as error:  # deleted meanwhile: try the create again
            raise StoreUnavailable(str(error)) from error

    def _retry(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is repeated while it raises `StoreUnavailable` and the policy's time has not
        passed.
        """
        failing_since: float | None = None  # the first fault, not the first try: a transfer may outlast total_s
        bounds = Backoff(self._policy.first_pause_s, self._policy.longest_pause_s).pauses()
        tries, told = 0, False
        while True:
            tries += 1
            try:
                found = call()
                self._reached = True
                return found
            except StoreUnavailable as error:
                failing_since = self._clock.now() if failing_since is None else failing_since
                spent = self._clock.now() - failing_since
                if spent >= self._total_s:
                    raise StoreUnavailable(f"{error} Tried {tries} times in {spent:.0f} s.") from error
                if spent >= _TOLD_AFTER_S and not told:
                    told = True
                    log.warning("%s Tried for %.0f s, for up to %.0f s.", error, spent, self._total_s)
            except StoreError:
                self._reached = True  # the store answered
                raise
            self._clock.sleep(min(self._rng.uniform(0, next(bounds)), max(0.0, self._total_s - spent)))

    @property
    def _total_s(self) -> float:
        first_call_s = self._policy.first_call_s
        total_s = self._policy.total_s if self._reached or first_call_s is None else first_call_s
        return min(total_s, self._policy.leaving_s) if self._is_leaving() else total_s


def without_read_back(store: Store) -> Store:
    """The same store, whose `create` reads no existing object: False may mean one of our own, whose reply was lost.

    For objects of many megabytes whose writer need not know who wrote them, or reads them anyway.
    """
    return store.without_read_back() if isinstance(store, RetryingStore) else store
