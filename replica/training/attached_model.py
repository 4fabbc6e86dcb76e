"""`AttachedModel`: the user's model as a replica trains it, and checks that it can be, and still is, that model."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.diloco_loop import trainable_parameters
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.snapshots.model_tensors import plain_name, unwrapped

log = logging.getLogger(__name__)


class AttachedModel:
    """A model without the wrapper of `torch.compile`, and its trainable parameters, by name.

    Raises `ModelMismatch` if there is none, and `ConfigError` for one that is not a plain tensor with values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = unwrapped(model)
        self.parameters = trainable_parameters(self.module)
        for name, parameter in self.parameters.items():
            _check_plain(name, parameter)
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}

    def check_optimized(self, optimizers: InnerOptimizers, stateful: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless the optimizers train this model; log parameters that none of them trains.

        `stateful`: the user's objects; optimizers among them train parameters too.
        """
        trained = set(map(id, optimizers.parameters()))
        if not any(id(parameter) in trained for parameter in self.parameters.values()):
            raise ConfigError(
                "the optimizer given to attach holds no parameter of the model: its steps would not train it. Make the "
                "optimizer from the parameters of this model, after the model has its final form."
            )
        trained |= {id(parameter) for each in stateful.values() for parameter in _parameters_in(each)}
        left = [name for name, parameter in self.parameters.items() if id(parameter) not in trained]
        if left:
            log.warning(
                "%d trainable parameters, %r the first, are in no optimizer given to attach. If another one trains "
                "them, attach it too, as in attach(model, [one, other]), so that its state is saved.",
                *(len(left), left[0]),
            )

    def check_unchanged(self) -> None:
        """Raise `ConfigError` if the parameters are others than at `attach`: what is synchronised would not be them."""
        now = {plain_name(name): parameter for name, parameter in self.module.named_parameters()}
        for name, parameter in self.parameters.items():
            if now.get(name) is not parameter:
                raise ConfigError(
                    f"the model's parameter {name!r} was replaced after ctx.attach, which holds the old one. Change "
                    "the model before attach."
                )
            if parameter.dtype != self._dtypes[name]:
                raise ConfigError(
                    f"the model's parameter {name!r} was {_short(self._dtypes[name])} at ctx.attach and is "
                    f"{_short(parameter.dtype)} now: the run's snapshots hold the former. Call model.to(dtype) before "
                    "attach."
                )
        for name, parameter in now.items():
            if parameter.requires_grad and name not in self.parameters:
                raise ConfigError(
                    f"the model's parameter {name!r} is trained since after ctx.attach, and would be synchronised "
                    "nowhere. Set requires_grad before attach; to train it later, give it lr=0 until then."
                )


def _check_plain(name: str, parameter: torch.nn.Parameter) -> None:
    """Raise `ConfigError` unless a parameter is one whole tensor that has values."""
    kind = type(parameter.data)
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"the model's parameter {name!r} has no shape yet (a Lazy module): call the model once before ctx.attach."
        )
    if parameter.is_meta:
        raise ConfigError(
            f"the model's parameter {name!r} is on the meta device and has no values: load the model before ctx.attach."
        )
    if hasattr(parameter, "placements") or "FlatParameter" in (kind.__name__, type(parameter).__name__):
        raise ConfigError(
            f"the model's parameter {name!r} is sharded ({kind.__name__}, as of FSDP): a replica's parameters must be "
            "whole tensors of one process. Leave fully_shard and parallelize_module out; each replica trains on one "
            "device."
        )
    if kind is not torch.Tensor:
        raise ConfigError(
            f"the model's parameter {name!r} is a {kind.__name__}: a replica's trainable parameters must be plain "
            "tensors. Quantised weights can stay frozen beside adapters that are trained."
        )


def _parameters_in(stateful: Any) -> Iterable[torch.Tensor]:
    groups = getattr(stateful, "param_groups", None) or ()
    return (parameter for group in groups for parameter in group["params"])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
