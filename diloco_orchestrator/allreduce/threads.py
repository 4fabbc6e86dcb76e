"""Arithmetic in threads of this process, to each of which torch gives no further ones.

torch divides every operation among OpenMP threads, which wait for each other at its end. On cores that other processes
use too, the operations on blocks that fit a core's cache then wait most of the time for a thread that is not scheduled.
The threads here take ranges of a vector, one after another, and wait for each other once, at the end of a shard.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from diloco_orchestrator.clock import ThreadBackground, in_parallel

T = TypeVar("T")

# Elements that a thread takes at once: a few milliseconds of work.
RANGE = 512 * 1024


class _Outside(threading.local):
    threads = 0  # of torch outside of `one_torch_thread`; 0 where that is not


_outside = _Outside()


def workers() -> int:
    """Threads that work at once: as many as torch uses in this thread, which the launcher sets per replica."""
    import torch

    return _outside.threads or torch.get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Within it torch's operations that are called in this thread run in this thread alone.

    Other threads keep their number, and so do those that start meanwhile: `torch.set_num_threads` would change the
    number of the latter. Where torch was not built with OpenMP, the number stays.
    """
    threads, set_threads = workers(), _openmp()
    if _outside.threads or set_threads is None:
        yield
        return
    _outside.threads = threads
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)
        _outside.threads = 0


def in_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of `calls`, in their order: arithmetic without gradients that waits for nothing, several at a time.

    Threads that start here have this one's floating-point mode. Errors as of `clock.in_parallel`.
    """
    import torch

    def alone(call: Callable[[], T]) -> T:
        with one_torch_thread(), torch.no_grad():  # both are states of threads
            return call()

    return in_parallel(ThreadBackground(), [functools.partial(alone, call) for call in calls], workers())


def ranges(numel: int) -> list[tuple[int, int]]:
    """[start, stop) of the ranges of a vector that threads take."""
    return [(start, min(start + RANGE, numel)) for start in range(0, numel, RANGE)]


@functools.cache
def _openmp() -> Callable[[int], None] | None:
    """OpenMP's own function, which sets the number of threads that the calling thread's operations use."""
    import torch

    torch.get_num_threads()  # at its first call in a thread torch sets that thread's number itself
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
