"""Which contributions of strangers (`RunConfig.invited`) a round leaves out, by the scores that other replicas report.

Pure: equal records give equal results for every reader. A contribution is scored by its effect on held-out items, as in
Templar's Gauntlet (arXiv 2505.21684): a small step along it alone should not lower their scores.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.check_records import Checked, WorkScore
from diloco_orchestrator.protocol.records import Contribution, HeldoutSet, Quarantine

# benchmarks/strangers.py tries these numbers on honest strangers and on scripted attackers.
LIMIT = 2.5  # sigmas of harm, added up over rounds, from which a stranger's contributions are left out
_LARGEST = 3.0  # sigmas of one round that count; above the limit, so that a first contribution can be left out
_EXPECTED = 0.5  # sigmas by which a contribution should raise scores
_ITEMS = 256  # that count: with more, honest contributions differ by their training and not by the items' chance
_WORSE = 0.2  # sigmas by which it may raise them less than the scorer's own


@dataclass(frozen=True)
class StrangersWork:
    """The replicas that strangers run, and what the others report of their contributions in a round."""

    invited: Collection[int]
    checks: Sequence[Checked]  # those that the round's commit names, in its order


def why_never_scored(config: RunConfig) -> str:
    """Reason why a run with these settings scores no contribution of strangers; empty if it does."""
    if not config.invited:
        return "it has no strangers"
    if config.fragment_sync_delay:
        return "with fragment_sync_delay the model trains while contributions come in"
    if config.adapters == "exact":
        return 'with adapters="exact" a contribution alone is no step of the model'
    ranks = config.ranks_per_replica
    if any(each != 1 for each in (ranks if isinstance(ranks, list) else [ranks])):
        return "a replica of several ranks holds no whole base"
    return ""


def fold_strangers(
    state: Mapping[str, Any] | None,
    work: StrangersWork,
    heldout: HeldoutSet,
    dealt: Mapping[int, Sequence[int]],
    named: Sequence[Contribution],
) -> tuple[dict[str, Any], tuple[Quarantine, ...]]:
    """The harm that strangers' contributions have done so far, and which of `named` are left out, in replica order.

    A stranger's harm in a round is the median over the replicas that scored its contribution (see `harm_of`). It is
    added up over rounds, never below zero. From a sum above `LIMIT` until it has fallen to half of that, the stranger
    is left out; so is a contribution that half of the other replicas or fewer have scored.

    Args:
        state: JSON, after the round before; None at the start.
        dealt: replica id -> the held-out shares assigned to it in the round.
        named: manifests of the contributions, in replica order.
    """
    sums: dict[str, float] = dict((state or {}).get("sums", {}))
    out = set((state or {}).get("out", ()))
    scorers = [replica_id for replica_id in dealt if replica_id not in work.invited]
    left_out = []
    for manifest in named:
        if manifest.replica_id not in work.invited or manifest.payload is None:
            continue
        name, scores = str(manifest.replica_id), _scores_of(manifest, work, heldout, dealt)
        if 2 * len(scores) <= len(scorers):
            why = f"{len(scores)} of {len(scorers)} replicas have scored its work, and more than half are needed"
            left_out.append(Quarantine(replica_id=manifest.replica_id, reason=why))
            continue
        harm = median(map(harm_of, scores))
        sums[name] = min(max(sums.get(name, 0.0) + harm, 0.0), 2 * LIMIT)
        if sums[name] > LIMIT:
            out.add(name)
        elif 2 * sums[name] <= LIMIT:
            out.discard(name)
        if name in out:
            why = (
                f"its work lowers held-out scores by {harm:.2f} sigmas, as {len(scores)} replicas measured; "
                f"{sums[name]:.2f} added up over rounds, {LIMIT} allowed"
            )
            left_out.append(Quarantine(replica_id=manifest.replica_id, reason=why))
    return {"sums": {name: value for name, value in sums.items() if value}, "out": sorted(out)}, tuple(left_out)


def harm_of(score: WorkScore) -> float:
    """The harm of a contribution in one replica's held-out scores, in standard errors of their mean: from -3 to 3.

    The lesser of two measures. One is against the round's base, whose scores a contribution should raise by half a
    standard error; the other against the scorer's own contribution, less .2. So near a plateau, where no contribution
    alone raises scores, only one that is worse than others counts, and one on other data counts while it does not help.
    3 where a score is not finite.
    """
    harm = _sigmas(score.change, score.squares, score.count) + _EXPECTED
    beside = _sigmas(score.beside, score.beside_squares, score.count) - _WORSE
    return max(min(harm, beside, _LARGEST), -_LARGEST)


def _sigmas(change: float | None, squares: float | None, count: int) -> float:
    """Minus the mean change per item over its standard error for at most 256 items; infinity without one of both."""
    if change is None or squares is None:
        return math.inf
    error = math.sqrt(squares / (count - 1) / min(count, _ITEMS))
    return -(change / count) / error if error else math.copysign(math.inf, -change) if change else 0.0


def _scores_of(
    manifest: Contribution, work: StrangersWork, heldout: HeldoutSet, dealt: Mapping[int, Sequence[int]]
) -> list[WorkScore]:
    """One score of a contribution by each replica that is no stranger's, over all items that it was dealt."""
    assert manifest.payload is not None
    digest, found = manifest.payload.digest, dict[int, WorkScore]()
    for checked in work.checks:
        items = sum(heldout.shares[share] for share in dealt.get(checked.replica_id, ()))
        if checked.replica_id not in work.invited:
            for score in checked.scored or ():
                if (score.replica_id, score.payload, score.count) == (manifest.replica_id, digest, items):
                    found.setdefault(checked.replica_id, score)
    return list(found.values())
