"""Which contributions of strangers (`RunConfig.invited`) a round leaves out, by the scores that other replicas report.

Pure: equal records give equal results for every reader. A contribution is scored by its effect on held-out items, as in
Templar's Gauntlet (arXiv 2505.21684): a small step along it alone should not lower their scores. Where the log deals
the data, it is also scored by its effect on the items dealt to its author, beside that on items dealt to others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.check_records import Checked, DealtScore, WorkScore
from diloco_orchestrator.protocol.records import Contribution, Quarantine
from diloco_orchestrator.protocol.start_records import HeldoutSet

# benchmarks/strangers.py tries these numbers on honest strangers and on scripted attackers.
LIMIT = 2.5  # sigmas of harm, added up over rounds, from which a stranger's contributions are left out
_LARGEST = 3.0  # sigmas of one round that count; above the limit, so that a first contribution can be left out
_EXPECTED = 0.5  # sigmas by which a contribution should raise scores
_ITEMS = 256  # that count: with more, honest contributions differ by their training and not by the items' chance
_WORSE = 0.2  # sigmas by which it may raise them less than the scorer's own
# Evidence, added up over rounds, that a stranger does not train on what it is dealt, from which it is left out: the
# log of how much likelier its scores are then. Where scores are as assumed, a sum that starts anew at zero takes a
# thousand rounds in the mean to get there for a stranger that does train (Lorden 1971).
DEALT_LIMIT = math.log(1000.0)
_MOST_EVIDENCE = 3.0  # of one round, so that three rounds or more decide
_AGAIN = 0.1  # cosine by which a stranger's contributions may resemble each other more than a launched replica's do
_AGAIN_ALONE = 0.08  # likewise, where nobody has compared them with contributions of others
_PER_COSINE = 10.0  # evidence of a round for each unit of a cosine above that
_FADING = 0.8  # weight of a round over that of the next one, in the mean of how much less a stranger is like others
_AGAIN_LIMIT = 6.0  # evidence, added up over rounds, from which a stranger repeats itself


@dataclass(frozen=True)
class StrangersWork:
    """The replicas that strangers run, and what the others report of their contributions in a round."""

    invited: Collection[int]
    checks: Sequence[Checked]  # those that the round's commit names, in its order
    rules: int  # version of the rules about them (`Start.strangers_rules`)


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
    is left out; so is a contribution that half of the other replicas or fewer have scored. Likewise with the evidence
    that it does not train on the data dealt to it (see `evidence_of`), and that it repeats itself (`repetition_of`).

    Args:
        state: JSON, after the round before; None at the start.
        dealt: replica id -> the held-out shares assigned to it in the round.
        named: manifests of the contributions, in replica order.
    """
    sums, evidence, again, unlike = ({**(state or {}).get(name, {})} for name in ("sums", "dealt", "again", "unlike"))
    out, untrained, repeats = (set((state or {}).get(name, ())) for name in ("out", "untrained", "repeats"))
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
        _add(sums, name, harm, LIMIT, out)
        dealt_scores = _about(manifest, work, scorers)
        if 2 * len(dealt_scores) > len(scorers):
            _add(evidence, name, evidence_of(dealt_scores), DEALT_LIMIT, untrained)
        said_again = [each for each in scores if each.again is not None and each.again_own is not None]
        if 2 * len(said_again) > len(scorers):
            less_like = unlike_others(said_again)
            if less_like is not None and work.rules > 1:
                total, weight = unlike.get(name, (0.0, 0.0))
                total, weight = unlike[name] = [_FADING * total + less_like, _FADING * weight + 1.0]
                less_like = total / weight
            _add(again, name, repetition_of(said_again, less_like), _AGAIN_LIMIT, repeats)
        why = ""
        if name in repeats:
            why = (
                f"its work repeats what it sent before: evidence of {again.get(name, 0.0):.2f} added up over rounds, "
                f"{_AGAIN_LIMIT} allowed, by the measures of {len(said_again)} replicas in this one"
            )
        elif name in untrained:
            why = (
                f"its work does not show the data dealt to it: evidence of {evidence.get(name, 0.0):.2f} added up over "
                f"rounds, {DEALT_LIMIT:.2f} allowed, by the scores of {len(dealt_scores)} replicas in this one"
            )
        elif name in out:
            why = (
                f"its work lowers held-out scores by {harm:.2f} sigmas, as {len(scores)} replicas measured; "
                f"{sums[name]:.2f} added up over rounds, {LIMIT} allowed"
            )
        if why:
            left_out.append(Quarantine(replica_id=manifest.replica_id, reason=why))
    after: dict[str, Any] = {"sums": {name: value for name, value in sums.items() if value}, "out": sorted(out)}
    if evidence:  # absent in runs whose data nobody deals
        after |= {"dealt": {name: value for name, value in evidence.items() if value}, "untrained": sorted(untrained)}
    if again:  # absent in runs that began before contributions were compared with earlier ones
        after |= {"again": {name: value for name, value in again.items() if value}, "repeats": sorted(repeats)}
    if unlike:  # absent in runs by the first version of the rules
        after |= {"unlike": unlike}
    return after, tuple(left_out)


def unlike_others(scores: Sequence[WorkScore]) -> float | None:
    """The likeness that a contribution lacks to the scorers' last ones, beside theirs to each other, in one round.

    Likeness is a cosine of pseudo-gradients; the median over scorers. None where half of the scorers or fewer have
    compared them.
    """
    found = [
        each.like_other - each.like_own for each in scores if each.like_other is not None and each.like_own is not None
    ]
    return median(found) if 2 * len(found) > len(scores) else None


def repetition_of(scores: Sequence[WorkScore], unlike: float | None) -> float:
    """The evidence of one round that a stranger repeats itself: from -3 to 3.

    By how much its contribution is more like its last one than the scorers' own are like theirs, and less like the
    scorers' last ones than these are like each other, beyond what is usual: ten for each unit of a cosine. A constant
    direction in all of somebody's work shows in the first, and against others in the second, because they pull the
    model back; a payload sent again shows too. Noise of training is new in each round, and what all replicas still have
    to learn is in the scorers' own as well. To be more like others than usual excuses nothing.

    `unlike`: what `unlike_others` returns, since the second version of the rules averaged over rounds: of one round,
    where chance takes it as often below zero as above, what is above would add up.
    """
    excess = median(
        each.again - each.again_own for each in scores if each.again is not None and each.again_own is not None
    )
    more = excess - _AGAIN_ALONE if unlike is None else excess + max(unlike, 0.0) - _AGAIN
    return max(min(_PER_COSINE * more, _MOST_EVIDENCE), -_MOST_EVIDENCE)


def _add(sums: dict[str, float], name: str, value: float, limit: float, out: set[str]) -> None:
    """Add `value` to the sum `name`, from 0 to twice `limit`. `out`: names above it, until half of it is left."""
    sums[name] = min(max(sums.get(name, 0.0) + value, 0.0), 2 * limit)
    if sums[name] > limit:
        out.add(name)
    elif 2 * sums[name] <= limit:
        out.discard(name)


def evidence_of(scores: Sequence[DealtScore]) -> float:
    """The evidence of one round that a contribution was not trained on the data dealt to its author: from -3 to 3.

    The log of the likelihood ratio of the median gap between standard normal distributions around 0 and around the
    usual gap, the median of the scorers' own. So nothing is decided where own data leave no trace in anybody's work,
    and who shows more than half of the usual trace is taken to have trained.
    """
    usual = min(max(median(each.usual for each in scores), 0.0), _LARGEST)
    found = usual * (usual / 2 - median(each.gap for each in scores))
    return max(min(found, _MOST_EVIDENCE), -_MOST_EVIDENCE)


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


def _about(manifest: Contribution, work: StrangersWork, scorers: Collection[int]) -> list[DealtScore]:
    """One score of a contribution on the data dealt to its author by each of `scorers`."""
    assert manifest.payload is not None
    name, found = (manifest.replica_id, manifest.payload.digest), dict[int, DealtScore]()
    for checked in work.checks:
        for score in checked.dealt or () if checked.replica_id in scorers else ():
            if (score.replica_id, score.payload) == name:
                found.setdefault(checked.replica_id, score)
    return list(found.values())
