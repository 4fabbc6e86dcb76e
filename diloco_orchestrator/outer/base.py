"""The base: global parameters and outer momenta, their digest, and the outer step that moves them.

Pure arithmetic on CPU fp32 tensors with the same bits on every machine. Knows no store and no round.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.config import OuterConfig


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


@dataclass(frozen=True)
class Base:
    """The global model between two rounds. Tensors are float32 on the CPU and never changed in place."""

    parameters: Mapping[str, torch.Tensor]  # every trainable parameter, in name order
    momenta: Mapping[str, torch.Tensor]  # same names and shapes; empty when the outer optimizer has no momentum

    @classmethod
    def fresh(cls, parameters: Mapping[str, torch.Tensor], outer: OuterConfig) -> "Base":
        """The first base: copies of `parameters` as float32 on the CPU, momenta zero."""
        own = {
            name: parameters[name].detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
            for name in sorted(parameters)
        }
        momenta = {name: torch.zeros_like(tensor) for name, tensor in own.items()} if outer.momentum else {}
        return cls(own, momenta)

    def stepped(self, gradients: Mapping[str, torch.Tensor], outer: OuterConfig) -> "Base":
        """The base after an outer step with `gradients`, the averaged pseudo-gradients of one fragment."""
        parameters, momenta = dict(self.parameters), dict(self.momenta)
        for name in sorted(gradients):
            parameters[name], momentum = nesterov_step(
                parameters[name], momenta.get(name), gradients[name].to(torch.float32), outer
            )
            if momentum is not None:
                momenta[name] = momentum
        return Base(parameters, momenta)

    def digest(self) -> str:
        """sha256 over name, shape and little-endian fp32 bytes of every parameter in name order, then the momenta."""
        digest = hashlib.sha256()
        for tensors in (self.parameters, self.momenta):
            for name in sorted(tensors):
                tensor = tensors[name]
                digest.update(json.dumps([name, list(tensor.shape)]).encode() + b"\n")
                digest.update(tensor.contiguous().view(-1).numpy().astype("<f4", copy=False).data)
        return digest.hexdigest()


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
