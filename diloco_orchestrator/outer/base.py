"""`Base`: the global parameters and outer momenta between two rounds, and their digest.

The outer step is in `outer.outer_step`; storing a base is left to `snapshots`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.config import OuterConfig


@dataclass(frozen=True)
class Base:
    """The global model between two rounds. Tensors are float32 on the CPU and never changed in place."""

    parameters: Mapping[str, torch.Tensor]  # every trainable parameter, in name order
    momenta: Mapping[str, torch.Tensor]  # same names and shapes; empty if the outer optimizer has no momentum

    @classmethod
    def fresh(cls, parameters: Mapping[str, torch.Tensor], outer: OuterConfig) -> "Base":
        """The first base of a run: copies of `parameters` as float32 on the CPU, with zero momenta."""
        own = {
            name: parameters[name].detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
            for name in sorted(parameters)
        }
        momenta = {name: torch.zeros_like(tensor) for name, tensor in own.items()} if outer.momentum else {}
        return cls(own, momenta)

    def numel(self, names: Sequence[str]) -> int:
        """The number of elements of the parameters `names` together."""
        return sum(self.parameters[name].numel() for name in names)

    def momentum(self, name: str) -> torch.Tensor | None:
        """A copy of the outer momentum of a parameter; None if the outer optimizer has none."""
        return self.momenta[name].clone() if name in self.momenta else None

    @torch.no_grad()
    def copy_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy each parameter into the tensor of its name, whose dtype and device may differ."""
        for name, tensor in tensors.items():
            tensor.copy_(self.parameters[name])

    @torch.no_grad()
    def minus(self, local: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """`base - local`, the pseudo-gradient: new tensors, in the order of `local`, which is float32 on the CPU."""
        return [self.parameters[name] - tensor for name, tensor in local.items()]

    def digest(self) -> str:
        """The sha256 over name, shape and little-endian bytes of all parameters in name order, then of all momenta."""
        digest = hashlib.sha256()
        for tensors in (self.parameters, self.momenta):
            for name in sorted(tensors):
                tensor = tensors[name]
                digest.update(json.dumps([name, list(tensor.shape)]).encode() + b"\n")
                digest.update(tensor.contiguous().view(-1).numpy().astype("<f4", copy=False).data)
        return digest.hexdigest()
