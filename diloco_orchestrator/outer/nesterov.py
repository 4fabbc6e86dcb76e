"""One step of the outer optimizer on tensors, with the same bits on every machine."""

import torch

from diloco_orchestrator.config import OuterConfig


def nesterov_step(
    parameter: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, outer: OuterConfig
) -> None:
    """One step of SGD with Nesterov momentum, in place. `momentum` None: plain SGD. `gradient` is left alone.

    m' = mu m + g;  p' = p - lr (g + mu m')   (arXiv 2311.08105 §2, in the form of torch.optim.SGD; m starts at zero).
    All tensors have one shape and are float32 on the CPU. Multiply and add are separate calls: `torch.optim.SGD` uses
    add(alpha=...), whose bits depend on whether the CPU fuses them.
    """
    if momentum is None:
        parameter.sub_(gradient * outer.lr)
        return
    momentum.mul_(outer.momentum).add_(gradient)
    direction = (momentum * outer.momentum).add_(gradient) if outer.nesterov else momentum.clone()
    parameter.sub_(direction.mul_(outer.lr))
