"""The floating-point mode of averages and outer steps: denormal numbers are kept, whatever the user's code has set.

`torch.set_flush_denormal(True)` makes arithmetic on denormal numbers give zero, in the calling thread and in worker
threads that it starts later: bits would differ between machines, and with the number of threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DENORMAL = 1e-40


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Within it denormal numbers are kept. Where they were flushed, torch uses this one thread meanwhile."""
    if not flushes():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)


def flushes() -> bool:
    """Whether this thread's arithmetic gives zero for denormal numbers."""
    return bool((torch.full((1,), _DENORMAL, dtype=torch.float32, device="cpu") * 1.0 == 0.0).item())
