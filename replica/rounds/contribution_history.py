"""`ContributionHistory`: reads the manifests that any attempt of this replica wrote, and the states that they name.

`replica.training.checkpoint` decides from which of them a restarted attempt continues.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, RecordTooNew
from diloco_orchestrator.protocol.legs import leg_of_base
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.base_claims import BaseClaims
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.contributions import ContributionReader, ManifestListing
from diloco_orchestrator.snapshots.stored_state import StoredState

_RECENT_ROUNDS = 3  # in which a manifest of this replica may still appear

log = logging.getLogger(__name__)


class ContributionHistory:
    """Reads the manifests that any attempt of one replica wrote, round by round."""

    def __init__(self, attempt: Attempt, tip: HeldTip, claims: BaseClaims) -> None:
        self._attempt = attempt
        self._tip = tip
        self._claims = claims
        self._reader = ContributionReader(attempt.store)
        # The manifests of closed rounds, as far as they were read; None: there was none. Nobody averages what a
        # predecessor that lives on publishes there later: who continued behind it, with the carry of before, would
        # lose that work.
        self._closed: dict[int, Contribution | None] = {}
        self._joined_at: int | None = None  # the round that was open at the first call
        self._is_alone: bool | None = None  # whether no other attempt of this replica ever ran; None: not asked yet
        self._listing: ManifestListing | None = None

    def of(self, round_: int) -> Contribution | None:
        """This replica's manifest of a round; None if it is missing, unreadable, or not by an attempt of this replica.

        The open round and the two before it cost one GET each. Older rounds are listed, many at once, and cost a GET
        if the listing has a manifest. If no other attempt of this replica ever ran, the result for rounds from before
        it joined is None without a request. Raises `RecordTooNew` for a manifest of a later schema version.
        """
        if round_ in self._closed:
            return self._closed[round_]
        open_round = self._tip.position.round + 1
        if not self._may_exist(round_, open_round):
            return None
        try:
            found = self._reader.of(round_, self._attempt.replica_id)
        except RecordTooNew:
            raise
        except RecordInvalid as error:
            log.error("the manifest of this replica in round %d counts for nothing: %s", round_, error)
            return None
        if found is not None and (why := self._attempt.authors.why_not(found)):
            log.error("the manifest of this replica in round %d counts for nothing: %s", round_, why)
            return None
        if round_ < open_round:
            self._closed[round_] = found
        return found

    def _may_exist(self, round_: int, open_round: int) -> bool:
        if self._joined_at is None:
            self._joined_at = open_round
        if round_ > open_round - _RECENT_ROUNDS:
            return True
        if round_ <= self._joined_at - _RECENT_ROUNDS:
            if self._is_alone is None:  # a higher attempt may have run before this one, too
                claims = AttemptRecords(self._attempt.store).claims(self._attempt.replica_id)
                self._is_alone = claims == {self._attempt.number}
            if self._is_alone:
                return False
        if self._listing is None or round_ > self._listing.newest:
            self._listing = ManifestListing(self._attempt.store, open_round - _RECENT_ROUNDS)
        return self._attempt.replica_id in self._listing.authors(round_)

    def of_open_round(self) -> Contribution | None:
        """This replica's manifest of the open round; None if it is missing or not by an attempt of this replica."""
        return self.of(self._tip.position.round + 1)

    def newest(self) -> Contribution | None:
        """This replica's newest manifest that holds training progress, from before a resume too; None without one."""
        for round_ in range(self._tip.position.round + 1, 0, -1):
            manifest = self.of(round_)
            if manifest is not None and manifest.progress is not None:
                return manifest
        return None

    def newest_of_line(self) -> Contribution | None:
        """The same, but only of rounds that the newest base descends from, in any leg, and of the open one."""
        begins = self._attempt.log.begins()
        rounds = (each for each in range(self._tip.position.round + 1, 0, -1) if leg_of_base(begins, each))
        return next((found for each in rounds if (found := self.of(each)) and found.progress), None)

    def before_repeated(self) -> Iterator[tuple[Contribution, int]]:
        """This replica's manifests of rounds that moved the base, newest first, with the outer steps after each.

        Only if the open round repeats one that was not applied.
        """
        if self._tip.last is None or self._tip.last.applied:
            return
        begins = self._attempt.log.begins()
        for round_ in range(self._tip.position.round, 0, -1):
            if leg_of_base(begins, round_) and (manifest := self.of(round_)) is not None:
                commit = self._tip.commit_of(round_)
                if commit.applied:
                    yield manifest, commit.outer_step

    def newest_delta(self) -> Contribution | None:
        """This replica's latest pseudo-gradient of a round that the newest base descends from, or of the open round.

        Rounds since the last resume are searched, then the round whose base was resumed from. None if there is none.
        """
        begin = self._attempt.begin
        for round_ in (*range(self._tip.position.round + 1, begin.after_round, -1), begin.from_round):
            manifest = self.of(round_) if round_ else None
            if manifest is not None and manifest.kind == "delta" and self._claims.is_right(manifest):
                return manifest
        return None

    def of_base(self) -> Iterator[Contribution]:
        """The manifests of launched replicas that the newest base's last outer step averaged, as far as they can be
        read.
        """
        made = self._tip.made_before(self._tip.position.round + 1)
        entry = self._attempt.log.commit(made) if made else None
        for answer in entry.commit.answers if entry else ():
            if answer.averaged and answer.replica_id not in self._attempt.config.invited:
                with suppress(ObjectMissing, RecordInvalid):
                    yield self._reader.named(made, answer)

    def read_state(self, manifest: Contribution) -> StoredState:
        """The saved state that a manifest names, in all ranks. Raises `PayloadCorrupt` if it is gone or changed."""
        attempt = self._attempt
        return StoredState.read_from(attempt.owners, attempt.store, manifest, attempt.background)
