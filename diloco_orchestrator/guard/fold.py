"""Updates the guard once per round: adds the scores of the held-out set to its state and returns a verdict.

Pure functions. The state is JSON in each commit, so every round is added exactly once, whichever replica commits and
however often replicas restart. The state names the guard rule that computed it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.registry import UNNAMED, rule_of_state
from diloco_orchestrator.guard.robust import RoundReports, measure
from diloco_orchestrator.guard.rule import Evidence, GuardRule, finite_or_none
from diloco_orchestrator.protocol.records import Discounted, Quarantine
from diloco_orchestrator.protocol.start_records import HeldoutSet
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
class FoldResult:
    """The result of adding one round to the guard: its state, for the commit, and the verdict."""

    state: dict[str, Any]
    verdict: Verdict
    quarantined: tuple[Quarantine, ...] = ()  # contributions that the per-replica guard leaves out of the average
    discounted: tuple[Discounted, ...] = ()  # manifests of which scores or the training metric are not folded as said
    far_shares: tuple[int, ...] = ()  # whose score is far beyond all others
    far_in_loop: tuple[int, ...] = ()  # replicas whose training metric is


def fold(
    state: Mapping[str, Any] | None, config: GuardConfig, heldout: HeldoutSet, reports: RoundReports
) -> FoldResult:
    """The guard's state and verdict after one more round, whose scores and metrics are in `reports`.

    `state`: from the commit before; None at the run's start. The rule gets no metric of a round that cannot be judged.
    Raises `RecordTooNew` if the state's rule is not installed here, `ConfigError` for a rule that returns anything but
    a state in JSON and a verdict, `ValueError` for a share scored twice.
    """
    before = {**_EMPTY, **(state or {})}
    kind = rule_of_state(state, config.rule, f"the guard before round {reports.round}")
    measured, kept, far_shares, far_in_loop = measure(before, heldout, reports)
    evidence, why_not = measured, ""
    if measured.heldout is None or (measured.in_loop is None and kind.needs_in_loop):
        why_not = measured.why_not if measured.heldout is None else reports.why_no_metric
        evidence = Evidence(
            round=reports.round, why_not=why_not, vault=measured.vault, final_evaluation=reports.final_evaluation
        )
    rule_state, judged = _returned(kind, kind.of(config, heldout).fold(before["guard"], evidence))
    unfolded = before["unfolded"] + 1 if why_not else 0
    unpaired = 0 if kind.needs_in_loop or measured.in_loop is not None else before.get("unpaired", 0) + 1
    after = {**kept, "unfolded": unfolded, "guard": rule_state}
    if kind is not UNNAMED:
        after["rule"] = kind.name
        after["unpaired"] = unpaired
    verdict = replace(
        judged,
        reason=why_not if why_not and not judged.fire else judged.reason,
        folded=not why_not,
        value=finite_or_none(measured.heldout),
        in_loop=finite_or_none(measured.in_loop),
        warning=_warning(unfolded, why_not, unpaired, reports.why_no_metric) or judged.warning,
    )
    if config.max_extra:
        after["extra"], verdict = fold_extra(before.get("extra"), config, reports.extra, verdict)
    return FoldResult(after, verdict, far_shares=far_shares, far_in_loop=far_in_loop)


def _returned(kind: type[GuardRule], found: Any) -> tuple[Any, Verdict]:
    """The state and verdict that a rule's `fold` returned. Raises `ConfigError` for anything else, and no JSON."""
    match found:
        case (state, Verdict() as judged):
            pass
        case _:
            raise ConfigError(f"the guard rule {kind.name!r} returned {found!r}: fold returns (state, Verdict).")
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the guard rule {kind.name!r} returned a state that is not JSON: {error}.") from None
    return state, judged


def _warning(unfolded: int, why: str, unpaired: int, why_no_metric: str) -> str:
    if unfolded >= _WARN_UNFOLDED:
        return f"{unfolded} rounds in a row could not be judged: the kill-switch is blind ({why})"
    if unpaired >= _WARN_UNFOLDED:
        return f"{unpaired} rounds in a row without a training metric: a Hacking Gap cannot be seen ({why_no_metric})"
    return ""


def fold_extra(
    state: Mapping[str, Any] | None, config: GuardConfig, metrics: Mapping[str, float | None], verdict: Verdict
) -> tuple[dict[str, Any], Verdict]:
    """Add one round of the user's own metrics; returns the next state, and the verdict, which fires above a limit.

    An exponential moving average of each limited metric is compared with its limit, beside whichever rule judges.
    `metrics`: by name; None if not observed in the round. No limit fires before `min_steps` rounds with its metric; one
    that has fired stays fired. A rule's own verdict comes first.
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
