"""The guard's fold over rounds: shares of the held-out set in, a verdict and the next state out.

Pure: the state is JSON and lives in each commit, so whoever commits and however often anyone restarts, every round is
folded exactly once. The rule that judges the folded numbers is `guard.heldout`'s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco_orchestrator.guard.heldout import HeldOutGuard

_WARN_INCONCLUSIVE = 5  # rounds in a row


@dataclass(frozen=True)
class ShareScore:
    """Score of the base on one share of the held-out set; higher is better."""

    share: int
    sum: float | None  # over items; None: not finite
    count: int

    @property
    def mean(self) -> float:
        return math.nan if self.sum is None else self.sum / self.count


@dataclass(frozen=True)
class InLoop:
    """The training metric of a round over all averaged contributions; higher is better."""

    sum: float | None  # None: not finite
    count: int


@dataclass(frozen=True)
class GuardSettings:
    """`HeldOutGuard`'s fields, and how many items make a round conclusive."""

    kl_hard_stop: float = 0.08
    max_proxy_real_gap: float = 0.10
    min_steps: int = 20
    decline_patience: int = 3
    ema_alpha: float = 0.9
    rise_eps: float = 1e-4
    min_items: int | None = None  # None: half of all

    def guard_fields(self) -> dict[str, Any]:
        found = asdict(self)
        del found["min_items"]
        return found


@dataclass(frozen=True)
class Verdict:
    """What the guard says of a round."""

    fire: bool
    reason: str  # why it fired, or why the round was not folded; empty for a clean fold
    folded: bool
    value: float | None  # held-out score of the base before the round, comparable between rounds
    in_loop: float | None  # the training metric it was paired with
    proxy_real_gap: float
    folds: int  # so far
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Verdict":
        return cls(**body)


@dataclass(frozen=True)
class FoldResult:
    """The state to keep in the commit, and the verdict."""

    state: dict[str, Any]
    verdict: Verdict


def fold(
    state: Mapping[str, Any] | None,
    settings: GuardSettings,
    *,
    round_: int,
    shares: Sequence[ShareScore],
    in_loop: InLoop | None,
    total_items: int,
    kl_to_init: float | None = None,
    entropy: float | None = None,
    reward_std: float | None = None,
) -> FoldResult:
    """Fold round `round_`, whose contributions carry the score of the base before it and its own training metric.

    The score of base r-1 is paired with the training metric of round r-1, which the state kept; the first conclusive
    round only sets the shares' first scores. `state`: of the commit before, None at the run's start.
    """
    _check_distinct(shares)
    before = dict(state or {"baselines": None, "level": None, "pending": None, "inconclusive": 0, "guard": None})
    guard = _guard(before, settings)
    value, baselines, level, why_not = _comparable(before, shares, _enough(settings, shares, total_items))
    pending = before["pending"]
    if not why_not and pending is None:
        why_not = "no training metric was observed in the round before"
    if not why_not:
        guard.update(round_, _mean(pending), value, kl_to_init, entropy, reward_std)
    inconclusive = before["inconclusive"] + 1 if why_not.startswith("inconclusive") else 0
    after = {
        "baselines": baselines,
        "level": level,
        "pending": asdict(in_loop) if in_loop else None,
        "inconclusive": inconclusive,
        "guard": guard.state(),
    }
    verdict = Verdict(
        fire=guard.should_halt(),
        reason=why_not if why_not and not guard.should_halt() else _reason(guard),
        folded=not why_not,
        value=_finite_or_none(value),
        in_loop=_finite_or_none(_mean(pending)) if pending else None,
        proxy_real_gap=guard.proxy_real_gap(),
        folds=guard.updates,
        warning=_warning(inconclusive),
    )
    return FoldResult(after, verdict)


def _check_distinct(shares: Sequence[ShareScore]) -> None:
    numbers = [share.share for share in shares]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"shares {sorted(numbers)} hold one share twice; each is scored by one replica.")


def _guard(state: Mapping[str, Any], settings: GuardSettings) -> HeldOutGuard:
    if state["guard"] is None:
        return HeldOutGuard(**settings.guard_fields())
    return HeldOutGuard.restore(state["guard"], **settings.guard_fields())


def _reason(guard: HeldOutGuard) -> str:
    return guard.last_status.reason if guard.last_status else ""


def _enough(settings: GuardSettings, shares: Sequence[ShareScore], total_items: int) -> str:
    """Why the round is inconclusive; empty if enough items were scored."""
    needed = settings.min_items if settings.min_items is not None else -(-total_items // 2)
    scored = sum(share.count for share in shares)
    return (
        "" if scored >= max(needed, 1) else f"inconclusive: {scored} of {total_items} held-out items, {needed} needed"
    )


def _comparable(
    state: Mapping[str, Any], shares: Sequence[ShareScore], inconclusive: str
) -> tuple[float, dict[str, float] | None, float | None, str]:
    """(score comparable between rounds, the shares' first scores, their level B, why it cannot be folded)."""
    first, level = state["baselines"], state["level"]
    if inconclusive:
        return math.nan, first, level, inconclusive
    finite = all(math.isfinite(share.mean) for share in shares)
    if first is None:
        if not finite:
            return math.nan, None, None, ""  # folded as it is: two such rounds running must fire
        mean = _weighted([(share.count, share.mean) for share in shares])
        return mean, {str(share.share): share.mean for share in shares}, mean, "the first scores are the baseline"
    if not finite:
        return math.nan, first, level, ""
    known = [(share.count, share.mean - first[str(share.share)]) for share in shares if str(share.share) in first]
    if not known:
        return math.nan, first, level, "inconclusive: no share was ever scored before"
    drift = _weighted(known)
    for share in shares:
        # A share first seen now starts where the others are, so that its level is no jump.
        first = {**first, str(share.share): first.get(str(share.share), share.mean - drift)}
    everyone = _weighted([(share.count, share.mean - first[str(share.share)]) for share in shares])
    return everyone + level, first, level, ""


def _weighted(pairs: Sequence[tuple[int, float]]) -> float:
    return sum(count * value for count, value in pairs) / sum(count for count, _ in pairs)


def _mean(metric: Mapping[str, Any] | None) -> float:
    if metric is None or metric["sum"] is None:
        return math.nan
    return float(metric["sum"] / metric["count"])


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _warning(inconclusive: int) -> str:
    if inconclusive < _WARN_INCONCLUSIVE:
        return ""
    return f"{inconclusive} rounds in a row without enough held-out scores: the kill-switch is blind"
