"""Thresholds of glibc's allocator: freed memory is kept for the next inner step, and returned around a round's end.

An inner step on a CPU frees what it allocates, up to the logits of a whole batch. glibc returns freed blocks above a
threshold to the system, and each next step pays a page fault for every 4 KiB of them: a third of its time in the
speedrun. A round's end allocates shards and payloads of other sizes; where freed memory is kept, a replica then holds
twice what it needs. So the threshold is low while a round is closed, and high while the user trains.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT = (2**31 - 1, 2**30)  # bytes: all of the heap's end, and every block below 1 GiB
# Blocks of 1 MiB and more go back. Below it each temporary tensor of the outer step would be mapped anew; and with
# glibc's own 128 KiB at the heap's end, a block of 512 KiB that is encoded costs 200 to 1,000 page faults.
_RETURNED = (2**24, 2**20)


class _Glibc:
    """mallopt and malloc_trim of this process; without effect where there is no glibc, or the user has settings."""

    def __init__(self) -> None:
        set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
        set_by_user |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        libc = None if set_by_user else ctypes.CDLL(None)
        self._libc = libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
        self._lock = threading.Lock()
        self._returning = 0  # calls of `returning_freed_memory` that have not ended, of all threads

    def count(self, change: int) -> None:
        with self._lock:
            self._returning += change
            if self._libc is not None and (self._returning, change) in ((1, 1), (0, -1)):
                trim, mmap = _RETURNED if self._returning else _KEPT
                self._libc.mallopt(_M_TRIM_THRESHOLD, trim)
                self._libc.mallopt(_M_MMAP_THRESHOLD, mmap)
                self._libc.malloc_trim(0)  # what training, or the round's end, has freed and kept


_glibc = _Glibc()


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Context in which freed memory goes back to the system. After it, until the next one, freed memory is kept.

    Contexts of several threads may overlap. Does nothing if a `MALLOC_…` variable or a malloc tunable is set.
    """
    _glibc.count(+1)
    try:
        yield
    finally:
        _glibc.count(-1)
