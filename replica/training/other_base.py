"""`holding`: lets a model hold another base for a while, to measure it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.snapshots.layout import trainable


@contextmanager
def holding(model: torch.nn.Module, base: Base) -> Iterator[None]:
    """Context in which `model` holds `base`; afterwards its parameters hold what they held."""
    parameters = {name: parameter.data for name, parameter in trainable(model).items()}
    held = {name: tensor.clone() for name, tensor in parameters.items()}
    base.copy_into(parameters)
    try:
        yield
    finally:
        for name, tensor in parameters.items():
            tensor.copy_(held[name])
