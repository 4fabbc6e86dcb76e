"""`GuardEvidence`: what a replica shows the guard: held-out scores and drift of a base, and its training items.

Scores and drift are measured on the base at a round's opening, training items are compared as they are consumed.
"""

import torch

from diloco_orchestrator.protocol.records import Consumed, HeldoutSet, Metric, Score
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.consumed_items import ConsumedItems
from diloco_orchestrator.replica.training.drift_meter import DriftMeter
from diloco_orchestrator.replica.training.heldout_scorer import HeldOutScorer


class GuardEvidence:
    """Measures one base after another, each once. `set`: the held-out set, as start.json fixes it; None: nobody scores.

    `items`: None if training items are not compared with the held-out set.
    """

    def __init__(
        self, scorer: HeldOutScorer | None = None, drift: DriftMeter | None = None, items: ConsumedItems | None = None
    ) -> None:
        self.set: HeldoutSet | None = scorer.set if scorer else None
        self.measures_drift = drift is not None
        self.items = items
        self._scorer = scorer
        self._drift = drift

    def is_of(self, participant: Participant) -> bool:
        """Whether there is nothing left to measure of the base that the open round starts from."""
        return self._is_scored(participant) and (self._drift is None or self._drift.is_of(participant))

    def measure(self, model: torch.nn.Module, participant: Participant) -> None:
        """Measure `model`, which holds that base. Parameters, modes and random generators are left unchanged."""
        if self._scorer is not None and not self._is_scored(participant):
            base = participant.model.version, participant.roster
            self._scorer.score(model, participant.attempt.replica_id, *base)
        if self._drift is not None:
            self._drift.measure(model, participant)

    def _is_scored(self, participant: Participant) -> bool:
        return self._scorer is None or self._scorer.has_scored(participant.model.version, participant.roster)

    @property
    def scores(self) -> tuple[Score, ...]:
        """The scores of the last base on the shares that were dealt to this replica. Higher is better."""
        return self._scorer.scores if self._scorer else ()

    def local_scores(self, model: torch.nn.Module) -> tuple[Score, ...]:
        """Scores of the local parameters in `model` on the shares of `scores`; empty without the per-replica guard."""
        return self._scorer.score_local(model) if self._scorer else ()

    def metrics(self) -> dict[str, Metric]:
        """The drift of the last base, by the name under which the guard reads it; empty if it was not measured."""
        kl = self._drift.kl if self._drift else None
        return {} if kl is None else {"kl_to_init": kl}

    def consumed(self) -> Consumed | None:
        """Count and digest of the training items since the last call; None if they are not compared."""
        return self.items.take() if self.items else None
