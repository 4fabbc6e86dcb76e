"""Clipped means over replicas or shares, in which no single value can move the mean far, however large it is.

Pure, and with the same bits on every machine: sums are exactly rounded (`math.fsum`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from diloco_orchestrator.guard.rule import Evidence, finite_or_none
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.protocol.records import Metric, Score, VaultScore
from diloco_orchestrator.protocol.start_records import HeldoutSet

_FEWEST = 3  # values: with fewer, a median does not show who differs
_CLIP = 2.5  # spreads from the median at which a value is clipped
_FAR = 8.0  # times that distance, beyond which the commit names a value …
_FEWEST_TO_NAME = 6  # … of at least so many: the median deviation of fewer is often tiny, or moved by one of them
_ABSURD = 1e6  # times the scale of first values, beyond which a value is clipped
_PAST = 0.9  # weight of the past in the spread


@dataclass(frozen=True)
class RoundReports:
    """The scores and metrics that replicas report in one round, restricted to what the run's start allows them to
    report.

    All are of the base that the round started from, or of the first steps from there; higher is better.
    """

    round: int
    scores: Sequence[Score]  # at most one of each share, each from the replica to which it was dealt
    in_loop: Mapping[int, Metric] = field(default_factory=dict)  # by replica, of averaged contributions that have one
    why_no_metric: str = "no training metric was observed"  # the reason, if `in_loop` is empty
    final_evaluation: bool = False  # nothing was trained in this round: the last round's training metric is used
    kl_to_init: float | None = None  # nats per token
    entropy: float | None = None
    reward_std: float | None = None
    extra: Mapping[str, float | None] = field(default_factory=dict)  # by name, those with a limit; None: not observed
    vault: Sequence[VaultScore] = ()  # of the base, if an alarm waits for them; at most one of each share
    rebuildable: bool = True  # whether the base can be rebuilt later


def measure(
    before: Mapping[str, Any], heldout: HeldoutSet, reports: RoundReports
) -> tuple[Evidence, dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """(evidence of a round for the guard rule, values for the guard's next state, shares and replicas far from all
    others).

    Scores and training metric of a contribution are of the same model: the base that its round started from. Means over
    shares and replicas are clipped; a share whose score is not finite is missing. `before`: the guard's state before
    the round. Raises `ValueError` for a share scored twice.
    """
    _check_distinct(reports.scores)
    in_loop, in_loop_spread, far_replicas = _training_metric(before, reports)
    evidence = Evidence(
        round=reports.round,
        in_loop=in_loop,
        trained={replica_id: each.mean for replica_id, each in reports.in_loop.items() if math.isfinite(each.mean)},
        kl_to_init=reports.kl_to_init,
        entropy=reports.entropy,
        reward_std=reports.reward_std,
        total_items=heldout.items,
        vault=change_of(reports.vault, heldout.vault.items) if heldout.vault else None,
        rebuildable=reports.rebuildable,
        final_evaluation=reports.final_evaluation,
    )
    evidence, baselines, level, spread, far_shares = _with_score(evidence, before, reports.scores)
    kept = {
        "baselines": baselines,
        "level": level,
        "spreads": {"heldout": spread, "in_loop": in_loop_spread},
        "in_loop": before["in_loop"] if in_loop is None else finite_or_none(in_loop),
    }
    return evidence, kept, far_shares, far_replicas


def change_of(scores: Sequence[VaultScore], items: int) -> VaultChange | None:
    """The score change on a confirmation set (further held-out items); None if fewer than half of `items` were scored.

    Means of shares are clipped and the variance of an item is the median of the shares', so that no share counts beyond
    its items.
    """
    finite = [score for score in scores if score.change is not None]
    if 2 * sum(score.count for score in scores) < items or not scores:
        return None
    if 2 * sum(score.count for score in finite) < items:
        return VaultChange(math.nan, 0.0)
    changed = clipped_mean([(score.count, score.mean) for score in finite], None)
    variance = median([score.variance for score in finite])
    return VaultChange(changed.mean, math.sqrt(variance / sum(score.count for score in finite)))


def _check_distinct(scores: Sequence[Score]) -> None:
    numbers = [score.share for score in scores]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"shares {sorted(numbers)} hold one share twice; each is scored by one replica.")


def _with_score(
    evidence: Evidence, state: Mapping[str, Any], scores: Sequence[Score]
) -> tuple[Evidence, dict[str, float] | None, float | None, float | None, tuple[int, ...]]:
    """`evidence` with the held-out score: B plus the item-weighted mean of (score - first score) over the scored
    shares.

    B is the mean of the first scores, so that a missing share does not appear as a change of the model. The score is
    NaN if most are not finite; None if there are too few. Also returned, for later rounds: each share's first score, B,
    the shares' spread, and the shares whose score is far from all others.
    """
    first, level, spread = state["baselines"], state["level"], state["spreads"]["heldout"]
    finite = [score for score in scores if math.isfinite(score.mean)]
    scored = sum(score.count for score in finite)
    broken = sum(score.count for score in scores) - scored
    needed = max(-(-evidence.total_items // 2), 1)
    counted = f"{scored} of {evidence.total_items} held-out items, {needed} needed"
    evidence = replace(evidence, items=scored)
    if 2 * broken > evidence.total_items:  # the rule judges NaN as a round without a finite score; two in a row fire
        return replace(evidence, heldout=math.nan, why_not=f"inconclusive: {counted}"), first, level, spread, ()
    if scored < needed:
        return replace(evidence, why_not=f"inconclusive: finite scores of {counted}"), first, level, spread, ()
    if first is None:
        level = first_mean([(score.count, score.mean) for score in finite])
        # Shares differ in difficulty, so that the first scores do not show which one is false.
        first = {str(score.share): score.mean for score in finite}
        return replace(evidence, heldout=level, gains=dict.fromkeys(first, 0.0)), first, level, spread, ()
    known = [(score.count, score.mean - first[str(score.share)]) for score in finite if str(score.share) in first]
    if not known:
        why_not = "inconclusive: no share was ever scored before"
        return replace(evidence, why_not=why_not), first, level, spread, ()
    drift = clipped_mean(known, spread)
    for score in finite:
        # The first score of a share that appears only now includes the others' change so far, so that B stays.
        first = {**first, str(score.share): first.get(str(score.share), score.mean - drift.mean)}
    everyone = clipped_mean([(score.count, score.mean - first[str(score.share)]) for score in finite], spread)
    gains = {str(score.share): gain for score, gain in zip(finite, everyone.kept, strict=True)}
    far = tuple(finite[position].share for position in everyone.far)
    return replace(evidence, heldout=everyone.mean + level, gains=gains), first, level, everyone.spread, far


def scale_of(state: Mapping[str, Any], heldout: HeldoutSet) -> tuple[float | None, float]:
    """The scale of folded scores, by the level B from which they go on, and what to add to make them means over all
    items.

    `_with_score` goes on from the mean over the shares that the first scores were of; shares that came later have other
    first scores. `state`: the guard's state after a round. (None, 0.0) if nothing was scored yet.
    """
    first, level = state.get("baselines"), state.get("level")
    if not isinstance(first, dict) or not isinstance(level, float) or not math.isfinite(level):
        return None, 0.0
    # Whoever may commit may have written anything into the state, and who shows a row does not derive it.
    known = [(count, first.get(str(share))) for share, count in enumerate(heldout.shares)]
    means = [(count, mean) for count, mean in known if count and isinstance(mean, float) and math.isfinite(mean)]
    return level, first_mean(means) - level if means else 0.0


def _training_metric(
    state: Mapping[str, Any], reports: RoundReports
) -> tuple[float | None, float | None, tuple[int, ...]]:
    """The training metric of a round, its spread for the state, and the replicas whose metric is far from all others.

    The metric is None if no replica observed one, NaN if most are not finite.
    """
    spread = state["spreads"]["in_loop"]
    finite = {replica_id: each.mean for replica_id, each in reports.in_loop.items() if math.isfinite(each.mean)}
    if 2 * len(finite) < len(reports.in_loop):
        return math.nan, spread, ()
    if finite:
        folded = clipped_mean([(1, mean) for mean in finite.values()], spread)
        return folded.mean, folded.spread, tuple(list(finite)[position] for position in folded.far)
    return (state["in_loop"] if reports.final_evaluation else None), spread, ()


@dataclass(frozen=True)
class ClippedMean:
    """A weighted mean of clipped values, and the spread by which to clip the next round's values."""

    mean: float
    kept: tuple[float, ...]  # the values after clipping, in their order
    spread: float | None  # usual distance of a value from the median; None while there were too few values
    far: tuple[int, ...] = ()  # positions of values that are more than eight times as far away as the clip allows


def clipped_mean(values: Sequence[tuple[int, float]], spread: float | None) -> ClippedMean:
    """The mean of `values`, (weight, finite number) each, clipped to 2.5 spreads from their median.

    The spread used is the larger of `spread`, that of earlier rounds (None: unknown), and this round's median absolute
    deviation, so that values may move apart together, and a quarter of them can move the mean by at most 2.5 spreads of
    their share. One or two values are not clipped: nothing shows which is wrong.
    """
    if len(values) < _FEWEST:
        return ClippedMean(weighted_mean(values), tuple(value for _, value in values), spread)
    middle = median([value for _, value in values])
    deviation = median([abs(value - middle) for _, value in values])
    limit = _CLIP * max(deviation, spread or 0.0)
    kept = [(weight, min(max(value, middle - limit), middle + limit)) for weight, value in values]
    after = deviation if spread is None else _PAST * spread + (1 - _PAST) * deviation
    named = len(values) >= _FEWEST_TO_NAME and spread is not None
    far = tuple(i for i, (_, value) in enumerate(values) if named and abs(value - middle) > _FAR * limit > 0)
    return ClippedMean(weighted_mean(kept), tuple(value for _, value in kept), after, far)


def first_mean(values: Sequence[tuple[int, float]]) -> float:
    """The mean of `values` as in `clipped_mean`, for the first round, whose usual spread is not known.

    Only absurd values are clipped, which would leave no digits for the others' changes: with three values or more,
    those further from the median than a million times its size, the median deviation, or 1.
    """
    if len(values) < _FEWEST:
        return weighted_mean(values)
    middle = median([value for _, value in values])
    limit = _ABSURD * max(1.0, abs(middle), median([abs(value - middle) for _, value in values]))
    return weighted_mean([(weight, min(max(value, middle - limit), middle + limit)) for weight, value in values])


def weighted_mean(values: Sequence[tuple[int, float]]) -> float:
    """The mean of `values`, (weight, number) each; the weights must not all be zero. Finite if all numbers are."""
    total = sum(weight for weight, _ in values)
    try:
        mean = math.fsum(weight * value for weight, value in values) / total
    except (OverflowError, ValueError):  # a sum beyond the range, or of both infinities
        mean = math.nan
    if math.isfinite(mean) or not all(math.isfinite(value) for _, value in values):
        return mean
    return math.fsum(weight / total * value for weight, value in values)  # of numbers that replicas made up
