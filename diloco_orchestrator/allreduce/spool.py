"""Verified payload bytes kept between verification and averaging: in memory up to a bound, beyond it in a file.

A commit names only what its writer verified *and* averaged, so the bytes averaged must be the bytes verified.
"""

import tempfile
from typing import IO

MEMORY_BYTES = 256 * 2**20


class Spool:
    """Bytes by their sha256. One thread at a time."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._room = memory_bytes
        self._memory: dict[str, bytes] = {}
        self._places: dict[str, tuple[int, int]] = {}  # offset, size in the file
        self._file: IO[bytes] | None = None

    def put(self, sha256: str, data: bytes) -> None:
        """Keep `data`; writing a digest again changes nothing."""
        if sha256 in self._memory or sha256 in self._places:
            return
        if len(data) <= self._room:
            self._room -= len(data)
            self._memory[sha256] = data
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="diloco-spool-")  # noqa: SIM115 - lives as long as the spool
        self._places[sha256] = (self._file.seek(0, 2), len(data))
        self._file.write(data)

    def get(self, sha256: str) -> bytes | None:
        """The bytes, or None if they were never put."""
        if sha256 in self._places and self._file is not None:
            offset, size = self._places[sha256]
            self._file.seek(offset)
            return self._file.read(size)
        return self._memory.get(sha256)

    def clear(self) -> None:
        """Forget everything: the round is over."""
        self._room += sum(len(data) for data in self._memory.values())
        self._memory.clear()
        self._places.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
