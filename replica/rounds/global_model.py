"""`GlobalModel`: the base that this replica holds, and its position in the commit log.

Computes bases from commits. When a round ends, and what this replica contributes, is decided elsewhere.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.errors import BaseDiverged, ModelMismatch
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Commit, Contribution, Payload
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.replica.rounds.first_base import agree_on_first_base
from diloco_orchestrator.run_log.run_log import CommitEntry
from diloco_orchestrator.snapshots.layout import ModelFiles, check_same_model, describe
from diloco_orchestrator.snapshots.rebuild import FirstBase, Tip, rebuild

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NextBase:
    """The base after a round, as this replica computed it."""

    digest: str
    step: outer_step.OuterStep | None = None  # from the base that the round started from; None if that one stays

    @property
    def average(self) -> Mapping[str, torch.Tensor]:
        """The averaged pseudo-gradient, by parameter; empty if nothing was applied."""
        return self.step.average if self.step else {}


@dataclass(frozen=True)
class _NamedSet:
    """All that an outer step depends on beside the base: what is averaged, byte for byte, and how."""

    round: int
    fragment: int
    contributions: tuple[tuple[int, float, Payload | None], ...]  # replica, weight and payload digests of each


class GlobalModel:
    """The newest base that this replica has followed. `fragments`: parameter names of each fragment, in name order."""

    def __init__(self, attempt: Attempt, fragments: Sequence[tuple[str, ...]], first: FirstBase | None = None) -> None:
        self.attempt = attempt
        self._fragments = fragments
        self._tip: Tip = rebuild(attempt.log, attempt.begin, first=first)
        self._computed: tuple[_NamedSet, NextBase] | None = None  # of the open round

    @classmethod
    def join(
        cls,
        attempt: Attempt,
        parameters: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        files: ModelFiles,
    ) -> "GlobalModel":
        """Agree on the first base with the other replicas, then rebuild the newest base from the bucket.

        `parameters`: this replica's trainable parameters, any float dtype. Raises `ModelMismatch` if they, or the
        fragments, are not the run's.
        """
        found, first = attempt.log.start(), None
        if found is None:
            found, first = agree_on_first_base(attempt, parameters, fragments, files)
        start = found.record
        check_same_model(describe(parameters), start.parameters)
        own = tuple(tuple(names) for names in fragments)
        if start.fragments != own:
            raise ModelMismatch(
                f"this replica synchronises {len(own)} fragments of the model, the run in {attempt.store.url} "
                f"{len(start.fragments)}, or the same number split otherwise. All replicas must agree."
            )
        model = cls(attempt, own, first)
        if first is None and not model.position.round and not model.base.holds(parameters):
            log.warning("this replica's first values differ from the run's first base; it takes those of snapshot 0")
        return model

    # -- the base ------------------------------------------------------------------------------------------------

    @property
    def base(self) -> Base:
        return self._tip.base

    @property
    def digest(self) -> str:
        """The sha256 digest of the base."""
        return self._tip.digest

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

    def digest_before(self, round_: int) -> str:
        """The digest of the base that a round of this leg started from."""
        if round_ > self.attempt.begin.after_round + 1:
            return self.commit_of(round_ - 1).base_digest
        return self.attempt.log.first_digest(self.attempt.begin)

    # -- moving --------------------------------------------------------------------------------------------------

    def next_base(
        self, contributions: Sequence[tuple[Contribution, float]], read_shard: outer_step.ReadShard
    ) -> NextBase:
        """The base after an outer step with the weighted average of `contributions`, (manifest, weight) each.

        The base itself is unchanged until `follow`. The same contributions with the same weights are computed once per
        round. `read_shard`: (manifest, shard index) -> verified bytes. Raises `PayloadCorrupt` for a contribution
        without a usable payload, `PayloadGone` if a payload was deleted.
        """
        payloads = tuple((manifest.replica_id, weight, manifest.payload) for manifest, weight in contributions)
        named = _NamedSet(self.round, self.fragment, payloads)
        if self._computed is None or self._computed[0] != named:
            self._computed = None  # its memory is needed for the next one
            average = outer_step.average(self.base, self.fragment_names, contributions, read_shard)
            step = outer_step.OuterStep(self.base, average, self.attempt.config.outer)
            self._computed = named, NextBase(step.digest(), step)
        return self._computed[1]

    def same_base(self) -> NextBase:
        """The base after a round that is not applied."""
        return NextBase(self.digest)

    def follow(self, entry: CommitEntry, computed: NextBase) -> bool:
        """Take `computed` as the base after a commit. False, changing nothing, if the commit names another digest."""
        commit = entry.commit
        # Before the step: if it is interrupted, what is computed again from a half-stepped base has another digest than
        # the commit, and the base is rebuilt.
        self._computed = None
        if computed.digest != commit.base_digest:
            return False
        if computed.step is not None:
            computed.step.take()
        base_round = commit.round if commit.applied else self._tip.base_round
        self._tip = Tip(self._tip.base, base_round, computed.digest, entry.position, entry)
        return True

    def rebuild(self, until: int | None = None) -> None:
        """Take the newest base of the leg from the bucket, or its base after round `until`. Errors as of `rebuild`."""
        self._computed = None
        self._tip = rebuild(self.attempt.log, self.attempt.begin, until)

    def rebuild_other_bits(self, commit: Commit, ours: str) -> None:
        """Rebuild the base from the bucket after this replica computed another digest, `ours`, than `commit` names.

        Raises `BaseDiverged` if the rebuilt base has another digest too.
        """
        log.error(
            "round %d: base %s here, %s in the commit; rebuilding", commit.round, ours[:12], commit.base_digest[:12]
        )
        try:
            self.rebuild()
        except BaseDiverged as error:
            raise BaseDiverged(
                f"replica {self.attempt.replica_id} computed base {ours[:12]} after round {commit.round} and again "
                f"another than the commit's from the bucket: {error} The run goes on without this machine."
            ) from None
