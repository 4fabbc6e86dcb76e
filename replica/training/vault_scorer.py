"""`VaultScorer`: scores this replica's shares of the confirmation set if an alarm of the guard awaits confirmation.

`guard.vault` decides when, and judges the scores.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch

from diloco_orchestrator.errors import ConfigError, ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.guard.round_fold import vault_base
from diloco_orchestrator.guard.shares import content_hash, deal, set_digest, shares_of
from diloco_orchestrator.protocol.records import VaultScore
from diloco_orchestrator.protocol.start_records import VaultSet
from diloco_orchestrator.replica.rounds.tip import OpenRound
from diloco_orchestrator.replica.rounds.work_scores import summed
from diloco_orchestrator.replica.training.heldout_scorer import SIGN, HeldoutFn, ShownBase, undisturbed, values_of
from diloco_orchestrator.snapshots.rebuild import rebuild_scored

log = logging.getLogger(__name__)

_FEWEST = 2  # items of a share, so that it has a variance


class VaultScorer:
    """Scores the base of a round and an earlier one on the same items of the confirmation set.

    That set has further held-out items, by which an alarm of the guard is confirmed. `set`: its record in start.json.
    Raises `ConfigError` for fewer than two items per replica, an item given twice, and one of `heldout_items`.
    """

    def __init__(
        self,
        heldout: HeldoutFn,
        items: Sequence[Any],
        replicas: int,
        metric: Literal["loss", "reward"],
        heldout_items: Sequence[Any],
    ) -> None:
        _check_items(items, heldout_items, replicas)
        self._heldout = heldout
        self._sign = SIGN[metric]
        self._shares = shares_of(items, replicas)
        self.set = VaultSet(shares=tuple(map(len, self._shares)), digest=set_digest(items))
        self._scores: tuple[VaultScore, ...] = ()  # that no contribution has yet
        self._scored: tuple[Any, ...] = ()  # round, who scores, and version of the base

    def is_of(self, opened: OpenRound) -> bool:
        """Whether no alarm of the guard awaits scores, or the open round's base was scored on the set already."""
        return vault_base(opened.guard) is None or self._scored == _of(opened)

    def score(self, shown: ShownBase) -> None:
        """Score the base in `shown` on the confirmation set, and the earlier base that it is compared with.

        Nothing is scored if the earlier base cannot be rebuilt, because payloads were deleted. Raises errors of the
        scoring function, and `ConfigError` if it does not return one number per item.
        """
        opened, attempt = shown.open, shown.attempt
        self._scores, self._scored = (), _of(opened)
        against = vault_base(opened.guard)
        assert against is not None, "`is_of` has said so"
        dealt = deal(len(self._shares), opened.scorers).get(attempt.replica_id, [])
        try:
            earlier = rebuild_scored(attempt.log, against, attempt.owners)
        except (PayloadCorrupt, RecordInvalid, ObjectMissing) as error:
            log.warning("the vault set cannot be scored on the base of round %d: %s", against, error)
            return
        log.info("round %d: an alarm is checked on the vault set, against round %d", opened.round, against)
        with undisturbed(shown.model):
            now = [self._values(shown.model, share) for share in dealt]
            with shown.holding(earlier):
                before = [self._values(shown.model, share) for share in dealt]
        self._scores = tuple(map(_change, dealt, now, before))

    def take(self) -> tuple[VaultScore, ...]:
        """The score changes measured since the last call, one per share; empty if none was measured since."""
        taken, self._scores = self._scores, ()
        return taken

    def _values(self, model: torch.nn.Module, share: int) -> list[float]:
        values = values_of(self._heldout, model, self._shares[share], f"share {share} of the vault set")
        return [self._sign * value for value in values]


def _change(share: int, now: Sequence[float], before: Sequence[float]) -> VaultScore:
    differences = [new - old for new, old in zip(now, before, strict=True)]
    change, squares = summed(differences)
    return VaultScore(share=share, change=change, squares=squares, count=len(differences))


def _of(opened: OpenRound) -> tuple[Any, ...]:
    return opened.round, opened.scorers, opened.version


def _check_items(items: Sequence[Any], heldout_items: Sequence[Any], replicas: int) -> None:
    if len(items) < _FEWEST * replicas:
        raise ConfigError(
            f"{len(items)} vault items cannot be dealt over {replicas} replicas: give at least {_FEWEST} for each, "
            "better as many as held-out items."
        )
    seen = {content_hash(item): f"heldout_items {index}" for index, item in enumerate(heldout_items)}
    for index, item in enumerate(items):
        first = seen.setdefault(content_hash(item), f"vault_items {index}")
        if first != f"vault_items {index}":
            raise ConfigError(
                f"item {index} of vault_items is also {first}: the vault set confirms an alarm only with items that "
                "are scored at no other time. Give every item once, and in one of the two sets."
            )
