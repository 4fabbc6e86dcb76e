"""`MemoryStore`: a store in this process's memory, for tests and `memory://name` URLs."""

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import islice, takewhile

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.store.base import ObjectInfo, Store, is_folder


class MemoryStore(Store):
    """The store interface over a dict with one lock. Its objects end with the process."""

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._objects: dict[str, bytes] = {}
        self._keys: list[str] = []  # in order
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._lock:
            if key not in self._objects:
                raise ObjectMissing(f"{key} does not exist in {self.url}.")
            return self._objects[key][start:end]

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._set(key, data)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._set(key, data)
            return True

    def _set(self, key: str, data: bytes) -> None:
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = bytes(data)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        assert is_folder(prefix), f"{prefix} is no folder, and stores list folders alone"
        with self._lock:
            first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, start_after))
            wanted = takewhile(lambda key: key.startswith(prefix), islice(self._keys, first, None))
            return iter([ObjectInfo(key, len(self._objects[key])) for key in wanted])

    def delete(self, key: str) -> None:
        with self._lock:
            if self._objects.pop(key, None) is not None:
                self._keys.remove(key)
