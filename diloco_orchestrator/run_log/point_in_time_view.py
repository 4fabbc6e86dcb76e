"""`PointInTimeView`: read-only overlay that shows a run's folder as it was while one of its rounds was open.

A replica started on the view trains that round as a restarted attempt did then. Writes go elsewhere. What existed
then follows from the keys: objects are created once, and only retention deletes any.
"""

from collections.abc import Callable, Iterator
from heapq import merge

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.memory import MemoryStore

_BEGIN = keys.begin(1).rpartition("/")[2]


class PointInTimeView(Store):
    """The objects of `store` from before attempt `attempt` of replica `replica_id` contributed to a round.

    Hidden are objects of that round, except the other replicas' manifests, of later rounds, and of attempts, except
    intents and claims, by which manifests are checked. Nothing is written to `store`: created objects go to `written`,
    by default into memory, and `on_create` is called with the key of each afterwards.
    """

    def __init__(
        self,
        store: Store,
        leg: int,
        round_: int,
        replica_id: int,
        attempt: int,
        on_create: Callable[[str], None],
        written: Store | None = None,
    ) -> None:
        self.written = MemoryStore(store.url) if written is None else written  # what was written here
        self.url = store.url
        self._store = store
        self._leg = leg
        self._round = round_
        self._replica_id = replica_id
        self._attempt = attempt
        self._on_create = on_create

    @property
    def beneath(self) -> Store:
        """The store of the run as it is now, from which this view shows an earlier state."""
        return self._store

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            return self.written.get(key, start, end)
        except ObjectMissing:
            if not self._shows(key):
                raise
        return self._store.get(key, start, end)

    def put(self, key: str, data: bytes) -> None:
        self.written.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        if self._exists(key) or not self.written.create(key, data):
            return False
        self._on_create(key)
        return True

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        shown = (info for info in self._store.list(prefix, start_after) if self._shows(info.key))
        ours = {info.key: info for info in self.written.list(prefix, start_after)}
        theirs = (info for info in shown if info.key not in ours)
        return merge(theirs, ours.values(), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        self.written.delete(key)

    def _shows(self, key: str) -> bool:
        if of_leg := keys.parse_leg(key):
            return of_leg[0] < self._leg or of_leg == (self._leg, _BEGIN)
        if process := keys.parse_attempt(key):
            of_others = process.replica_id != self._replica_id or process.attempt <= self._attempt
            return of_others and process.name in (keys.INTENT, keys.CLAIM)
        manifest, round_ = keys.contribution.parse(key), keys.parse_round(key)
        if manifest and manifest[0] == self._round:
            return bool(manifest[1] != self._replica_id)
        return round_ is None or round_ < self._round

    def _exists(self, key: str) -> bool:
        if not self._shows(key):
            return False
        try:
            self._store.get(key, 0, 1)
        except ObjectMissing:
            return False
        return True
