"""`RetryingStore`: the only place with retries. It also resolves creates whose reply was lost.

Three kinds of faults are retried; every other error is raised at once:

- `StoreUnavailable`: the store does not answer, or throttles.
- `StoreDenied` for a kind of call that was allowed to this process before: credentials have expired, were renewed
  elsewhere, or the service that checks them fails. The store is reopened for every try, which reads the credentials
  again from their source.
- `StoreFull` once the store has answered a call: somebody else frees space on the disk.
"""

import logging
import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, TypeVar

from diloco_orchestrator.clock import Backoff, Clock
from diloco_orchestrator.errors import DilocoError, ObjectMissing, StoreDenied, StoreError, StoreFull, StoreUnavailable
from diloco_orchestrator.store.base import ObjectInfo, Store, is_folder

log = logging.getLogger(__name__)
T = TypeVar("T")

_TOLD_AFTER_S = 90.0  # an outage that lasts for so long is logged; what a person must correct, at once
_LONG_S = 20.0  # so is a failed call that took so long: few such fit into the time after which an outage is logged
_TOLD_EVERY_S = 600.0
_LONGEST_AFTER_S = 300.0  # what a store may ask to be left alone for; the longest window of a known limit
_RENEW = " Every try reads the credentials again: renew them where they come from, or give them their rights back."


@dataclass(frozen=True)
class RetryPolicy:
    """Duration of retries of transient faults, infinite for a process that waits until a person ends it.

    Each pause is uniform from 0 to a bound that doubles with every try; it is longer where the store says how long.
    """

    first_pause_s: float = 0.2  # about one round trip to a far bucket
    longest_pause_s: float = 10.0  # throttling asks for seconds, not minutes
    total_s: float = 90.0  # long enough for a minute without network
    first_call_s: float | None = None  # replaces total_s until one call has succeeded: a wrong URL fails fast
    leaving_s: float = 20.0  # replaces total_s for a process that was asked to end: it is killed soon
    # Credentials that were withdrawn for good must not keep a fleet waiting for hours; a provider that refuses the
    # coordinator has as long (`AttemptPolicy.denied_for_s`).
    refused_s: float = 600.0


class _Opened:
    """The open store that all threads of this process share, and which kinds of calls (get, put, …) have succeeded."""

    def __init__(self, store: Store, reopen: Callable[[], Store] | None) -> None:
        self.store = store
        self.answered = False  # whether any call has had an answer
        self.allowed: set[str] = set()  # kinds of calls that have succeeded
        self._failing: set[str] = set()  # kinds of calls of which a fault was logged, until one succeeds
        self._reopen = reopen
        self._told_at = -math.inf
        self._told = set[type[StoreError]]()  # kinds of errors logged since all failing kinds of calls have succeeded
        self._lock = threading.Lock()

    def succeeded(self, kind: str) -> None:
        """Record that a call of this kind was allowed."""
        self.answered = True
        self.allowed.add(kind)
        if kind in self._failing:
            self._failing.discard(kind)
            log.warning("%s answers again.", self.store.url)

    def open_anew(self, refused: Store) -> str:
        """Reopen the store after `refused`, the open store, denied a call, unless another thread has reopened it.

        Returns the error as a sentence if reopening fails, and keeps the store; else "".
        """
        with self._lock:
            if self._reopen is not None and self.store is refused:
                try:
                    self.store = self._reopen()
                except (DilocoError, OSError) as error:  # such as a credentials file that is being written
                    return f" The store could not be opened anew: {error}"
        return ""

    def may_tell(self, kind: str, error: StoreError, now: float, every_s: float) -> bool:
        """Whether the caller may log the fault `error` of a kind of call now: one thread may, every `every_s` seconds.

        Sooner for another kind of error, and after calls of all failing kinds have succeeded: it is another fault then.
        """
        with self._lock:
            if not self._failing:
                self._told.clear()
            if type(error) in self._told and now - self._told_at < every_s:
                return False
            self._failing.add(kind)
            self._told.add(type(error))
            self._told_at = now
            return True


class RetryingStore(Store):
    """The store interface over `store`, with retries of transient faults.

    Raises the last error once faults have lasted as long as `policy` allows. `rng`: draws the pauses; replicas need
    different seeds, or they retry at the same moments. `is_leaving`: returns whether this process was asked to end;
    faults are then retried only briefly. `reopen`: opens the store again, with credentials read anew.
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
        reopen: Callable[[], Store] | None = None,
    ) -> None:
        self.url = store.url
        self._opened = _Opened(store, reopen)
        self._clock = clock
        self._rng = rng
        self._policy = policy or RetryPolicy()
        self._read_back = read_back
        self._is_leaving = is_leaving

    @property
    def endpoint(self) -> str:
        return self._opened.store.endpoint

    @property
    def requests_allowed(self) -> int | None:
        return self._opened.store.requests_allowed

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._retry("get", lambda store: store.get(key, start, end))

    def open_file(self, key: str) -> IO[bytes] | None:
        return self._retry("get", lambda store: store.open_file(key))

    def put(self, key: str, data: bytes) -> None:
        self._retry("put", lambda store: store.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        def attempt(store: Store) -> bool:
            # An existing object may be ours, from a call whose reply was lost or that a library or proxy sent twice. If
            # its bytes are equal it is: every record has a write id of its own.
            return store.create(key, data) or (self._read_back and _is_ours(store, key, data))

        return self._retry("create", attempt)

    def without_read_back(self) -> "RetryingStore":
        found = RetryingStore(
            self._opened.store, self._clock, self._rng, self._policy, read_back=False, is_leaving=self._is_leaving
        )
        found._opened = self._opened
        return found

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        assert is_folder(prefix), f"{prefix} is no folder, and stores list folders alone"
        return self._retry("list", lambda store: iter(list(store.list(prefix, start_after))))

    def delete(self, key: str) -> None:
        self._retry("delete", lambda store: store.delete(key))

    def _retry(self, kind: str, call: Callable[[Store], T]) -> T:
        """The result of `call`, of a kind such as "get", repeated after transient faults as long as policy allows."""
        failing_since: float | None = None  # the first fault, not the first try: a transfer may outlast total_s
        # The first and the last of refusals that are minutes apart at most; finite before any, as refused_s may not be.
        refused_since = refused_at = -1e12
        bounds = Backoff(self._policy.first_pause_s, self._policy.longest_pause_s).pauses()
        tries = 0
        while True:
            tries += 1
            store, began = self._opened.store, self._clock.now()
            try:
                found = call(store)
                self._opened.succeeded(kind)
                return found
            except ObjectMissing:
                self._opened.succeeded(kind)
                raise
            except StoreError as error:
                if not self._may_pass(error, kind):
                    self._opened.answered = True
                    raise
                now = self._clock.now()
                failing_since = now if failing_since is None else failing_since
                left_s, why = failing_since + self._total_s - now, ""
                if isinstance(error, StoreDenied):
                    # Other faults may come between them: a store that refuses for good may be overloaded, too.
                    refused_since = now if now - refused_at > self._policy.refused_s / 2 else refused_since
                    refused_at = now
                    left_s = min(left_s, refused_since + self._policy.refused_s - now)
                    why = self._opened.open_anew(store)
                if left_s <= 0.0:
                    words = f"{error}{why} Tried {tries} times in {now - failing_since:.0f} s."
                    raise type(error)(words) from error
                self._tell(kind, error, why, now - failing_since, left_s, now - began)
                after_s = min(getattr(error, "after_s", 0.0), _LONGEST_AFTER_S)
            # Whoever is refused at once must not come back at once.
            pause_s = max(self._rng.uniform(0, next(bounds)), after_s * self._rng.uniform(1.0, 1.25))
            self._clock.sleep(min(pause_s, left_s))

    def _may_pass(self, error: StoreError, kind: str) -> bool:
        """Whether `error` of a call of this kind (such as "get") is retried: `StoreUnavailable` always.

        `StoreDenied` if a call of this kind succeeded before, `StoreFull` if any call did.
        """
        if isinstance(error, StoreDenied):
            return kind in self._opened.allowed
        return isinstance(error, StoreUnavailable) or (isinstance(error, StoreFull) and bool(self._opened.allowed))

    def _tell(self, kind: str, error: StoreError, why: str, spent_s: float, left_s: float, took_s: float) -> None:
        """Log the fault being retried, since when, how much longer, and what a person can do; not at every try.

        `took_s`: of the last try.
        """
        if isinstance(error, StoreUnavailable) and spent_s < _TOLD_AFTER_S and took_s < _LONG_S:
            return
        ends = left_s < math.inf  # without an end there is no news of the same fault
        if self._opened.may_tell(kind, error, self._clock.now(), _TOLD_EVERY_S if ends else math.inf):
            since = datetime.fromtimestamp(self._clock.wall_time() - spent_s, UTC)
            more = f"for {left_s:.0f} s more" if ends else "until it answers"
            remedy = _RENEW if isinstance(error, StoreDenied) else ""
            log.warning("%s%s Waiting since %s, %s.%s", error, why, f"{since:%H:%M:%S} UTC", more, remedy)

    @property
    def _total_s(self) -> float:
        first_call_s = self._policy.first_call_s
        total_s = self._policy.total_s if self._opened.answered or first_call_s is None else first_call_s
        return min(total_s, self._policy.leaving_s) if self._is_leaving() else total_s


def _is_ours(store: Store, key: str, data: bytes) -> bool:
    """Whether the existing object has the bytes `data` of our create. Raises `StoreUnavailable` if it is gone."""
    try:
        return store.get(key, 0, len(data) + 1) == data  # somebody else's may be as large as it likes
    except ObjectMissing as error:  # deleted meanwhile: try the create again
        raise StoreUnavailable(str(error)) from error
