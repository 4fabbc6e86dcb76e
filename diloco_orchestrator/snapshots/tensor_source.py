"""`TensorSource`: tensors that a file is written of, one at a time. Which tensors those are is `snapshots.layout`'s."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from diloco_orchestrator.snapshots.tensor_file import TensorSpec


class TensorSource(Protocol):
    """Tensors by name, each read when it is needed."""

    def specs(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of all of them."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One of them, on the CPU and contiguous."""
        ...


@dataclass(frozen=True)
class LiveTensors:
    """A `TensorSource` of tensors that are in memory, on any device."""

    tensors: Mapping[str, torch.Tensor]

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach().cpu().contiguous()


@dataclass(frozen=True)
class Overlaid:
    """A `TensorSource` with other values, or other tensors, in place of some of its own."""

    source: TensorSource
    over: Mapping[str, torch.Tensor]

    def specs(self) -> dict[str, TensorSpec]:
        return self.source.specs() | {name: TensorSpec.of(tensor) for name, tensor in self.over.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.over[name] if name in self.over else self.source.read(name)
