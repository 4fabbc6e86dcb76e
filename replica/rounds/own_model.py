"""`OwnModel`: the model that a replica brings to a run, as the rounds see it before they have a base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import Untrained


@dataclass(frozen=True)
class OwnModel:
    """The model that a replica brings to the run, and the held-out set on which the replica scores models."""

    parameters: Mapping[str, torch.Tensor]  # those that are trained, any float dtype; they may be sharded
    fragments: Sequence[Sequence[str]]  # their names, each fragment in name order
    files: ModelFiles  # what a snapshot has beside them
    heldout: HeldoutSet | None = None  # None: it scores nothing
    scores_strangers: bool = False  # whether it scores the contributions of strangers

    is_whole: ClassVar[bool] = True  # whether the parameters are whole tensors in this process

    def first_base(self, outer: OuterConfig, shard_numel: int) -> Base:
        """A base with the present values of the parameters. The arguments are those of `Base.fresh`."""
        return Base.fresh(self.parameters, outer, self.fragments, shard_numel)

    def has_values_of(self, base: Base) -> bool:
        """Whether the parameters have the values that they have in `base`."""
        return base.holds(self.parameters)

    @property
    def untrained(self) -> Untrained:
        """The model's frozen tensors and buffers."""
        assert self.files.untrained is not None, "a replica has the live model"
        return self.files.untrained
