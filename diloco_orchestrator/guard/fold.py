"""The guard's fold: adds one round's scores of the held-out shares to the guard's state and returns a verdict.

Pure. The state is JSON and part of each commit, so every round is folded exactly once, whichever replica commits and
however often replicas restart. The rule that judges the folded numbers is found by its name in the state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.registry import UNNAMED, rule_of_state
from diloco_orchestrator.guard.robust import clipped_mean, first_mean
from diloco_orchestrator.guard.rule import Evidence
from diloco_orchestrator.guard.vault import change_of
from diloco_orchestrator.protocol.records import Discounted, HeldoutSet, Metric, Quarantine, Score, VaultScore
from diloco_orchestrator.protocol.verdict import Verdict, VerdictKind

_EMPTY: Mapping[str, Any] = {
    "baselines": None,
    "level": None,
    "spreads": {"heldout": None, "in_loop": None},
    "in_loop": None,
    "unfolded": 0,
    "guard": None,
}
_WARN_UNFOLDED = 5  # rounds in a row that could not be folded


@dataclass(frozen=True)
class RoundReports:
    """The reports of replicas in one round, restricted to what the run's start allows them to say.

    All of it is of the base that the round started from, or of the first steps from there; higher is better.
    """

    round: int
    scores: Sequence[Score]  # at most one of each share, each from the replica to which it was dealt
    in_loop: Sequence[Metric] = ()  # the training metric of each averaged contribution that has one
    why_no_metric: str = "no training metric was observed"  # the reason, if `in_loop` is empty
    final_evaluation: bool = False  # nobody trained in this round: the last round's training metric is used
    kl_to_init: float | None = None  # nats per token
    entropy: float | None = None
    reward_std: float | None = None
    extra: Mapping[str, float | None] = field(default_factory=dict)  # by name, those with a limit; None: not observed
    vault: Sequence[VaultScore] = ()  # of the base, if an alarm waits for them; at most one of each share
    rebuildable: bool = True  # whether the base can be rebuilt later


@dataclass(frozen=True)
class FoldResult:
    """The guard after one round: its state, which goes into the commit, and the verdict."""

    state: dict[str, Any]
    verdict: Verdict
    quarantined: tuple[Quarantine, ...] = ()  # contributions that the per-replica guard leaves out of the average
    discounted: tuple[Discounted, ...] = ()  # manifests of which scores or the training metric are not folded as said
    far_shares: tuple[int, ...] = ()  # whose score is far beyond all others
    far_in_loop: tuple[int, ...] = ()  # positions in `RoundReports.in_loop`, likewise


def fold(
    state: Mapping[str, Any] | None, config: GuardConfig, heldout: HeldoutSet, reports: RoundReports
) -> FoldResult:
    """Add one round's scores and training metric to the guard's state, and judge.

    Scores and training metric of a contribution belong to the same model: the base that its round started from. Means
    over shares and replicas are clipped (`guard.robust`); a share whose score is not finite is missing. `entropy` and
    `reward_std` are recorded for readers of the state; no rule judges them. `state`: in the commit before; None at the
    run's start. Raises `RecordTooNew` if the state's rule is not installed here, `ValueError` for a share scored twice.
    """
    _check_distinct(reports.scores)
    before = {**_EMPTY, **(state or {})}
    kind = rule_of_state(state, config.rule, f"the guard before round {reports.round}")
    shares = _fold_shares(before, reports.scores, heldout.items)
    in_loop, in_loop_spread, far_in_loop = _fold_in_loop(before, reports)
    evidence = _evidence(reports, heldout, shares, in_loop, needs_in_loop=kind.needs_in_loop)
    why_not = evidence.why_not if evidence.heldout is None else ""
    rule_state, judged = kind.of(config, heldout).fold(before["guard"], evidence)
    unfolded = before["unfolded"] + 1 if why_not else 0
    unpaired = 0 if kind.needs_in_loop or in_loop is not None else before.get("unpaired", 0) + 1
    after = {
        "baselines": shares.baselines,
        "level": shares.level,
        "spreads": {"heldout": shares.spread, "in_loop": in_loop_spread},
        "in_loop": before["in_loop"] if in_loop is None else _finite_or_none(in_loop),
        "unfolded": unfolded,
        "guard": rule_state,
    }
    if kind is not UNNAMED:
        after["rule"] = kind.name
        after["unpaired"] = unpaired
    verdict = replace(
        judged,
        reason=why_not if why_not and not judged.fire else judged.reason,
        folded=not why_not,
        value=_finite_or_none(shares.value),
        in_loop=_finite_or_none(in_loop),
        warning=_warning(unfolded, why_not, unpaired, reports.why_no_metric) or judged.warning,
    )
    if config.max_extra:
        after["extra"], verdict = fold_extra(before.get("extra"), config, reports.extra, verdict)
    return FoldResult(after, verdict, far_shares=shares.far, far_in_loop=far_in_loop)


def _evidence(
    reports: RoundReports, heldout: HeldoutSet, shares: "_Shares", in_loop: float | None, *, needs_in_loop: bool
) -> Evidence:
    """The evidence that the rule judges; without any metric if the round cannot be judged."""
    vault = change_of(reports.vault, heldout.vault.items) if heldout.vault else None
    if shares.value is None or (in_loop is None and needs_in_loop):
        why_not = shares.why_not if shares.value is None else reports.why_no_metric
        return Evidence(round=reports.round, why_not=why_not, vault=vault, final_evaluation=reports.final_evaluation)
    return Evidence(
        round=reports.round,
        heldout=shares.value,
        why_not=shares.why_not,
        in_loop=in_loop,
        kl_to_init=reports.kl_to_init,
        entropy=reports.entropy,
        reward_std=reports.reward_std,
        items=shares.items,
        total_items=heldout.items,
        gains=shares.gains,
        vault=vault,
        rebuildable=reports.rebuildable,
        final_evaluation=reports.final_evaluation,
    )


def _check_distinct(scores: Sequence[Score]) -> None:
    numbers = [score.share for score in scores]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"shares {sorted(numbers)} hold one share twice; each is scored by one replica.")


@dataclass(frozen=True)
class _Shares:
    """The held-out score of a round, comparable between rounds, and what the state keeps of the shares."""

    value: float | None  # NaN if most scores are not finite; None if there are too few
    baselines: dict[str, float] | None  # first score of each share
    level: float | None  # the mean of the first scores, B
    spread: float | None
    items: int = 0  # with finite scores
    why_not: str = ""  # why `value` is no finite number
    gains: Mapping[str, float] = field(default_factory=dict)  # by share: clipped score minus its first one
    far: tuple[int, ...] = ()  # shares whose score is far beyond all others


def _fold_shares(state: Mapping[str, Any], scores: Sequence[Score], total_items: int) -> _Shares:
    """The item-weighted mean of (score - first score) over the shares that are present, plus B.

    So a missing share does not appear as a change of the model.
    """
    first, level, spread = state["baselines"], state["level"], state["spreads"]["heldout"]
    finite = [score for score in scores if math.isfinite(score.mean)]
    scored = sum(score.count for score in finite)
    broken = sum(score.count for score in scores) - scored
    needed = max(-(-total_items // 2), 1)
    counted = f"{scored} of {total_items} held-out items, {needed} needed"
    if 2 * broken > total_items:  # the rule judges NaN as a round without a finite score; two in a row fire
        return _Shares(math.nan, first, level, spread, scored, f"inconclusive: {counted}")
    if scored < needed:
        return _Shares(None, first, level, spread, scored, f"inconclusive: finite scores of {counted}")
    if first is None:
        level = first_mean([(score.count, score.mean) for score in finite])
        # The shares differ in difficulty, so that nothing says yet which score is a lie.
        first = {str(score.share): score.mean for score in finite}
        return _Shares(level, first, level, spread, scored, gains=dict.fromkeys(first, 0.0))
    known = [(score.count, score.mean - first[str(score.share)]) for score in finite if str(score.share) in first]
    if not known:
        return _Shares(None, first, level, spread, scored, "inconclusive: no share was ever scored before")
    drift = clipped_mean(known, spread)
    for score in finite:
        # The first score of a share that appears only now includes the others' change so far, so that B stays.
        first = {**first, str(score.share): first.get(str(score.share), score.mean - drift.mean)}
    everyone = clipped_mean([(score.count, score.mean - first[str(score.share)]) for score in finite], spread)
    gains = {str(score.share): gain for score, gain in zip(finite, everyone.kept, strict=True)}
    far = tuple(finite[position].share for position in everyone.far)
    return _Shares(everyone.mean + level, first, level, everyone.spread, scored, gains=gains, far=far)


def _fold_in_loop(
    state: Mapping[str, Any], reports: RoundReports
) -> tuple[float | None, float | None, tuple[int, ...]]:
    """The training metric of a round, the spread to keep, and positions of metrics that are far beyond all others.

    The metric is None if nobody observed one, NaN if most are not finite.
    """
    spread = state["spreads"]["in_loop"]
    finite = [i for i, each in enumerate(reports.in_loop) if math.isfinite(each.mean)]
    if 2 * len(finite) < len(reports.in_loop):
        return math.nan, spread, ()
    if finite:
        folded = clipped_mean([(1, reports.in_loop[i].mean) for i in finite], spread)
        return folded.mean, folded.spread, tuple(finite[position] for position in folded.far)
    return (state["in_loop"] if reports.final_evaluation else None), spread, ()


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _warning(unfolded: int, why: str, unpaired: int, why_no_metric: str) -> str:
    if unfolded >= _WARN_UNFOLDED:
        return f"{unfolded} rounds in a row could not be judged: the kill-switch is blind ({why})"
    if unpaired >= _WARN_UNFOLDED:
        return f"{unpaired} rounds in a row without a training metric: a Hacking Gap cannot be seen ({why_no_metric})"
    return ""


def fold_extra(
    state: Mapping[str, Any] | None, config: GuardConfig, metrics: Mapping[str, float | None], verdict: Verdict
) -> tuple[dict[str, Any], Verdict]:
    """Add one round of the user's own metrics; the next state, and the verdict, which fires above a metric's limit.

    An exponential moving average of each metric with a limit is compared with it, beside whichever rule judges.
    `metrics`: by name; None if not observed in the round. No limit fires before `min_steps` rounds with its metric;
    one that has fired stays fired. A rule's own verdict comes first.
    """
    averages: dict[str, list[Any]] = {**((state or {}).get("averages") or {})}
    fired: str = (state or {}).get("fired", "")
    for name, limit in sorted(config.max_extra.items()):
        value = metrics.get(name)
        if value is not None and math.isfinite(value):
            before, count = averages.get(name, [value, 0])
            averages[name] = [config.ema_alpha * before + (1 - config.ema_alpha) * value, count + 1]
        average, count = averages.get(name, [0.0, 0])
        if not fired and count >= config.min_steps and average > limit:
            fired = f"extra: {name} {average:.4g} (moving average of {count} rounds) is above its limit of {limit:g}"
    after = {"averages": averages, "fired": fired}
    if fired and not verdict.fire:
        verdict = replace(verdict, fire=True, reason=fired, action=VerdictKind.HALT)
    return after, verdict
