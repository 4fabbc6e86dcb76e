"""`GlobalModel`: the base that this replica holds, and its position in the commit log.

Computes bases from commits. When a round ends, and what this replica contributes, is decided elsewhere.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from pydantic import JsonValue

from diloco_orchestrator.allreduce.agreement import summary
from diloco_orchestrator.allreduce.mean import LeftOut
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.adapter_products import with_residuals
from diloco_orchestrator.outer.arithmetic import denormals_kept
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.golden_arithmetic import check_arithmetic
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.claims import BaseClaim, contradictions
from diloco_orchestrator.protocol.records import AdapterPair, Commit, Contribution, Disagreeing, HeldoutSet
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.first_base import agree_on_first_base, check_start
from diloco_orchestrator.replica.rounds.want import PayloadRequests
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.rebuild import FirstBase, Tip, rebuild_beside

log = logging.getLogger(__name__)


class GlobalModel:
    """The newest base that this replica has followed. `fragments`: parameter names of each fragment, in name order."""

    def __init__(self, attempt: Attempt, fragments: Sequence[tuple[str, ...]], first: FirstBase | None = None) -> None:
        start = attempt.log.start()
        self.attempt = attempt
        self.heldout = start.record.heldout if start else None  # the run's held-out set; None: nobody scores
        self.version = 0  # changes with every change of the base
        self.keep_average = False  # whether `step` returns the average
        self.disagreeing: tuple[Disagreeing, ...] = ()  # whom the last round's step left out; empty if it was none
        self._fragments = start.record.synced_fragments if start else fragments
        self._adapters = start.record.adapters if start else ()
        self._asked: set[str] = set()  # claims for which the base of the open round was rebuilt
        self._digests: dict[int, str] = {}  # of earlier bases of this leg, as this replica held them, by their round
        self.requests = PayloadRequests(attempt)
        self._tip: Tip = self.requests.rebuild(first=first)
        self.rebuilt_after = self._tip.position.round  # the commit up to which the base was last rebuilt
        self._digest: str | None = None  # of the base; None: not hashed since it changed

    @classmethod
    def join(
        cls,
        attempt: Attempt,
        parameters: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        files: ModelFiles,
        heldout: HeldoutSet | None = None,
    ) -> "GlobalModel":
        """Agree on the first base with the other replicas, then rebuild the newest base from the bucket.

        `parameters`: this replica's trainable parameters, any float dtype. Raises `ModelMismatch` if they, the
        fragments or the held-out set are not the run's, and `BaseDiverged` if the arithmetic of this machine differs
        from all others'.
        """
        check_arithmetic()
        parameters, fragments = _with_residuals(attempt, parameters, fragments, files.adapters)
        found, first = agree_on_first_base(attempt, parameters, fragments, files, heldout)
        own = tuple(tuple(names) for names in fragments)
        check_start(found.record, parameters, own, heldout, files, attempt)
        model = cls(attempt, own, first)
        if not model.position.round and not model.base.holds(parameters):
            log.warning("this replica's first values differ from the run's first base; it takes those of snapshot 0")
        return model

    # -- the base ------------------------------------------------------------------------------------------------

    @property
    def base(self) -> Base:
        return self._tip.base

    @property
    def digest(self) -> str:
        """Digest of the base, as it was last hashed."""
        return self._digest if self._digest is not None else self.hash()

    def hash(self) -> str:
        """Hash the base as it is in memory now, and return the digest.

        A claim is hashed after its pseudo-gradient was formed, never noted after the step: any bit that was wrong in
        the base when the pseudo-gradient was formed is in the digest.
        """
        self._digest = self.base.digest(self.attempt.background)
        return self._digest

    @property
    def is_rebuilt(self) -> bool:
        """Whether the base was rebuilt in the open round."""
        return self.rebuilt_after == self.position.round

    @property
    def tip(self) -> Tip:
        """Base and position together, for writing snapshots."""
        return self._tip

    @property
    def position(self) -> rounds.Position:
        return self._tip.position

    @property
    def last(self) -> CommitEntry | None:
        """The last commit of this leg that was followed; None before the first."""
        return self._tip.last

    # -- the open round ------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Number of the open round."""
        return self._tip.position.round + 1

    @property
    def roster(self) -> tuple[int, ...]:
        """The replicas that the open round waits for."""
        return self.last.commit.roster if self.last else tuple(range(self.attempt.config.replicas))

    @property
    def fragment(self) -> int:
        """Index of the fragment that the open round synchronises."""
        return self.position.outer_step % len(self._fragments)

    @property
    def fragment_names(self) -> tuple[str, ...]:
        """Names of the parameters that the open round synchronises, in name order."""
        return self._fragments[self.fragment]

    @property
    def fragments(self) -> int:
        return len(self._fragments)

    @property
    def closing(self) -> bool:
        """Whether every outer step is taken, so that the open round only holds scores."""
        return rounds.is_closing(self.position, self.attempt.outer_steps)

    @property
    def stopped(self) -> bool:
        """Whether the leg is over: there is no open round."""
        return self.position.stop != "none"

    # -- closed rounds of this leg -------------------------------------------------------------------------------

    @property
    def closed_rounds(self) -> range:
        """Rounds of this leg that were followed, newest first."""
        return range(self.round - 1, self.attempt.begin.after_round, -1)

    def commit_of(self, round_: int) -> Commit:
        """The commit of a closed round. Raises `AssertionError` for an open round."""
        entry = self.attempt.log.commit(round_)
        assert entry is not None, f"round {round_} is closed"
        return entry.commit

    def is_right(self, manifest: Contribution) -> bool:
        """Whether a manifest claims the base that its round of this leg started from, as this replica rebuilds it.

        Where several replicas contributed on that claim, or the base cannot be rebuilt any more, the commit's claim is
        taken for it. Rounds of earlier legs are not judged: True.
        """
        if manifest.round <= self.attempt.begin.after_round:
            return True
        if self._base_before(manifest.round) not in (self._tip.base_round, *self._digests):
            commit = self.commit_of(manifest.round)
            agreeing = sum(rounds.contributes(answer) for answer in commit.answers)
            if agreeing > 1 and commit.base_digest == manifest.base_digest:
                return True
        before = self.digest_before(manifest.round)
        return manifest.base_digest == (before or self.commit_of(manifest.round).base_digest)

    def digest_before(self, round_: int) -> str | None:
        """Digest of the base that a round of this leg started from, rebuilt if need be; None if it cannot be."""
        made_in = self._base_before(round_)
        if made_in == self._tip.base_round:
            return self.digest
        if made_in not in self._digests:
            try:
                self._digests[made_in] = rebuild_beside(self.attempt.log, self.attempt.begin, until=round_ - 1).digest
            except (PayloadCorrupt, RecordInvalid) as error:
                log.warning("the base before round %d cannot be rebuilt any more: %s", round_, error)
                return None
        return self._digests[made_in]

    def _base_before(self, round_: int) -> int:
        """The round that made the base from which a round of this leg started."""
        begin = self.attempt.begin
        earlier = range(round_ - 1, begin.after_round, -1)
        return next((each for each in earlier if self.commit_of(each).applied), begin.from_round)

    # -- moving --------------------------------------------------------------------------------------------------

    def step(
        self, entry: CommitEntry, contributions: Sequence[tuple[Contribution, int]], read_shard: outer_step.ReadShard
    ) -> Mapping[str, torch.Tensor]:
        """Take the outer step that a commit fixes. Returns the average, by parameter, if it is kept.

        `contributions`: (manifest, weight) each. `read_shard`: (manifest, shard index) -> verified bytes. Raises
        `PayloadCorrupt` for a contribution without a usable payload, `PayloadGone` if a payload was deleted.
        """
        # Noted before the step in place: if that is interrupted, the base is hashed anew, and rebuilt.
        self._digests[self._tip.base_round], self._digest = self.digest, None
        left_out: list[LeftOut] = []
        average = _averaged_and_stepped(self, self._adapters, contributions, read_shard, left_out)
        self.disagreeing = summary(left_out, entry.commit.round)
        self._tip = Tip(self.base, entry.commit.round, self._tip.snapshot_round, entry.position, entry)
        self._asked.clear()
        self.version += 1
        return average

    def skip(self, entry: CommitEntry) -> None:
        """Follow a commit that is not applied: the base stays."""
        self._tip = replace(self._tip, position=entry.position, last=entry)
        self.disagreeing = ()
        self._asked.clear()

    def rebuild(self, until: int | None = None) -> None:
        """Take the newest base of the leg from the bucket, or its base after round `until`. Errors as of `rebuild`."""
        self._take(self.requests.rebuild(until))

    def contradicted(self, claims: Iterable[BaseClaim]) -> frozenset[str]:
        """The claims of the open round for which the base has to be rebuilt; empty if it need not be."""
        return contradictions(claims, self.digest, self._asked)

    def heal(self, claims: Collection[str]) -> bool:
        """Rebuild the base of the open round from the bucket, because others claim another one; at most once per claim.

        A digest that nobody claims is rebuilt once more: the rebuild itself may have gone wrong. Returns whether the
        base changed. Raises `PayloadCorrupt` or `RecordInvalid` if it cannot be rebuilt.
        """
        if not (new := set(claims) - self._asked - {self.digest}):
            return False
        before = self.digest
        log.warning("round %d: base %s here, %s elsewhere; rebuilding", self.round, before[:12], _short(new))
        changed = self.verify_base({before, *claims})
        self._asked |= new
        return changed

    def verify_base(self, known: Collection[str]) -> bool:
        """Rebuild the base at this position, once more if its digest is not in `known`. Returns whether it changed."""
        before = self.digest
        for _ in range(2):
            rebuilt = self.requests.rebuild_beside(self.base, self.position.round)
            if (digest := rebuilt.digest) in known:
                break
        rebuilt.correct(self.base)
        self._tip = replace(self._tip, snapshot_round=rebuilt.snapshot_round)
        if digest == before:
            self.rebuilt_after = self.position.round
            return False
        log.error("round %d: the base was %s here and is rebuilt as %s", self.round, before[:12], digest[:12])
        self._take(self._tip)
        self._digest = digest
        return True

    def rebuilt_from_older(self) -> str | None:
        """Digest of the open round's base, rebuilt from a snapshot older than that base; None if it cannot be."""
        begin, made_in = self.attempt.begin, self._tip.base_round
        below = made_in if made_in != begin.from_round else None
        try:
            return rebuild_beside(self.attempt.log, begin, until=self.position.round, below=below).digest
        except (PayloadCorrupt, RecordInvalid) as error:
            log.warning("the base of round %d cannot be rebuilt from an older snapshot: %s", self.round, error)
            return None

    def _take(self, tip: Tip) -> None:
        """Hold a base that was rebuilt just now."""
        self._tip = tip
        self.rebuilt_after = tip.position.round
        self._digest, self.disagreeing = None, ()
        self._digests.clear()
        self.version += 1


def _averaged_and_stepped(
    model: GlobalModel,
    adapters: Sequence[AdapterPair],
    contributions: Sequence[tuple[Contribution, int]],
    read_shard: outer_step.ReadShard,
    left_out: list[LeftOut],
) -> Mapping[str, torch.Tensor]:
    """Step the base of a model in place as its run is configured. Arguments and result as of `average_and_step`."""
    config = model.attempt.config
    with denormals_kept():
        return outer_step.average_and_step(
            *(model.base, model.fragment, contributions, read_shard, config.outer),
            aggregate=config.aggregate,
            keep_average=model.keep_average,
            adapters=adapters,
            left_out=left_out,
        )


def _with_residuals(
    attempt: Attempt,
    parameters: Mapping[str, torch.Tensor],
    fragments: Sequence[Sequence[str]],
    pairs: Sequence[AdapterPair],
) -> tuple[Mapping[str, torch.Tensor], Sequence[Sequence[str]]]:
    """Parameters and fragments of the first base. Raises `ConfigError` if the run averages adapters that are absent."""
    if attempt.config.adapters == "exact" and not pairs:
        raise ConfigError(
            'the run averages adapters="exact", which needs ctx.attach: this loop joins without adapters. Use '
            'adapters="mean" in a new run, or ctx.attach.'
        )
    return with_residuals(parameters, fragments, pairs) if pairs else (parameters, fragments)


def guard_state(model: GlobalModel) -> dict[str, JsonValue] | None:
    """The guard's state before the open round."""
    return model.last.commit.guard if model.last else model.attempt.begin.guard


def _short(digests: Iterable[str]) -> str:
    return ", ".join(sorted(digest[:12] for digest in digests))
