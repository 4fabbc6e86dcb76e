"""Fragments: which parameters each one holds, and when it is synchronised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class SyncSchedule:
    """When fragments are synchronised. Raises `ConfigError` for numbers that do not fit together."""

    sync_every: int  # inner steps between two synchronisations of the same fragment (H)
    fragments: int
    delay: int = 0  # inner steps between publishing a fragment and waiting for its average
    alpha: float = 0.0  # share of the local values that is kept when a fragment is synchronised

    def __post_init__(self) -> None:
        if self.sync_every < 1 or self.sync_every % self.fragments:
            raise ConfigError(
                f"sync_every={self.sync_every} is not a multiple of the {self.fragments} fragments. Choose one."
            )
        if not 0 <= self.delay < self.round_steps:
            raise ConfigError(f"fragment_sync_delay={self.delay} must be in 0..{self.round_steps - 1}.")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"fragment_update_alpha={self.alpha} must be between 0 and 1.")

    @property
    def round_steps(self) -> int:
        """Inner steps of a round, which synchronises one fragment."""
        return self.sync_every // self.fragments

    @property
    def publish_at(self) -> int:
        """The inner step of a round after which its fragment is published."""
        return self.round_steps - self.delay

    @property
    def overlaps(self) -> bool:
        """Whether local parameters differ from the base after a synchronisation: with a delay or an alpha."""
        return self.delay > 0 or self.alpha > 0


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
    """The names split into `fragments` contiguous parts with about equally many elements, none empty."""
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
