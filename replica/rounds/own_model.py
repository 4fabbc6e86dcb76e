"""`OwnModel`: the model that a replica brings to a run, as the rounds see it before they have a base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import HeldoutSet
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import Untrained


class OwnValues(Protocol):
    """Values of this replica's trainable parameters before the first round, in one process or sharded over ranks."""

    def first_base(self, outer: OuterConfig, fragments: Sequence[Sequence[str]], shard_numel: int) -> Base:
        """A base with these values of the parameters. The arguments are those of `Base.fresh`."""
        ...

    def are_those_of(self, base: Base) -> bool:
        """Whether `base` has these values of the parameters."""
        ...


@dataclass(frozen=True)
class WholeValues:
    """The values of trainable parameters that are whole tensors in this process, by name."""

    parameters: Mapping[str, torch.Tensor]

    def first_base(self, outer: OuterConfig, fragments: Sequence[Sequence[str]], shard_numel: int) -> Base:
        return Base.fresh(self.parameters, outer, fragments, shard_numel)

    def are_those_of(self, base: Base) -> bool:
        return base.holds(self.parameters)


@dataclass(frozen=True)
class OwnModel:
    """The model that a replica brings to the run, and the held-out set on which the replica scores models."""

    parameters: Mapping[str, torch.Tensor]  # those that are trained, any float dtype; they may be sharded
    fragments: Sequence[Sequence[str]]  # their names, each fragment in name order
    files: ModelFiles  # what a snapshot has beside them
    heldout: HeldoutSet | None = None  # None: it scores nothing
    in_ranks: OwnValues | None = None  # values of parameters in several ranks or sharded; None: they are whole here
    scores_strangers: bool = False  # whether it scores the contributions of strangers

    @property
    def values(self) -> OwnValues:
        """The values of the parameters."""
        return self.in_ranks or WholeValues(self.parameters)

    @property
    def untrained(self) -> Untrained:
        """The model's frozen tensors and buffers."""
        assert self.files.untrained is not None, "a replica has the live model"
        return self.files.untrained
