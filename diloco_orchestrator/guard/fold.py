"""The guard's fold: adds one round's scores of the held-out shares to the guard's state and returns a verdict.

Pure. The state is JSON and part of each commit, so every round is folded exactly once, whichever replica commits and
however often replicas restart. The rule that judges the folded numbers is found by its name in the state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.errors import RecordTooNew, unknown_name
from diloco_orchestrator.guard.heldout_rule import HeldOutRule
from diloco_orchestrator.guard.rule import GuardRule, Sample
from diloco_orchestrator.guard.sequential_rule import SequentialRule
from diloco_orchestrator.protocol.records import Metric, Score
from diloco_orchestrator.protocol.verdict import Verdict

RULES: dict[str, type[GuardRule]] = {HeldOutRule.name: HeldOutRule, SequentialRule.name: SequentialRule}

# By `GuardConfig.rule`. A run keeps the rule that its state names; a new state gets the one of the settings.
_RULE_OF_SETTING = {"heldout": HeldOutRule.name, "sequential": SequentialRule.name}

# The rule of a state that names no rule: the first rule does not write its name, so that its commits keep their bytes.
_UNNAMED = HeldOutRule.name

_EMPTY: Mapping[str, Any] = {"baselines": None, "level": None, "pending": None, "inconclusive": 0, "guard": None}
_WARN_INCONCLUSIVE = 5  # inconclusive rounds in a row


@dataclass(frozen=True)
class FoldResult:
    """The guard after one round: its state, which goes into the commit, and the verdict."""

    state: dict[str, Any]
    verdict: Verdict


def fold(
    state: Mapping[str, Any] | None,
    config: GuardConfig,
    *,
    metric: str,
    round_: int,
    scores: Sequence[Score],
    in_loop: Metric | None,
    total_items: int,
    kl_to_init: float | None = None,
    entropy: float | None = None,
    reward_std: float | None = None,
) -> FoldResult:
    """Add one round's scores and training metric to the guard's state, and judge.

    The contributions of round r score base r-1, and that score is paired with the training metric of round r-1, which
    the state kept. The first round with enough scores only sets the first score of each share. `entropy` and
    `reward_std` are recorded for readers of the state; no rule judges them.

    Args:
        state: the guard's state in the commit before; None at the run's start.
        metric: "loss" or "reward": what scores and training metric measure.
        scores: at most one of each share.
        in_loop: the training metric over all averaged contributions; None if nobody observed one.
        total_items: held-out items in all shares together.

    Raises `RecordTooNew` if the state names a rule that this version does not have, `ValueError` for a share scored
    twice.
    """
    _check_distinct(scores)
    before = {**_EMPTY, **(state or {})}
    name = _RULE_OF_SETTING[config.rule] if state is None else before.get("rule", _UNNAMED)
    kind = _rule_named(name, round_)
    rule = kind.restore(config, metric, before["guard"])
    value, baselines, level, why_not = _comparable(before, scores, _too_few(scores, total_items))
    pending = Metric(**before["pending"]) if before["pending"] else None
    if not why_not and pending is None:
        why_not = "no training metric was observed in the round before"
    if not why_not and pending is not None:
        scored = sum(score.count for score in scores)
        rule.update(Sample(round_, pending.mean, value, kl_to_init, entropy, reward_std, scored, total_items))
    elif why_not.startswith("inconclusive"):
        rule.inconclusive(round_, why_not)
    inconclusive = before["inconclusive"] + 1 if why_not.startswith("inconclusive") else 0
    after = {
        "baselines": baselines,
        "level": level,
        "pending": in_loop.model_dump() if in_loop else None,
        "inconclusive": inconclusive,
        "guard": rule.state(),
    }
    if kind.name != _UNNAMED:
        after["rule"] = kind.name
    judged = rule.verdict
    verdict = replace(
        judged,
        reason=why_not if why_not and not judged.fire else judged.reason,
        folded=not why_not,
        value=_finite_or_none(value),
        in_loop=_finite_or_none(pending.mean) if pending else None,
        warning=_warning(inconclusive),
    )
    return FoldResult(after, verdict)


def _rule_named(name: Any, round_: int) -> type[GuardRule]:
    """The rule with this name. Raises `RecordTooNew` if this version does not have it."""
    if not isinstance(name, str) or name not in RULES:
        raise RecordTooNew(
            f"the guard's state before round {round_} needs a rule that this version does not have "
            f"({unknown_name('guard rule', str(name), RULES)}). Use the version of diloco-orchestrator that run.json "
            "names as package_version, or a later one."
        )
    return RULES[name]


def _check_distinct(scores: Sequence[Score]) -> None:
    numbers = [score.share for score in scores]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"shares {sorted(numbers)} hold one share twice; each is scored by one replica.")


def _too_few(scores: Sequence[Score], total_items: int) -> str:
    """The reason why the round is inconclusive: fewer than half of `total_items` were scored; empty if it is not."""
    needed = max(-(-total_items // 2), 1)
    scored = sum(score.count for score in scores)
    return "" if scored >= needed else f"inconclusive: {scored} of {total_items} held-out items, {needed} needed"


def _comparable(
    state: Mapping[str, Any], scores: Sequence[Score], inconclusive: str
) -> tuple[float, dict[str, float] | None, float | None, str]:
    """The round's held-out score in a form that is comparable between rounds, and the baselines to keep in the state.

    Returns (score, first score of each share, their mean B, why the round cannot be folded or ""). The score is the
    item-weighted mean of (score - first score) over the shares that are present, plus B, so that a missing share does
    not appear as a change of the model.
    """
    first, level = state["baselines"], state["level"]
    if inconclusive:
        return math.nan, first, level, inconclusive
    finite = all(math.isfinite(score.mean) for score in scores)
    if first is None:
        if not finite:
            return math.nan, None, None, ""  # the rule judges NaN as a nonfinite round; two in a row fire
        mean = _weighted([(score.count, score.mean) for score in scores])
        return mean, {str(score.share): score.mean for score in scores}, mean, "the first scores are the baseline"
    if not finite:
        return math.nan, first, level, ""
    known = [(score.count, score.mean - first[str(score.share)]) for score in scores if str(score.share) in first]
    if not known:
        return math.nan, first, level, "inconclusive: no share was ever scored before"
    drift = _weighted(known)
    for score in scores:
        # The first score of a share that appears only now includes the others' change so far, so that B stays.
        first = {**first, str(score.share): first.get(str(score.share), score.mean - drift)}
    everyone = _weighted([(score.count, score.mean - first[str(score.share)]) for score in scores])
    return everyone + level, first, level, ""


def _weighted(pairs: Sequence[tuple[int, float]]) -> float:
    return sum(count * value for count, value in pairs) / sum(count for count, _ in pairs)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _warning(inconclusive: int) -> str:
    if inconclusive < _WARN_INCONCLUSIVE:
        return ""
    return f"{inconclusive} rounds in a row without enough held-out scores: the kill-switch is blind"
