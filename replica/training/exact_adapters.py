"""`ExactAdapters`: the LoRA adapters of a model whose products are averaged exactly, with residuals in frozen weights.

Adapters are found by parameter names, so that PEFT need not be installed: PEFT's `<layer>.lora_A.<adapter>.weight` with
`<layer>.base_layer.weight`, and `<layer>.lora_A` with `<layer>.weight` as in loralib. `outer.adapter_products` has the
arithmetic.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer.adapter_products import merged
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.start_records import AdapterPair
from diloco_orchestrator.replica.training.fragments import FragmentView
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import plain_name

_FACTOR = re.compile(r"(?P<layer>.+)\.lora_A(?:\.(?P<adapter>[^.]+)\.weight)?")
_INSTEAD = 'or train the run with adapters="mean"'


class ExactAdapters:
    """The trained LoRA adapters of a model whose products are averaged exactly.

    `parameters`: the model's trainable parameters by name; those of no adapter are averaged as usual. Raises
    `ConfigError` for an adapter that adds other than B A to a weight.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._weights: dict[str, torch.Tensor] = {}  # the adapted frozen weights, by name
        modules = {plain_name(name): module for name, module in model.named_modules()}
        _check_kinds(parameters)
        found = filter(None, map(_FACTOR.fullmatch, parameters))
        self.pairs = tuple(self._pair(match, modules, parameters) for match in found)
        if not self.pairs:
            raise ConfigError(
                'adapters="exact" averages LoRA adapters, and the model has none whose lora_A and lora_B are both '
                f"trained. Put them on the model before ctx.attach, {_INSTEAD}."
            )
        _check_untied(model, self._weights)
        self._frozen = {name: weight.detach().to("cpu", copy=True) for name, weight in self._weights.items()}

    def _pair(
        self, match: re.Match[str], modules: Mapping[str, torch.nn.Module], parameters: Mapping[str, torch.Tensor]
    ) -> AdapterPair:
        name_a, layer_name, adapter = match[0], match["layer"], match["adapter"]
        name_b = name_a.replace(".lora_A", ".lora_B")
        name = f"the adapter {name_a!r}"
        layer: Any = modules.get(layer_name)
        base: Any = getattr(layer, "base_layer", layer)
        weight, scaling = getattr(base, "weight", None), getattr(layer, "scaling", None)
        if isinstance(scaling, Mapping):
            scaling = scaling.get(adapter)
        if name_b not in parameters:
            raise ConfigError(f"{name} is trained and {name_b!r} is not: train both, or freeze A, {_INSTEAD}.")
        if weight is None or not isinstance(scaling, int | float):
            raise ConfigError(
                f"{name} is on a layer without a weight or a `scaling`, so that it is not known what it adds. Use "
                f"PEFT's LoRA, {_INSTEAD}."
            )
        if (variant := getattr(layer, "lora_variant", {}).get(adapter)) is not None:  # of PEFT, such as aLoRA's
            raise ConfigError(
                f"{name} is a variant of LoRA ({type(variant).__name__}), which does not add the product B A to the "
                f"weight as it is. Use PEFT's plain LoRA, {_INSTEAD}."
            )
        a, b = parameters[name_a], parameters[name_b]
        weight_name = f"{layer_name}.weight" if base is layer else f"{layer_name}.base_layer.weight"
        if weight.requires_grad or not weight.is_floating_point() or type(weight.data) is not torch.Tensor:
            raise ConfigError(
                f"{name} is on {weight_name!r}, which is trained itself or quantised: the residual of the mean cannot "
                f"be added to it. Load the model in bf16 or fp32 and freeze it, {_INSTEAD}."
            )
        matrices = a.ndim == b.ndim == 2 and weight.shape == (b.shape[0], a.shape[1])
        if not matrices or getattr(layer, "fan_in_fan_out", False):
            raise ConfigError(
                f"{name} adapts a weight of shape {list(weight.shape)} by B {list(b.shape)} times A {list(a.shape)}: "
                f"only linear layers with a weight of (out, in) are averaged exactly. Leave this one out, {_INSTEAD}."
            )
        if weight_name in self._weights:
            raise ConfigError(
                f"{name} is the second trained adapter of {weight_name!r}: one residual cannot follow both. Train one "
                f"adapter at a time, {_INSTEAD}."
            )
        self._weights[weight_name] = weight
        residual = f"{layer_name}.lora_residual" + (f".{adapter}" if adapter else "")
        return AdapterPair(a=name_a, b=name_b, weight=weight_name, residual=residual, scaling=float(scaling))

    def model_files(self, tokenizer: Any) -> ModelFiles:
        """The model's parts of a snapshot, in which the residuals are added to the frozen weights (see `install`)."""
        return ModelFiles.of(self._model, tokenizer, self.pairs, self._frozen)

    @torch.no_grad()
    def install(self, base: Base) -> None:
        """Set the frozen weights that have adapters to their first values plus the residuals of a base.

        A residual is the part of an averaged product B A that the adapter's factors cannot hold.
        """
        for pair in self.pairs:
            residual = base.parameters[pair.residual]
            self._weights[pair.weight].copy_(merged(self._frozen[pair.weight], residual, pair.scaling))

    @contextmanager
    def holding(self, base: Base) -> Iterator[None]:
        """Context in which the weights are as after `install` of a base; what they were before is restored after it."""
        held = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.install(base)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight.copy_(held[name])


class ExactView:
    """Access to the only fragment of a model with exactly averaged LoRA adapters; also sets the frozen weights."""

    def __init__(self, trained: FragmentView, adapters: ExactAdapters) -> None:
        self._trained = trained
        self._adapters = adapters
        self.pseudo_gradient, self.handed_over, self.stage = trained.pseudo_gradient, trained.handed_over, trained.stage
        self.values, self.restore = trained.values, trained.restore

    def install(self, base: Base, keep: float = 0.0) -> None:
        self._trained.install(base, keep)
        self._adapters.install(base)

    @contextmanager
    def holding(self, base: Base) -> Iterator[None]:
        with self._trained.holding(base), self._adapters.holding(base):
            yield


def _check_kinds(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise `ConfigError` for kinds of adapters that add something other than their product to a weight."""
    for marker, what in (
        ("lora_magnitude_vector", "DoRA, which divides by the norm of the sum"),
        ("lora_embedding_", "an adapter of an embedding, whose product is transposed"),
        ("lora_mask", "a masked adapter"),
    ):
        for name in parameters:
            if marker in name:
                raise ConfigError(f"{name!r} belongs to {what}: it is not averaged exactly. Leave it out, {_INSTEAD}.")


def _check_untied(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise `ConfigError` for an adapted weight that other layers share: they would get its residual too."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    for name, weight in weights.items():
        others = [each for each in names[id(weight)] if each != name]
        if others:
            raise ConfigError(
                f"the adapted weight {name!r} is tied to {others[0]!r}, which would get its residual too. Leave that "
                f"layer out of target_modules, untie it (tie_word_embeddings=False), {_INSTEAD}."
            )
