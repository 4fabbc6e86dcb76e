"""`BaseClaims`: compares the digest of this replica's base with those that others claim, and rebuilds a wrong base.

All bases follow from the commit log, so replicas whose digests differ have an error (`protocol.claims`). A bit that
flipped once in memory is corrected by a rebuild from the bucket; a machine whose arithmetic differs leaves the run.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from diloco_orchestrator.errors import BaseDiverged, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.claims import (
    MAX_WRONG_BASES,
    WITHIN_ROUNDS,
    BaseClaim,
    contradictions,
    is_outvoted,
    wrong_bases,
)
from diloco_orchestrator.protocol.legs import leg_of_base
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.reupload import ReuploadRequests
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.snapshots.rebuild import Tip, rebuild_beside

log = logging.getLogger(__name__)


class BaseClaims:
    """Compares the digest of this replica's base with those in others' manifests, and rebuilds a wrong base."""

    def __init__(self, attempt: Attempt, tip: HeldTip, requests: ReuploadRequests) -> None:
        self.rebuilt_after = tip.position.round  # the commit up to which the base was last rebuilt
        self._verified: str | None = None  # digest of the last base that was compared with a rebuild of it
        self._attempt = attempt
        self._tip = tip
        self._requests = requests
        self._digest: str | None = None  # of the base; None: not hashed since it changed
        self._digests: dict[int, str] = {}  # of earlier bases of this leg, as this replica held them, by their round
        self._asked: tuple[int, set[str]] = (0, set())  # a round, and claims for which its base was rebuilt
        self._not_rebuilt_in = 0  # the last round whose base could not be rebuilt

    # -- the digest ----------------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """Digest of the base; hashed now if the base has changed since it was hashed last."""
        return self._digest if self._digest is not None else self.hash()

    def hash(self) -> str:
        """Hash the base as it is in memory now, and return the digest.

        A manifest's claim is hashed after its pseudo-gradient was formed, not right after the outer step, so that the
        digest shows every bit that was wrong in the base when the pseudo-gradient was formed.
        """
        self._digest = self._tip.base.digest(self._attempt.background)
        return self._digest

    def note(self) -> None:
        """Keep the digest of the base for `is_right`. Call it before an outer step changes the base in place.

        The digest of the changed base is computed when it is next needed, so an interrupted step shows in it.
        """
        self._digests[self._tip.value.base_round], self._digest = self.digest, None

    @property
    def is_rebuilt(self) -> bool:
        """Whether the base was rebuilt from the bucket in the open round."""
        return self.rebuilt_after == self._tip.position.round

    @property
    def is_verified(self) -> bool:
        """Whether the base was compared with a rebuild of it; False if a bit of it has flipped since."""
        return self._verified == self.digest

    # -- claims about closed rounds ------------------------------------------------------------------------------

    def is_right(self, manifest: Contribution) -> bool:
        """Whether a manifest names the digest of the base that its round started from, as this replica rebuilds it.

        The digest in the round's commit counts instead if several replicas contributed on that base or if it cannot be
        rebuilt any more. The round is of this leg (start or resume to stop), or the one whose base this leg began from.
        """
        begin, made_in = self._attempt.begin, None
        if manifest.round > begin.after_round:
            made_in = self._tip.made_before(manifest.round)
            if made_in == self._tip.value.base_round:
                return manifest.base_digest == self.digest
            if made_in in self._digests:
                return manifest.base_digest == self._digests[made_in]
        commit = self._tip.commit_of(manifest.round)
        agreeing = sum(rounds.contributes(answer) for answer in commit.answers)
        if agreeing > 1 and commit.base_digest == manifest.base_digest:
            return True
        leg = begin if made_in is not None else leg_of_base(self._attempt.log.begins()[: begin.leg - 1], manifest.round)
        try:
            assert leg is not None, "this leg began from that round's base"
            before = rebuild_beside(
                self._attempt.log, leg, until=manifest.round - 1, owners=self._attempt.owners
            ).digest
        except (PayloadCorrupt, RecordInvalid) as error:
            log.warning("the base before round %d cannot be rebuilt any more: %s", manifest.round, error)
            return manifest.base_digest == commit.base_digest
        if made_in is not None:
            self._digests[made_in] = before
        return manifest.base_digest == before

    # -- claims about the open round -----------------------------------------------------------------------------

    def contradicted(self, claims: Iterable[BaseClaim]) -> frozenset[str]:
        """Base digests in others' manifests of the open round because of which this base must be rebuilt; empty if
        none.

        `claims`: the digests that the round's manifests name.
        """
        return contradictions(claims, self.digest, self._asked_now())

    def confirms_alone(self, claims: Iterable[BaseClaim]) -> bool:
        """Whether the base must be rebuilt and compared before a snapshot of it: no other replica names its digest.

        True if a snapshot is due, of the last base or of one made of several contributions, and this replica has not
        verified it. A commit of the open round would otherwise confirm a wrong base by the digest that this replica
        computed from its own memory. The rebuild with which an attempt begins is compared with nothing, so it verifies
        nothing. False for the run's first base, whose digest is in the start record. `claims`: the base digests that
        the round's manifests name.
        """
        made_in = self._tip.value.base_round
        if made_in == 0 or self.is_verified or self._not_rebuilt_in == self._round:
            return False
        if {claim.replica_id for claim in claims if claim.digest == self.digest} != {self._attempt.replica_id}:
            return False
        made = self._tip.commit_of(made_in)
        several = sum(answer.averaged for answer in made.answers) > 1
        due = several and made.outer_step % self._attempt.config.snapshot_every == 0
        return due or self._tip.open.final_evaluation

    def heal(self, claims: Collection[str]) -> bool:
        """Rebuild the open round's base from the bucket because others claim other digests; once per digest and round.

        It is rebuilt again if no claim has the new digest (`verify`). Returns whether the base changed; False without a
        rebuild if `claims` has no digest but its own and those for which it was rebuilt in this round. Raises
        `PayloadCorrupt` or `RecordInvalid` if it cannot be rebuilt.
        """
        asked, before = self._asked_now(), self.digest
        if not (new := set(claims) - asked - {before}):
            return False
        elsewhere = ", ".join(sorted(digest[:12] for digest in new))
        log.warning("round %d: base %s here, %s elsewhere; rebuilding", self._round, before[:12], elsewhere)
        changed = self.verify({before, *claims})
        asked |= new
        return changed

    def verify_unclaimed(self) -> bool:
        """Rebuild the open round's base, which no other replica claims. Returns whether its bits changed.

        False, with a warning, if it cannot be rebuilt: a replica that is alone goes on with the base that it has.
        """
        try:
            return self.verify({self.hash()})
        except (PayloadCorrupt, RecordInvalid) as error:
            log.warning("the base after round %d cannot be rebuilt: %s", self._tip.value.base_round, error)
            self._not_rebuilt_in = self._round
            return False

    def verify(self, known: Collection[str]) -> bool:
        """Rebuild the open round's base until a digest is in `known`, the claimed ones, or comes twice; three times at
        most, because a rebuild can go wrong too.

        Returns whether its bits changed. Raises `PayloadCorrupt` or `RecordInvalid` if it cannot be rebuilt.
        """
        tip, before, seen = self._tip, self.digest, set(known)
        for _ in range(3):
            rebuilt = self._requests.rebuild_beside(tip.base, tip.position.round)
            if rebuilt.digest in seen:
                break
            seen.add(rebuilt.digest)
        rebuilt.correct(tip.base)
        tip.borrowed = False
        corrected = replace(tip.value, snapshot_round=rebuilt.snapshot_round)
        self._verified = rebuilt.digest
        if rebuilt.digest == before:
            tip.value, self.rebuilt_after = corrected, tip.position.round
            return False
        log.error("round %d: the base was %s here and is rebuilt as %s", self._round, before[:12], rebuilt.digest[:12])
        self._take(corrected, rebuilt.digest)
        return True

    def rebuild(self, until: int | None = None) -> None:
        """Replace the base by the one after round `until` (default: the newest), rebuilt from the bucket.

        Raises `PayloadCorrupt` or `RecordInvalid` if a payload or record that the rebuild needs cannot be used.
        """
        self._take(self._requests.rebuild(until), None)

    def leave_if_arithmetic_differs(self, commit: Commit, claims: Sequence[BaseClaim], quorum: int) -> None:
        """Raise `BaseDiverged` if this machine's arithmetic differs from others', so that a rebuild does not help.

        The third "wrong_base" within nine rounds shows it, or a rebuild from a snapshot before the disagreement that
        gives the same digest again. `commit`: lists this replica as "wrong_base". `claims`: all base claims of its
        round.
        """
        replica_id = self._attempt.replica_id
        own = next((claim for claim in claims if claim.replica_id == replica_id), None)
        if own is None or not is_outvoted(own, commit, claims, quorum):
            return
        first = max(self._attempt.begin.after_round + 1, commit.round - WITHIN_ROUNDS + 1)
        times = wrong_bases([*map(self._tip.commit_of, range(first, commit.round)), commit], replica_id)
        if times < MAX_WRONG_BASES and self._rebuilt_from_older() != own.digest:
            return
        groups = "; ".join(_group_words(claims, digest) for digest in sorted({claim.digest for claim in claims}))
        raise BaseDiverged(
            f"replica {replica_id} claims base {own.digest[:12]} before round {commit.round}, the commit names "
            f"{str(commit.base_digest)[:12]} ({groups}; {times} of the last {WITHIN_ROUNDS} rounds so). Rebuilt from "
            "the bucket it stays another: the arithmetic of this machine differs. Compare `diloco doctor` here and "
            "there (CPU, torch version, flush-to-zero). Committed rounds are safe; the run goes on without it."
        )

    def _rebuilt_from_older(self) -> str | None:
        """Digest of the open round's base, rebuilt from a snapshot of an older base; None if that is impossible."""
        begin, made_in = self._attempt.begin, self._tip.value.base_round
        below = made_in if made_in != begin.from_round else None
        try:
            until, owners = self._tip.position.round, self._attempt.owners
            return rebuild_beside(self._attempt.log, begin, until=until, below=below, owners=owners).digest
        except (PayloadCorrupt, RecordInvalid) as error:
            log.warning("the base of round %d cannot be rebuilt from an older snapshot: %s", self._round, error)
            return None

    def _take(self, tip: Tip, digest: str | None) -> None:
        """Replace the held base by that of `tip`, just rebuilt. `digest`: its digest; None if it was not hashed."""
        self._tip.hold(tip)
        self._tip.borrowed = False
        self.rebuilt_after = tip.position.round
        self._digest = digest
        self._digests.clear()

    @property
    def _round(self) -> int:
        return self._tip.position.round + 1

    def _asked_now(self) -> set[str]:
        """Base digests of others for which this replica has rebuilt its base in the open round; a mutable set."""
        if self._asked[0] != self._round:
            self._asked = self._round, set()
        return self._asked[1]


def _group_words(claims: Sequence[BaseClaim], digest: str) -> str:
    ids = ", ".join(str(claim.replica_id) for claim in claims if claim.digest == digest)
    return f"{digest[:12]} is claimed by replicas {ids}"
