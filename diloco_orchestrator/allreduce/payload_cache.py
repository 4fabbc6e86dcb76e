"""`PayloadCache`: keeps verified payload bytes until they are averaged, in memory up to a limit, then in a file.

Averaged bytes must be the verified ones, so they are not fetched again. If the store is a local folder, its files are
kept open instead of copied: nobody writes to them, and a file damaged in between changes the base's digest, which is
checked. `allreduce.spool` has the process's memory budget and the file's disk space.
"""

import mmap
import threading
from collections.abc import Callable
from typing import IO, Protocol

from diloco_orchestrator.allreduce.shards import mapped
from diloco_orchestrator.allreduce.spool import Allocation, budget, reserve, spool_file

# Three shards: beside the average, the base and its momenta it keeps the peak of a sync of 125 M parameters below 3.5
# times their fp32 size.
MEMORY_BYTES = 192 * 2**20

# The file stays from round to round up to this size: to overwrite it is thrice as fast as to write a new one.
KEPT_BYTES = 2**30

# Files of the store that one cache holds open. A process may have 1,024 by default.
OPEN_FILES = 256

# Key and digest. Not the digest alone: two replicas may publish equal bytes, and each object must be verified.
Name = tuple[str, str]


class KeepsPayloads(Protocol):
    """A cache of verified payload bytes for a later reader in this process."""

    def put(self, name: Name, data: bytes | memoryview) -> None: ...

    def get(self, name: Name) -> bytes | memoryview | None: ...


class PayloadCache:
    """Payload bytes by key and digest, in memory up to `memory_bytes`, then in a temporary file. Thread-safe."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._lock = threading.Lock()
        self._limit = self._room = memory_bytes
        self._memory: dict[Name, tuple[bytes | memoryview, Allocation]] = {}
        self._places: dict[Name, tuple[int, int]] = {}  # offset, size in the file
        self._opened: dict[Name, tuple[IO[bytes], int]] = {}  # a file of the store, its size
        self._file: IO[bytes] | None = None
        self._end = 0  # of the bytes in the file that are in use

    def put(self, name: Name, data: bytes | memoryview) -> None:
        """Keep `data`, verified payload bytes, under `name` (key and digest), unless the name is in the cache.

        Raises `SpoolFailed` if the disk is full.
        """
        with self._lock:
            if self._has(name):
                return
            allocation = budget().take(len(data)) if len(data) <= self._room else None
            if allocation is not None:
                self._room -= len(data)
                self._memory[name] = data, allocation
                return
            if self._file is None:
                self._file = spool_file(len(data), name[0])
            reserve(self._file, self._end, len(data), name[0])
            self._file.seek(self._end)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._places[name] = (self._end, len(data))
            self._end += -(-len(data) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    def put_file(self, name: Name, file: IO[bytes], size: int) -> None:
        """Keep a verified file of the store, `size` bytes long, open. Beyond 256 open files its bytes are copied."""
        with self._lock:
            if len(self._opened) < OPEN_FILES and not self._has(name):
                self._opened[name] = file, size
                return
        with file:
            self.put(name, bytes(mapped(file, size)))

    def get(self, name: Name) -> bytes | memoryview | None:
        """The payload bytes stored under `name` (key and digest); None if there are none. Valid until `clear` or
        `close`.

        Bytes in a file are mapped, so that those of many replicas can be read side by side without being in memory.
        """
        with self._lock:
            if name in self._opened:
                return mapped(*self._opened[name])
            if name in self._places and self._file is not None:
                offset, size = self._places[name]
                return mapped(self._file, size, offset)
            data, _ = self._memory.get(name, (None, None))
            return data

    def kept(self, name: Name, read: Callable[[], bytes]) -> bytes | memoryview:
        """The payload bytes under `name`, stored there from `read()` if missing. Raises `SpoolFailed` for a full
        disk.
        """
        if name not in self:
            self.put(name, read())
        found = self.get(name)
        assert found is not None, "it is there now"
        return found

    def __contains__(self, name: Name) -> bool:
        with self._lock:
            return self._has(name)

    def _has(self, name: Name) -> bool:
        return name in self._memory or name in self._places or name in self._opened

    def names(self) -> list[Name]:
        """The names of all bytes in the cache."""
        with self._lock:
            return [*self._memory, *self._places, *self._opened]

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cache holds in memory now."""
        with self._lock:
            return sum(len(data) for data, _ in self._memory.values())

    def spill(self) -> None:
        """Move all cached bytes from memory to the temporary file; until `clear` more bytes go there too.

        Raises `SpoolFailed` if the disk is full.
        """
        with self._lock:
            kept, self._memory, self._room = self._memory, {}, -1
        for name in list(kept):
            self.put(name, kept.pop(name)[0])

    def clear(self) -> None:
        """Drop all bytes, at the end of a round."""
        with self._lock:
            if self._file is not None and self._end > KEPT_BYTES:
                self._file.truncate(KEPT_BYTES)
            self._clear()

    def close(self) -> None:
        """Drop all bytes, and close the cache's temporary file and the kept files of the store."""
        with self._lock:
            self._clear()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _clear(self) -> None:
        self._room = self._limit
        self._memory.clear()
        self._places.clear()
        for file, _ in self._opened.values():
            file.close()
        self._opened.clear()
        self._end = 0
