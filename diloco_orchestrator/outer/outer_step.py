"""The outer step: the average of contributions, Nesterov momentum, and the next base.

Pure arithmetic on CPU fp32 tensors with the same bits on every machine. Knows no store and no round.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.allreduce.payload import FlatTensors
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import Contribution

ReadShard = Callable[[Contribution, int], bytes]  # (manifest, shard index) -> verified bytes


def nesterov_step(
    parameter: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, outer: OuterConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One step of SGD with (Nesterov) momentum: the new (parameter, momentum). All float32, same shape, CPU.

    m' = mu m + g;  p' = p - lr (g + mu m')   (arXiv 2311.08105 §2; torch.optim.SGD's form, m starts at zero).
    Multiply and add stay apart: `torch.optim.SGD` uses add(alpha=...), whose bits depend on whether the CPU fuses.
    """
    direction = gradient
    if momentum is not None:
        momentum = (momentum * outer.momentum).add_(gradient)
        direction = (momentum * outer.momentum).add_(gradient) if outer.nesterov else momentum
    return parameter - direction * outer.lr, momentum


def step(base: Base, gradients: Mapping[str, torch.Tensor], outer: OuterConfig) -> Base:
    """The base after an outer step with `gradients`: the averaged pseudo-gradients of one fragment, by name."""
    parameters, momenta = dict(base.parameters), dict(base.momenta)
    for name in sorted(gradients):
        parameters[name], momentum = nesterov_step(
            parameters[name], momenta.get(name), gradients[name].to(torch.float32), outer
        )
        if momentum is not None:
            momenta[name] = momentum
    return Base(parameters, momenta)


def average(
    base: Base, fragment: Sequence[str], named: Sequence[tuple[Contribution, float]], read: ReadShard
) -> dict[str, torch.Tensor]:
    """The weighted mean pseudo-gradient of one fragment, by parameter name, in the shapes of `base`.

    `named`: (manifest, weight) of the contributions that a commit averages. Raises `PayloadCorrupt`, or what `read`
    raises.
    """
    gradients = {name: torch.empty_like(base.parameters[name]) for name in fragment}
    mean_into(FlatTensors([gradients[name] for name in fragment]), [_part(m, weight, read) for m, weight in named])
    return gradients


def _part(manifest: Contribution, weight: float, read: ReadShard) -> Part:
    if manifest.payload is None:
        raise PayloadCorrupt(f"replica {manifest.replica_id} is averaged in round {manifest.round} without a payload.")
    return Part(manifest.replica_id, weight, manifest.payload, lambda index: read(manifest, index))


class Nesterov(torch.optim.Optimizer):
    """SGD with Nesterov momentum as a torch optimizer, free of fused multiply-add: same bits on every CPU.

    `state[p]["momentum_buffer"]` holds the momentum, float32 on the CPU, as the parameters must be.
    """

    def __init__(self, params: Sequence[torch.Tensor], outer: OuterConfig) -> None:
        self.outer = outer
        super().__init__(params, {"lr": outer.lr, "momentum": outer.momentum, "nesterov": outer.nesterov})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            momentum = self.state[parameter].get("momentum_buffer")
            if momentum is None and self.outer.momentum:
                momentum = torch.zeros_like(parameter)
            moved, momentum = nesterov_step(parameter, momentum, parameter.grad, self.outer)
            self.install(parameter, moved, momentum)

    @torch.no_grad()
    def install(self, parameter: torch.Tensor, value: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Set a parameter and its momentum to values computed elsewhere."""
        parameter.copy_(value)
        if momentum is not None:
            self.state[parameter]["momentum_buffer"] = momentum

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
