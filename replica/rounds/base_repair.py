"""`BaseRepair`: rebuilds the open round's base where digests or false averages contradict it.

Work that was trained from a wrong base is dropped then. `base_claims` rebuilds the base and compares digests,
`false_averages` finds averages that the payloads do not give.
"""

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress

from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol.claims import BaseClaim, shared_claim
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.base_claims import BaseClaims
from diloco_orchestrator.replica.rounds.contribute import Contributor
from diloco_orchestrator.replica.rounds.false_averages import FalseAverages
from diloco_orchestrator.replica.rounds.tip import HeldTip

log = logging.getLogger(__name__)


class BaseRepair:
    """Recomputes a replica's base (the parameters a round starts from) where the digests of others' differ from its
    own.

    It also drops work that was trained from a wrong base.
    """

    def __init__(
        self, attempt: Attempt, tip: HeldTip, claims: BaseClaims, averages: FalseAverages, contributor: Contributor
    ) -> None:
        self.changed = False  # whether the open round's base was rebuilt as another than this replica had
        self._attempt = attempt
        self._tip = tip
        self._claims = claims
        self._averages = averages
        self._contributor = contributor

    def heal(self, claimed: Collection[str]) -> None:
        """Rebuild the base if base digests in `claimed` contradict it.

        Raises `PayloadCorrupt` or `RecordInvalid` if it cannot be rebuilt.
        """
        self._note(self._claims.heal(claimed))

    def search_if_contradicted(self, claimed: Collection[str | None]) -> None:
        """Look for false averages if the base was just rebuilt and its digest is not in `claimed`, others' digests."""
        if self._claims.is_rebuilt and self._claims.digest not in claimed and self._tip.dealing is not None:
            self._averages.search()

    def before_decision(self, claims: Sequence[BaseClaim], *, alone: bool) -> None:
        """Rebuild the base before the round ends, because of `claims`, the base digests in its manifests.

        `alone`: nobody else names this base, and a snapshot of it is due. Does nothing if the payloads are gone.
        """
        with suppress(PayloadGone):  # others are rounds ahead: the commit of this round exists, and is applied
            if alone:
                self._note(self._claims.verify_unclaimed())
            else:
                self.heal({claim.digest for claim in claims})
                self.search_if_contradicted({shared_claim(claims, self._claims.digest, own_is_rebuilt=True)})

    def if_disproved(self) -> bool:
        """Rebuild the open round's base if a false average may be in it. Returns whether that changed its bits."""
        changed = self._averages.take_rebuild() and self._claims.verify_unclaimed()
        self._note(changed)
        return changed

    def skip_to_newer_snapshot(self, commit: Commit) -> None:
        """Replace the base by one rebuilt from a snapshot after `commit`: that is far ahead, or payloads are gone.

        Raises `PayloadCorrupt` if there is no such snapshot: then the payload was deleted by hand.
        """
        self._claims.rebuild()
        if self._tip.position.round < commit.round:
            raise PayloadCorrupt(
                f"a payload of round {commit.round} in {self._attempt.store.url} is gone, and no later snapshot "
                "is complete: it was deleted by hand. Resume the run from an earlier snapshot."
            )
        log.info(
            "round %d: its payloads were deleted by retention, or a snapshot is far ahead; skipped to round %d",
            commit.round,
            self._tip.position.round,
        )
        self._contributor.recover()

    def _note(self, changed: bool) -> None:
        if changed:
            self.changed = True
            self._contributor.recover_carry()
