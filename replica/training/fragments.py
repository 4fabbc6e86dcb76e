"""Fragments: which parameters each has, and the interface to its values (`FragmentView`)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.errors import ConfigError, unknown_name
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.snapshots.pieces_of_ranks import TensorInRanks
from diloco_orchestrator.snapshots.stored_state import StoredTensor


class FragmentView(Protocol):
    """Access to the values of one fragment of a model in training: forms pseudo-gradients, and sets values to a base's.

    The fragment's flat vector has its parameters in name order, each of them flat; a base is of the whole model. All
    calls come from the training thread, except `stage` and the function returned by `handed_over`, which the background
    calls while the fragment's round is in flight, when nothing else is called.
    """

    def pseudo_gradient(self, base: Base) -> Vector:
        """The pseudo-gradient `base - local`, with the model's values at the time when it is read."""
        ...

    def handed_over(self, base: Base) -> Callable[[], Vector]:
        """Copy the fragment's values now. The returned function forms `base - local` from them, in any thread, once."""
        ...

    def stage(self, base: Base) -> None:
        """Prepare the next `install` of `base`, as far as possible without the local values; may do nothing."""
        ...

    def install(self, base: Base, keep: float = 0.0) -> None:
        """Set the fragment's values to `(1 - keep) * base + keep * local`. Safe to repeat with `keep=0`.

        Raises `ValueError` for a `keep` that this view does not support.
        """
        ...

    def holding(self, base: Base) -> AbstractContextManager[None]:
        """Context in which the fragment has the values of a base, perhaps an earlier one; its own are restored after
        it.

        Pseudo-gradients are not affected.
        """
        ...

    def values(self) -> Mapping[str, torch.Tensor | TensorInRanks]:
        """The fragment's values as they are saved, by parameter name, in their own dtype and on their device.

        They may share the model's memory.
        """
        ...

    def restore(self, values: Mapping[str, StoredTensor]) -> None:
        """Set the fragment's values to a result of `values` that an earlier attempt has saved."""
        ...


def split_fragments(
    parameters: Mapping[str, torch.Tensor], fragments: int | Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Parameter names of each fragment, in name order. `fragments`: the number of fragments, or the names of each.

    `parameters` are in name order. Raises `ConfigError` unless every parameter is in exactly one fragment.
    """
    if isinstance(fragments, int):
        if not 1 <= fragments <= len(parameters):
            raise ConfigError(f"fragments={fragments}: choose 1..{len(parameters)}, the number of parameters.")
        return _contiguous(parameters, fragments)
    given = [name for part in fragments for name in part]
    for name in given:
        if name not in parameters:
            raise ConfigError(unknown_name("trainable parameter", name, parameters))
    if sorted(given) != sorted(parameters):
        raise ConfigError("fragments must hold every trainable parameter exactly once.")
    return [tuple(sorted(part)) for part in fragments]


def _contiguous(parameters: Mapping[str, torch.Tensor], fragments: int) -> list[tuple[str, ...]]:
    """Parameter names split into `fragments` contiguous parts with about equally many elements, none empty."""
    total, seen = sum(p.numel() for p in parameters.values()), 0
    parts: list[list[str]] = [[]]
    for index, (name, parameter) in enumerate(parameters.items()):
        left = len(parameters) - index
        missing = fragments - len(parts)
        if parts[-1] and missing and (seen * fragments >= total * len(parts) or left == missing):
            parts.append([])
        parts[-1].append(name)
        seen += parameter.numel()
    return [tuple(part) for part in parts]
