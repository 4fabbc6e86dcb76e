"""`holding`: lets a model hold another base for a while, to measure it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diloco_orchestrator.outer.adapter_products import merged
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import plain_name, trainable


@contextmanager
def holding(model: torch.nn.Module, base: Base, files: ModelFiles) -> Iterator[None]:
    """Context in which `model` holds `base`; afterwards its parameters hold what they held.

    `files`: of this model. The frozen weights of adapters that are averaged exactly get the base's residuals.
    """
    parameters = {name: parameter.data for name, parameter in trainable(model).items()}
    adapted = {pair.weight: pair for pair in files.adapters}
    named = ((plain_name(name), parameter.data) for name, parameter in model.named_parameters())
    weights = {name: weight for name, weight in named if name in adapted}
    held = {name: tensor.clone() for name, tensor in (parameters | weights).items()}
    base.copy_into(parameters)
    rest = files.rest()
    for name, weight in weights.items():
        weight.copy_(merged(rest.read(name), base.parameters[adapted[name].residual], adapted[name].scaling))
    try:
        yield
    finally:
        for name, tensor in (parameters | weights).items():
            tensor.copy_(held[name])
