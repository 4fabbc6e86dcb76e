"""`MemoryStore`: a store in this process's memory, for tests and `memory://name` URLs."""

import threading
from collections.abc import Iterator

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.store.base import ObjectInfo


class MemoryStore:
    """The store interface over a dict with one lock. Its objects end with the process."""

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._lock:
            if key not in self._objects:
                raise ObjectMissing(f"{key} does not exist in {self.url}.")
            return self._objects[key][start:end]

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            found = [ObjectInfo(key, len(data)) for key, data in self._objects.items()]
        wanted = (info for info in found if info.key.startswith(prefix) and info.key > start_after)
        return iter(sorted(wanted, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)
