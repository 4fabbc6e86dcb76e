"""Threads for arithmetic on vectors, each of which torch does not split any further.

torch splits every operation among OpenMP threads that wait for each other at its end. On cores shared with other
processes, operations on cache-sized blocks then mostly wait for a thread that is not scheduled. The threads here each
take whole ranges of a vector and wait for each other once, at the end of a shard.
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
    """Per-thread setting: whether the thread runs inside `one_torch_thread`."""

    threads = 0  # of torch outside of `one_torch_thread`; 0 where that is not


_outside = _Outside()


def workers() -> int:
    """Number of threads to use: as many as torch uses in this thread, which the launcher sets per replica."""
    import torch

    return _outside.threads or torch.get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Context in which torch operations called by this thread run in this thread alone.

    Other threads, also those started meanwhile, keep their number; `torch.set_num_threads` would change the latter. No
    effect if torch was built without OpenMP.
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
    """Results of `calls`, in order; several run at a time. For arithmetic without gradients and without waiting.

    The threads have this thread's floating-point mode. Raises as `clock.in_parallel` does.
    """
    import torch

    def alone(call: Callable[[], T]) -> T:
        with one_torch_thread(), torch.no_grad():  # both are states of threads
            return call()

    return in_parallel(ThreadBackground(), [functools.partial(alone, call) for call in calls], workers())


def ranges(numel: int) -> list[tuple[int, int]]:
    """[start, stop) of the ranges into which a vector of `numel` elements is split for threads."""
    return [(start, min(start + RANGE, numel)) for start in range(0, numel, RANGE)]


@functools.cache
def _openmp() -> Callable[[int], None] | None:
    """OpenMP's function that sets the number of threads for the calling thread's operations; None without OpenMP."""
    import torch

    torch.get_num_threads()  # at its first call in a thread torch sets that thread's number itself
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
