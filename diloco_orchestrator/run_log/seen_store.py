"""`SeenStore`: a run's folder with a cache, so that one process asks for a changing object again only after a pause.

A coordinator and a display poll the same few objects: the next commit, heartbeats, and records that do not exist yet.
Existing records never change and are cached by their readers; this file caches what may change, for pauses that follow
from the length of a round (`protocol.pace`).
"""

import copy
from collections.abc import Iterator
from typing import IO

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.protocol import keys, pace
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import ObjectInfo, Store

_LISTINGS = (keys.LEGS, keys.REPLICAS, keys.SNAPSHOTS, keys.STARTS)  # that are remembered


class SeenStore(Store):
    """The store interface over `store`, with absent objects, heartbeats and listings cached for a pause.

    Objects that this process writes or deletes are seen at once, and everything after `forget`. Any other object is
    read from the store at every call.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.url = store.url
        self._store = store
        self._clock = clock
        self._log: RunLog | None = None
        self._newest: tuple[int, float] = 0, clock.now()  # round of the newest commit, and when that was seen
        self._round_s = 0.0  # of the newest round that has ended; 0 before the first
        self._absent: dict[str, float] = {}  # when the store is asked again, by key; so below
        self._beats: dict[str, tuple[float, bytes]] = {}
        self._listed: dict[tuple[str, str], tuple[float, list[ObjectInfo]]] = {}

    @classmethod
    def of(cls, store: Store, clock: Clock) -> "SeenStore":
        """`store` itself if it is a `SeenStore`, else a `SeenStore` over it."""
        return store if isinstance(store, cls) else cls(store, clock)

    @property
    def newest_at(self) -> float:
        """When `follow` first saw the newest commit, in s on this object's clock; before any, when it was made."""
        return self._newest[1]

    def follow(self, log: RunLog) -> None:
        """Set the pauses from the length of the newest round that has ended and from the run's settings."""
        self._log = log
        begin = max(log.known_begins(), key=lambda begin: begin.leg, default=None)
        newest = log.newest(begin) if begin is not None else None
        if newest is not None and newest.commit.round != self._newest[0]:
            self._newest = newest.commit.round, self._clock.now()
            self._round_s = pace.round_s_of(newest.commit) or self._round_s
            # The log asked for the next commit as it read this one, when this round seemed to be still open.
            if (following := keys.commit(newest.commit.round + 1)) in self._absent:
                self._absent[following] = self._clock.now() + self._pause_s(following)

    @property
    def round_s(self) -> float:
        """Seconds of a round; before the first has ended, those since this process began."""
        return self._round_s or self._open_s

    @property
    def apart_s(self) -> float:
        """The least pause in seconds between two polls that the store's limit of requests leaves; 0 without a limit."""
        return pace.apart_s(self._log.run.config, self.requests_allowed) if self._log else 0.0

    @property
    def _open_s(self) -> float:
        return self._clock.now() - self._newest[1]

    def forget(self, key: str = "") -> None:
        """Drop what is cached of the object at `key`, so that the next call asks the store; "" (default): everything.

        Cached listings stay if `key` is given.
        """
        for known in (self._absent, self._beats):
            known.pop(key, None) if key else known.clear()
        if not key:
            self._listed.clear()

    def _wrote(self, key: str) -> None:
        self.forget(key)
        for asked in list(self._listed):  # copied at once: intents are created in several threads
            if key.startswith(asked[0]):
                self._listed.pop(asked, None)

    # -- the store interface -------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return self._store.endpoint

    @property
    def requests_allowed(self) -> int | None:
        return self._store.requests_allowed

    @property
    def beneath(self) -> Store:
        """The store whose objects are cached."""
        return self._store

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        now = self._clock.now()
        if now < self._absent.get(key, now):
            raise ObjectMissing(f"{key} does not exist in {self.url}.")
        if now < self._beats.get(key, (now,))[0]:
            return self._beats[key][1]
        try:
            data = self._store.get(key, start, end)
        except ObjectMissing:
            self._absent[key] = now + self._pause_s(key)
            raise
        self._absent.pop(key, None)
        if keys.heartbeat.parse(key):
            self._beats[key] = now + self._pause_s(key), data
        return data

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        now, asked = self._clock.now(), (prefix, start_after)
        if now < self._listed.get(asked, (now,))[0]:
            return iter(self._listed[asked][1])
        found = list(self._store.list(prefix, start_after))
        if prefix in _LISTINGS:
            self._listed[asked] = now + self._pause_s(prefix), found
        return iter(found)

    def put(self, key: str, data: bytes) -> None:
        try:
            self._store.put(key, data)
        finally:
            self._wrote(key)

    def create(self, key: str, data: bytes) -> bool:
        try:
            return self._store.create(key, data)
        finally:
            self._wrote(key)

    def delete(self, key: str) -> None:
        try:
            self._store.delete(key)
        finally:
            self._wrote(key)

    def open_file(self, key: str) -> IO[bytes] | None:
        return self._store.open_file(key)

    def without_read_back(self) -> "SeenStore":
        """A `SeenStore` with the same cache whose `create` reads no existing object to find out whose it is."""
        found = copy.copy(self)  # what is remembered is shared
        found._store = self._store.without_read_back()
        return found

    # -- pauses --------------------------------------------------------------------------------------------------

    def _pause_s(self, key: str) -> float:
        """Seconds for which a cached answer about the object or listing at `key` is used; 0: none is."""
        if keys.commit.parse(key):
            pause_s = pace.commits_read_s(self.round_s, self._open_s)
        elif keys.heartbeat.parse(key):
            return pace.heartbeats_read_s(self._log.run.config, self.round_s, self.apart_s) if self._log else 0.0
        elif keys.halt.parse(key) or keys.scale.parse(key) or key == keys.START or key.startswith(keys.STARTS):
            pause_s = pace.records_read_s(self.round_s)
        elif not key.startswith(_LISTINGS):
            return 0.0
        else:  # until a round has ended attempts still start, and the leg may end by its result alone
            pause_s = pace.seldom_read_s(self._round_s) if self._round_s else pace.starts_read_s(self._open_s)
        return max(pause_s, self.apart_s)
