"""`WorkScores`: this replica's scores of strangers' contributions to the open round, before any of them is averaged.

`guard.strangers` judges the scores of all replicas; `Checks` publishes them.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.arithmetic import denormals_kept
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.check_records import WorkScore
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.tip import HeldTip

log = logging.getLogger(__name__)

Measure = Callable[[Base], Sequence[float]]  # a base -> its scores on the items dealt to this replica; higher is better

# A step along one contribution alone, a fifth of it, so that scores change about linearly; Templar's validators take
# .2 as well (`eval_lr_factor`).
_STEP = OuterConfig(lr=0.2, momentum=0.0, nesterov=False)
_FEWEST = 2  # items, so that the change of their scores has a variance


class WorkScores:
    """Scores of strangers' contributions by this replica, each once. Not thread-safe."""

    def __init__(self, attempt: Attempt, tip: HeldTip) -> None:
        self.measure: Measure | None = None  # None: this process has no model to score
        self.longest_s = 0.0  # that the scores of one look took in the open round
        self._attempt = attempt
        self._tip = tip
        self.clear()

    def clear(self) -> None:
        """Forget the scores of the round that has ended."""
        self.longest_s = 0.0
        self._scored = set[tuple[int, str]]()  # replica id, digest of its payload
        self._known: dict[tuple[int, str], list[float]] = {}  # by version of the base, and payload or ""

    @property
    def is_due(self) -> bool:
        """Whether strangers' contributions to the open round are scored before they are averaged."""
        return self._tip.scores_strangers and not self._tip.open.final_evaluation

    def of(self, manifests: Mapping[int, Contribution], read: outer_step.ReadShard) -> tuple[WorkScore, ...]:
        """Scores of the strangers' contributions that were not scored yet, in replica order; reads their payloads.

        `manifests`: the contributions to the open round received so far, by replica id. Empty for a stranger, and where
        fewer than two held-out items were dealt to this replica. Raises the errors of the function that scores.
        """
        attempt, began = self._attempt, self._attempt.clock.now()
        found = []
        for replica_id in sorted(manifests) if self.measure and not attempt.is_invited else ():
            payload = manifests[replica_id].payload
            if replica_id not in attempt.config.invited or payload is None:
                continue
            if (replica_id, payload.digest) in self._scored:
                continue
            self._scored.add((replica_id, payload.digest))
            try:
                base, there = self._values(None, read), self._values(manifests[replica_id], read)
                own = manifests.get(attempt.replica_id)
                beside = self._values(own, read) if own is not None and own.payload is not None else None
            except PayloadCorrupt as error:
                log.warning("round %d: replica %d is not scored: %s", self._tip.open.round, replica_id, error)
                continue
            if len(base) < _FEWEST:
                return ()
            change, squares = _summed([new - old for new, old in zip(there, base, strict=True)])
            more = _summed([new - old for new, old in zip(there, beside, strict=True)]) if beside else (None, None)
            found.append(
                WorkScore(
                    replica_id=replica_id,
                    payload=payload.digest,
                    count=len(base),
                    change=change,
                    squares=squares,
                    beside=more[0],
                    beside_squares=more[1],
                )
            )
        self.longest_s = max(self.longest_s, attempt.clock.now() - began)
        return tuple(found)

    def _values(self, manifest: Contribution | None, read: outer_step.ReadShard) -> list[float]:
        """Scores of the open round's base after a step along a contribution; None: of that base itself."""
        payload = manifest.payload if manifest else None
        name = self._tip.open.version, payload.digest if payload else ""
        if name not in self._known:
            assert self.measure is not None
            base = self._tip.base
            if manifest is not None:
                base = base.copy()
                with denormals_kept():
                    outer_step.average_and_step(base, self._tip.open.fragment, [(manifest, 1)], read, _STEP)
            self._known[name] = list(self.measure(base))
        return self._known[name]


def _summed(changes: Sequence[float]) -> tuple[float | None, float | None]:
    """(sum of `changes`, sum of their squared distances from the mean); None for both if one is not finite."""
    if not all(map(math.isfinite, changes)):
        return None, None
    total = math.fsum(changes)
    mean = total / len(changes)
    squares = math.fsum((each - mean) * (each - mean) for each in changes)
    return (total, squares) if math.isfinite(squares) else (None, None)
