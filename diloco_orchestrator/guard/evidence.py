"""`Evidence`: the measurements of one model that a sequential rule judges. Measuring them is left to `guard.fold`."""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from diloco_orchestrator.guard.vault import VaultChange


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The measurements of one model. Metrics are given so that higher is better; any unit, the same in all rounds."""

    round: int  # whose commit holds the verdict; rounds only go forward
    model: int | None = None  # round after which the model was measured; None = the round before `round`
    heldout: float | None = None  # held-out score or paired gain, item-weighted; None if too few items were scored
    in_loop: float | None = None  # training metric of the same model; None if nobody observed one
    items: int = 0  # held-out items that were scored
    total_items: int = 0  # in the whole held-out set; 0 = unknown, every round counts alike
    kl_to_init: float | None = None  # nats per token, token mean; None if it was not measured
    contaminated: int = 0  # held-out items that were found in the training data
    nonfinite: bool = False  # most items, or the training metric, were not finite
    suspect: int | None = None  # replica that the per-replica guard wants left out of the average
    why_suspect: str = ""
    why_not: str = ""  # the reason of a round without `heldout`
    # By share of the held-out set: its score minus its first one. Empty = the shares are not known one by one.
    gains: Mapping[str, float] = field(default_factory=dict)
    vault: VaultChange | None = None  # answers an alarm of the round before; None if too few vault items were scored
    rebuildable: bool = True  # whether the measured model can be rebuilt later, to score the vault set on it
    closing: bool = False  # whether no round follows

    @property
    def scored_round(self) -> int:
        """The round after which the measured model existed; 0 is the run's first model."""
        return self.round - 1 if self.model is None else self.model

    @property
    def is_nonfinite(self) -> bool:
        """Whether the round counts as one without finite metrics."""
        metrics = (self.heldout, self.in_loop, self.kl_to_init)
        return self.nonfinite or any(metric is not None and not math.isfinite(metric) for metric in metrics)

    def plain(self) -> list[Any]:
        """The fields as JSON that equals itself: a number that is not finite becomes a word."""
        return [_plain(value) for value in astuple(self)]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
