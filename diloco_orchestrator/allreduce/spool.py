"""Memory for long-lived buffers (base, averages, saved states, payloads) within a budget; beyond it, mapped temp files.

Buffers that are consumed at once, such as a shard being decoded, are not counted. torch is imported inside functions,
because `verify` keeps payloads here where torch is not installed.
"""

import errno
import functools
import logging
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, TypeVar

from diloco_orchestrator.clock import Backoff, SystemClock
from diloco_orchestrator.errors import BudgetTooSmall, ConfigError, SpoolFailed
from diloco_orchestrator.executors.machine import memory_share
from diloco_orchestrator.protocol.process import ENV_MEMORY

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
T = TypeVar("T")

_MIB = 2**20
# Bytes. Tensors below it are not counted: thousands of them together are smaller than one shard.
_SMALL = _MIB
# Seconds. Another process's files are often gone within a minute; a disk that is too small for this run stays so, and
# the next attempt may get another machine.
PATIENCE_S = 60.0
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class Allocation:
    """A number of bytes reserved from a memory budget, returned to it when this object is deleted."""

    def __init__(self, budget: "MemoryBudget", nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._budget.give_back(self._nbytes)


class MemoryBudget:
    """A limit, set by `where`, on the bytes of this process's long-lived buffers in memory. Thread-safe."""

    def __init__(self, limit: int, where: str = ENV_MEMORY) -> None:
        self.limit = limit
        self.where = where
        self._used = 0
        self._lock = threading.RLock()  # an allocation may end in a garbage collection that begins while it is held

    def take(self, nbytes: int) -> Allocation | None:
        """Reserve `nbytes` of the budget until the returned `Allocation` is deleted; None if fewer bytes are left."""
        with self._lock:
            if self._used + nbytes > self.limit:
                return None
            self._used += nbytes
        return Allocation(self, nbytes)

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes


@functools.cache
def budget() -> MemoryBudget:
    """The memory budget of this process, read from its environment once. Raises `ConfigError` for an invalid value."""
    return budget_of(os.environ)


def budget_of(environ: Mapping[str, str]) -> MemoryBudget:
    """The memory budget that `DILOCO_MEMORY_MIB` sets, by default half of the memory of this machine or container."""
    given = environ.get(ENV_MEMORY)
    if given is None:
        return MemoryBudget(memory_share(1) * _MIB, "half of this machine's memory")
    if not given.isdecimal() or not int(given):
        raise ConfigError(f"{ENV_MEMORY}={given!r} is not a number of MiB above 0. Set one, or unset it.")
    return MemoryBudget(int(given) * _MIB, f"{ENV_MEMORY}={given}")


def held(numel: int, what: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """A flat tensor of zeros on the CPU, in memory while the budget lasts, else in a mapped temporary file.

    The file is unlinked and its disk space reserved at once, so that it ends with the tensor or the process, and a full
    disk raises here instead of sending SIGBUS later. `what`: names the tensor in errors. `dtype`: None means float32.
    Raises `SpoolFailed` if the disk space cannot be reserved.
    """
    import torch

    dtype = dtype or torch.float32
    return _held(numel * dtype.itemsize, what).view(dtype)


def _held(nbytes: int, what: str) -> "torch.Tensor":
    import torch

    if nbytes < _SMALL:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    if (allocation := budget().take(nbytes)) is not None:
        memory = _Memory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.allocation = allocation
        return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping as long as any view of the tensor lives
    with spool_file(nbytes, what) as file, _spooling(nbytes, what):
        reserve(file, 0, nbytes, what)
        # torch maps the file by a name and keeps no file open: a large model has more shards than a process files.
        return torch.from_file(f"/dev/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)


class _Memory(mmap.mmap):
    """An anonymous memory map that holds its `Allocation` of the memory budget as long as it exists."""

    allocation: Allocation


def check_fits(nbytes: int, what: str) -> None:
    """Raise `BudgetTooSmall` if one shard of `nbytes`, which is always wholly in memory, exceeds the budget."""
    if nbytes > budget().limit:
        raise BudgetTooSmall(
            f"one shard of {what} is {_mib(nbytes)}, more than the memory of {_mib(budget().limit)} that this process "
            f"may use: {budget().where}. Set {ENV_MEMORY} to more, or start the run with a smaller shard_mib."
        )


def spool_file(nbytes: int, what: str) -> IO[bytes]:
    """A new unlinked temporary file. `nbytes`, `what`: its planned size and use, for errors. Raises `SpoolFailed`."""
    with _spooling(nbytes, what):
        return _with_patience(lambda: tempfile.TemporaryFile(prefix="diloco-", buffering=0), what)


def reserve(file: IO[bytes], start: int, nbytes: int, what: str) -> None:
    """Reserve the disk space of bytes [start, start + nbytes) of a spool file. Raises `SpoolFailed`."""
    with _spooling(nbytes, what):
        if sys.platform == "darwin":  # has no such call
            file.seek(start)
            for done in range(0, nbytes, _MIB):
                file.write(bytes(min(_MIB, nbytes - done)))
        else:
            _with_patience(lambda: os.posix_fallocate(file.fileno(), start, nbytes), what)


def _with_patience(call: Callable[[], T], what: str) -> T:
    """The result of `call`, repeated for `PATIENCE_S` seconds while the disk is full, read-only or failing."""
    waited_s = 0.0
    for pause_s in Backoff(0.1, 5.0).pauses():
        try:
            return call()
        except OSError as error:
            if error.errno not in _MAY_PASS or waited_s >= PATIENCE_S:
                raise
            if waited_s == 0.0:
                words = "no room in %s for %s: %s. Waiting for up to %.0f s: free some space there."
                log.warning(words, _folder(), what, error.strerror, PATIENCE_S)
        SystemClock().sleep(pause_s)
        waited_s += pause_s
    raise AssertionError("pauses do not end")


@contextmanager
def _spooling(nbytes: int, what: str) -> Iterator[None]:
    """Context that turns an error of the operating system, or of torch's mapping, into `SpoolFailed`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise SpoolFailed(
            f"cannot keep {_mib(nbytes)} of {what} in a temporary file in {_folder()}: {why}. Free some space there, "
            f"set TMPDIR to a folder with more, or raise {ENV_MEMORY}: {_mib(budget().limit)} now, by {budget().where}."
        ) from error


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR", "TMPDIR")  # none can be written to


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f} MiB"
