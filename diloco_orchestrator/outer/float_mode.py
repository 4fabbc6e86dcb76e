"""The floating-point mode of averages and outer steps: denormal numbers are kept, whatever the user's code has set.

`torch.set_flush_denormal(True)` makes arithmetic on denormal numbers give zero, in the calling thread and in worker
threads that it starts later: bits would differ between machines, and with the number of threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diloco_orchestrator.allreduce.threads import one_torch_thread

_DENORMAL = 1e-40


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Within it denormal numbers are kept, also in threads that start in it. Where they were flushed, torch uses this
    one thread meanwhile."""
    if not flushes():
        yield
        return
    torch.set_flush_denormal(False)
    try:
        with one_torch_thread():
            yield
    finally:
        torch.set_flush_denormal(True)


def flushes() -> bool:
    """Whether this thread's arithmetic gives zero for denormal numbers."""
    return bool((torch.full((1,), _DENORMAL, dtype=torch.float32, device="cpu") * 1.0 == 0.0).item())
