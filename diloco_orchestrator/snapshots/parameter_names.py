"""Which parameters of a module are trained, under the names that snapshots and records give them."""

import torch

_COMPILED = "_orig_mod"  # the name under which `torch.compile` holds the module that it wraps


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model in a wrapper of `torch.compile`, which shares its parameters; any other model itself."""
    inner = getattr(model, _COMPILED, model)
    return inner if isinstance(inner, torch.nn.Module) else model


def plain_name(name: str) -> str:
    """A parameter's name without those of `torch.compile`'s wrappers around parts of the model."""
    return name.replace(f"{_COMPILED}.", "")


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters by name, in name order; a tied parameter has one entry."""
    found = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    return {name: found[name] for name in sorted(found)}
