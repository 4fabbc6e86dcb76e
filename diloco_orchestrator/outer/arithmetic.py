"""The arithmetic of one outer step, and a floating-point mode in which its bits are the same on every machine.

Denormal numbers are kept even if the user's code has called `torch.set_flush_denormal(True)`. That flushes them to zero
in the calling thread and in worker threads started later, so bits would depend on machine and number of threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diloco_orchestrator.allreduce.threads import one_torch_thread
from diloco_orchestrator.config import OuterConfig

_DENORMAL = 1e-40


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Context in which denormal numbers are kept, also in its threads. torch uses one thread if they were flushed."""
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
    """Whether this thread's arithmetic flushes denormal numbers to zero."""
    return bool((torch.full((1,), _DENORMAL, dtype=torch.float32, device="cpu") * 1.0 == 0.0).item())


def nesterov_step(
    parameter: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, outer: OuterConfig
) -> None:
    """One step of SGD with Nesterov momentum, in place. `momentum` None: plain SGD. `gradient` is not changed.

    m' = mu m + g; p' = p - lr (g + mu m') (arXiv 2311.08105 §2, in the form of torch.optim.SGD; m starts at zero). All
    tensors have one shape and are float32 on the CPU. Multiply and add are separate calls: `torch.optim.SGD` uses
    add(alpha=...), whose bits depend on whether the CPU fuses them.
    """
    if momentum is None:
        parameter.sub_(gradient * outer.lr)
        return
    momentum.mul_(outer.momentum).add_(gradient)
    direction = (momentum * outer.momentum).add_(gradient) if outer.nesterov else momentum.clone()
    parameter.sub_(direction.mul_(outer.lr))
