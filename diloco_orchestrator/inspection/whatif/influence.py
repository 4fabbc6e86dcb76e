"""Leave-one-out influence: how much each contribution moved the base of its round.

For each applied round and contributor the outer step is repeated without that contribution, shard by shard: in memory
are one shard of the base and of the stepped base, and all contributors' payloads to it.
"""

from contextlib import closing
from dataclasses import dataclass

import torch

from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.mean import Aggregate, Part
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.allreduce.vectors import BLOCK
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.config import OuterConfig, RunConfig
from diloco_orchestrator.inspection.report import Influence, InfluenceRow
from diloco_orchestrator.inspection.whatif.decision import OtherDecision
from diloco_orchestrator.inspection.whatif.models import BaseScorer
from diloco_orchestrator.inspection.whatif.replay import all_lines, distance, has_payloads, squared_distance
from diloco_orchestrator.outer.arithmetic import denormals_kept, nesterov_step
from diloco_orchestrator.outer.base import Base, BaseShard
from diloco_orchestrator.outer.outer_step import part_of, step_in_threads
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import LoggedStep, rebuild_base, start_of, take_step

_AS_IT_WAS = OtherDecision()


def influence_of(run_log: RunLog, scorer: BaseScorer | None = None) -> Influence:
    """The influence of every contribution to an applied round whose payloads still exist.

    With `scorer` each round's base is scored, and once more without each contribution. Raises `NoSuchRun`, and
    `PayloadCorrupt` or `RecordInvalid` for an object that was changed.
    """
    found, base = Influence(), None
    before: Commit | None = None
    for commit in all_lines(run_log).commits:
        try:
            if not has_payloads(run_log, commit.round):
                raise PayloadGone(f"round {commit.round} has no payloads")
            base = base or rebuild_base(run_log, before.round if before else 0).base
            rows, base = _Round(run_log, commit, before, scorer).rows(base)
            found.rows.extend(rows)
        except PayloadGone:
            found.gone.append(commit.round)
            base = None
        before = commit
    return found


@dataclass
class _Sums:
    """Sums over the elements of a fragment, in float64, for one contribution x and the average y of the others."""

    shift: float = 0.0  # squared norm of: parameters stepped without x, less the parameters stepped with it
    product: float = 0.0  # x·y
    own: float = 0.0  # x·x
    others: float = 0.0  # y·y

    def cosine(self) -> float | None:
        norms = float((self.own * self.others) ** 0.5)
        return self.product / norms if norms else None


class _Round:
    """One applied round, to be repeated without each contribution. `before`: commit that made its base, or None."""

    def __init__(self, run_log: RunLog, commit: Commit, before: Commit | None, scorer: BaseScorer | None) -> None:
        self._commit = commit
        self._before = before
        self._scorer = scorer
        self._config = run_log.configs.of(commit.leg)
        self._adapters = start_of(run_log).adapters
        self._reader = ContributionReader(run_log.store)
        self._pairs = _AS_IT_WAS.averaged(commit, self._config)
        self._ids = [answer.replica_id for answer, _ in self._pairs]

    def rows(self, base: Base) -> tuple[list[InfluenceRow], Base]:
        """The influence of each contribution, and the base after the round. `base`: the one before, overwritten."""
        whole = base.copy() if self._scorer is not None or self._adapters else None
        step, sums = self._by_shard(base)
        if whole is None:
            shifts = [each.shift**0.5 for each in sums]
            changes: list[float | None] = [None] * len(sums)
        else:
            base, step, shifts, changes = self._by_base(whole)
        return [
            InfluenceRow(
                round=self._commit.round,
                replica_id=replica_id,
                shift=shift / step if step else None,
                cosine=each.cosine(),
                heldout_change=change,
            )
            for replica_id, each, shift, change in zip(self._ids, sums, shifts, changes, strict=True)
        ], base

    def _decided(self, without: int | None = None) -> tuple[list[tuple[Answer, int]], RunConfig]:
        decision = _AS_IT_WAS if without is None else OtherDecision(without=(without,))
        return decision.averaged(self._commit, self._config), self._config

    # -- shard by shard ------------------------------------------------------------------------------------------

    def _by_shard(self, base: Base) -> tuple[float, list[_Sums]]:
        """The norm of the outer step, which is applied to `base` without residuals, and each contribution's sums."""
        shards = base.shards(self._commit.fragment)
        lengths = [len(shard.parameters) for shard in shards]
        manifests = {a.replica_id: self._reader.named(self._commit.round, a) for a, _ in self._pairs}
        step, sums = 0.0, [_Sums() for _ in self._ids]
        with denormals_kept(), torch.no_grad(), closing(PayloadCache()) as cache:

            def read(manifest: Contribution, index: int) -> bytes | memoryview:
                name = f"{manifest.replica_id}", f"{index}"
                return cache.kept(name, lambda: self._reader.shard(manifest, index))

            def combined(without: int | None) -> tuple[list[Part], Aggregate | None]:
                pairs, _ = self._decided(without)
                parts = [part_of(manifests[answer.replica_id], weight, read) for answer, weight in pairs]
                how = self._config.aggregate, parts, lengths, self._commit.average_codec
                return parts, aggregate_of(*how) if parts else None

            parts, average = combined(None)
            without = [combined(replica_id)[1] for replica_id in self._ids]
            assert average is not None, "an applied round averages somebody"
            for index, shard in enumerate(shards):
                momenta = None if shard.momenta is None else shard.momenta.clone()
                before = BaseShard(shard.parameters.clone(), momenta)
                step_in_threads(shard, average.shard(index), self._config.outer)
                step += squared_distance(before.parameters, shard.parameters)
                for part, others, each in zip(parts, without, sums, strict=True):
                    if others is None:
                        each.shift += squared_distance(before.parameters, shard.parameters)
                    else:
                        _add(each, before, shard, part, others, index, self._config.outer)
                cache.clear()
        return step**0.5, sums

    # -- base by base --------------------------------------------------------------------------------------------

    def _by_base(self, before: Base) -> tuple[Base, float, list[float], list[float | None]]:
        """The base after the round, the L2 norm of the step, and two lists with one number per contribution.

        The first is the L2 distance to the base of the round without that contribution; the second is the held-out
        score of that base less the score with it, None without a scorer.
        """
        after, usual = self._stepped(before, None)
        shifts, changes = [], []
        for replica_id in self._ids:
            other, score = self._stepped(before, replica_id)
            shifts.append(distance(other, after))
            changes.append(None if score is None or usual is None else score - usual)
        return after, distance(before, after), shifts, changes

    def _stepped(self, before: Base, without: int | None) -> tuple[Base, float | None]:
        """A copy of the base after the round, and its held-out score; the score is None without a scorer.

        `without`: the replica whose contribution is left out; None: all are averaged.
        """
        base, (pairs, config) = before.copy(), self._decided(without)
        named = [(self._reader.named(self._commit.round, answer), weight) for answer, weight in pairs]
        if named:
            take_step(base, LoggedStep(self._commit, named, config), self._adapters, self._reader)
        if self._scorer is None:
            return base, None
        source = self._commit if pairs else self._before
        answers = [answer for answer, _ in pairs] or [a for a in (source.answers if source else ()) if a.averaged]
        return base, self._scorer.mean(base, source.round if source else 0, answers)


def _add(
    sums: _Sums, before: BaseShard, after: BaseShard, part: Part, others: Aggregate, index: int, outer: OuterConfig
) -> None:
    """Add the elements of one shard to the sums of one contribution, a block at a time.

    `before`, `after`: the shard of the base before and after the step; `part`: the contribution; `others`: the average
    without it.
    """
    start = 0
    numel = len(before.parameters)
    own = Encoded(part.read(index), part.payload.codec, numel).blocks(0, numel, BLOCK)
    for mine, theirs in zip(own, others.shard(index)(0, numel), strict=True):
        stop = start + theirs.numel()
        parameters = before.parameters[start:stop].clone()
        momenta = None if before.momenta is None else before.momenta[start:stop].clone()
        nesterov_step(parameters, momenta, theirs, outer)
        sums.shift += squared_distance(parameters, after.parameters[start:stop])
        x, y = mine.double(), theirs.double()
        sums.product += float((x * y).sum())
        sums.own += float(x.square().sum())
        sums.others += float(y.square().sum())
        start = stop
