"""`GuardEvidence`: a replica's measurements for the guard: a base's held-out scores and KL drift, and training items.

Scores and drift are measured on the base when a round opens; training items are compared as they are consumed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.replica.rounds.interface import ContributionFields
from diloco_orchestrator.replica.rounds.tip import OpenRound
from diloco_orchestrator.replica.training.consumed_items import ConsumedItems
from diloco_orchestrator.replica.training.drift_meter import DriftMeter
from diloco_orchestrator.replica.training.heldout_scorer import HeldOutScorer, ShownBase
from diloco_orchestrator.replica.training.vault_scorer import VaultScorer


class GuardEvidence:
    """A replica's measurements for the guard, once for each base: held-out scores, KL drift, confirmation scores.

    `set`: the held-out set for start.json; None if nothing is scored. `items`: compares training items with held-out
    ones; None if they are not compared.
    """

    def __init__(
        self,
        scorer: HeldOutScorer | None = None,
        drift: DriftMeter | None = None,
        items: ConsumedItems | None = None,
        vault: VaultScorer | None = None,
    ) -> None:
        self.set: HeldoutSet | None = scorer.set if scorer else None
        if self.set is not None and vault is not None:
            self.set = self.set.model_copy(update={"vault": vault.set})
        self.measures_drift = drift is not None
        self.items = items
        self._scorer = scorer
        self._drift = drift
        self._vault = vault

    def is_of(self, opened: OpenRound) -> bool:
        """Whether held-out scores and drift have been measured on the base that the open round starts from."""
        others = [each for each in (self._drift, self._vault) if each is not None]
        return self._is_scored(opened) and all(each.is_of(opened) for each in others)

    def measure(self, shown: ShownBase) -> None:
        """Score the base in `shown` and measure its KL drift. Parameters, modes and generators stay unchanged."""
        if self._scorer is not None and not self._is_scored(shown.open):
            self._scorer.score(shown.model, shown.attempt.replica_id, shown.open.version, shown.open.scorers)
        if self._drift is not None:
            self._drift.measure(shown)
        if self._vault is not None and not self._vault.is_of(shown.open):
            self._vault.score(shown)

    def values(self, shown: ShownBase) -> list[float]:
        """Scores of the base in `shown` on each held-out item dealt to this replica; it needs a held-out set."""
        assert self._scorer is not None
        return self._scorer.values(shown.model, shown.attempt.replica_id, shown.open.roster)

    def values_of(self, model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
        """Scores of `model` on any items, in the form of the held-out ones; it needs a held-out set."""
        assert self._scorer is not None
        return self._scorer.values_of(model, items)

    @property
    def items_scored(self) -> int:
        """The number of held-out items that this replica scored last."""
        return sum(score.count for score in self._scorer.scores) if self._scorer else 0

    def _is_scored(self, opened: OpenRound) -> bool:
        return self._scorer is None or self._scorer.has_scored(opened.version, opened.scorers)

    def added_to(self, fields: ContributionFields, local: torch.nn.Module | None) -> ContributionFields:
        """`fields` plus the measurements of the last base and the items consumed since the last call.

        `local`: the model with the local parameters, scored by the per-replica guard; None in the final evaluation.
        """
        kl = self._drift.kl if self._drift else None
        return replace(
            fields,
            scores=self._scorer.scores if self._scorer else (),
            local_scores=self._scorer.score_local(local) if self._scorer and local is not None else (),
            vault=self._vault.take() if self._vault else (),
            metrics=fields.metrics if kl is None else {**fields.metrics, "kl_to_init": kl},
            consumed=self.items.take() if self.items else None,
        )
