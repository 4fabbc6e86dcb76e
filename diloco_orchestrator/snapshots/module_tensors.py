"""Tensors of a model that are read one at a time, and those of a module that no base holds."""

from collections.abc import Mapping
from typing import Protocol

import torch

from diloco_orchestrator.snapshots.parameter_names import plain_name
from diloco_orchestrator.snapshots.tensor_file import TensorSpec


class TensorSource(Protocol):
    """Tensors by name, each read when it is needed."""

    def specs(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of all of them."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One of them, on the CPU and contiguous."""
        ...


class RestOfModule:
    """The state dict of a module without the trained parameters and without second names of tied tensors.

    `frozen`: tensors to take in place of the module's, by name.
    """

    def __init__(self, model: torch.nn.Module, trained: set[str], frozen: Mapping[str, torch.Tensor]) -> None:
        state = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
        seen = {state[name].data_ptr() for name in trained if state[name].numel()}
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if name in trained or (tensor.numel() and tensor.data_ptr() in seen):
                continue
            seen.add(tensor.data_ptr())
            self._tensors[name] = frozen.get(name, tensor)

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec.of(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach().cpu().contiguous()
