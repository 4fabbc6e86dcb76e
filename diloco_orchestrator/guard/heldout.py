"""`HeldOutGuard`: fires on KL drift, on a falling held-out score, or on a gap between training and held-out gains.

It judges smoothed series of numbers and can be used alone; `HeldOutRule` is the same as a rule of runs. After the
Hacking Gap of "Reward Hacking in Self-Improving Code Agents" (OpenReview ikrQWGgxYg).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.errors import Documented
from diloco_orchestrator.guard.rule import LATCHED, Evidence, GuardRule, check_number, plain
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Statistic, Verdict

_NONFINITE_ROUNDS = 2  # in a row without a finite score


@dataclass(frozen=True)
class TripwireStatus:
    """The result of one `HeldOutGuard.update`: whether the guard fired, why, and the averages that were judged."""

    fire: bool
    reason: str  # empty while it has not fired
    step: int  # the round index of the update
    proxy_real_gap: float
    in_loop_ema: float | None
    heldout_ema: float | None
    kl_ema: float | None = None  # None if `kl_to_init` was never given


class CollapseStopError(Documented, RuntimeError):
    """The guard fired. `status` is the `TripwireStatus` of a guard used alone, or the `Verdict` of a run."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.reason)
        self.status = status


@dataclass
class _Smoothed:
    ema: float | None = None
    baseline: float | None = None
    delta: float | None = None  # change by the last sample; None before the second one

    def add(self, value: float | None, alpha: float) -> None:
        before = self.ema
        self.ema = _next_average(before, value, alpha)
        self.delta = None if before is None or value is None or self.ema is None else self.ema - before
        if self.baseline is None:
            self.baseline = self.ema

    @property
    def gain(self) -> float:
        return 0.0 if self.ema is None or self.baseline is None else self.ema - self.baseline


def _next_average(previous: float | None, value: float | None, alpha: float) -> float | None:
    """The exponential moving average after `value`: `value` itself if it is the first, unchanged if it is None."""
    if value is None:
        return previous
    return value if previous is None else alpha * previous + (1 - alpha) * value


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


@dataclass(kw_only=True)
class HeldOutGuard:
    """Fires if one of these conditions holds for the moving averages of a run's metrics:

    - the KL divergence of the model from the initial one is above `kl_hard_stop`;
    - the held-out score has fallen round after round, in `decline_patience` of them while the training metric rose;
    - the training metric has gained more than `max_proxy_real_gap` above what the held-out score gained, both since
      the first update;
    - two rounds in a row brought a score that is not finite.

    The first three count only from update number `min_steps` on. Both metrics must be given so that higher is better. A
    guard that has fired stays fired. Its limits are in the metrics' unit, and noise counts as decline: with the
    defaults about 1 in 100 rounds of a healthy noisy run fires, the third condition can hold while the held-out score
    still improves, and metrics that worsen together do not fire. `SequentialGuard` has none of these weaknesses;
    docs/inside/kill-switch-figures.md compares both. `entropy` and `reward_std` are averaged and kept in the state for
    readers; no condition uses them.
    """

    kl_hard_stop: float = 0.08  # nats per token, token mean
    max_proxy_real_gap: float = 0.10  # training gain minus held-out gain, in the metrics' unit
    min_steps: int = 20  # updates before a verdict may fire
    decline_patience: int = 3  # updates in a row with the held-out score falling while training rises
    ema_alpha: float = 0.9  # weight of the past in the averages
    rise_eps: float = 1e-4  # smallest change of an average that counts

    def __post_init__(self) -> None:
        for name in ("kl_hard_stop", "max_proxy_real_gap"):
            check_number(name, getattr(self, name), lambda v: v > 0, "a number > 0")
        check_number("ema_alpha", self.ema_alpha, lambda v: 0 <= v < 1, "a number in [0, 1)")
        check_number("rise_eps", self.rise_eps, lambda v: v >= 0, "a number >= 0")
        for name in ("min_steps", "decline_patience"):
            value = getattr(self, name)
            check_number(name, value, lambda v: isinstance(v, int) and v >= 1, "a whole number >= 1")
        self._in_loop, self._heldout = _Smoothed(), _Smoothed()
        self._optional: dict[str, _Smoothed] = {}
        self._updates = 0  # with finite scores
        self._streak = 0  # declines in a row while training rises
        self._nonfinite = 0  # updates in a row without finite scores
        self._fired_reason = ""
        self._last_inputs: list[Any] | None = None
        self._last_status: TripwireStatus | None = None

    # -- folding -------------------------------------------------------------------------------------------------

    def update(
        self,
        round_idx: int,
        in_loop_reward: float,
        heldout_score: float,
        kl_to_init: float | None = None,
        entropy: float | None = None,
        reward_std: float | None = None,
    ) -> TripwireStatus:
        """Add the numbers of one round to the averages and return the status.

        `in_loop_reward`, `heldout_score`: higher is better, so negate losses. `kl_to_init`: nats per token. Numbers
        that are not finite leave the averages unchanged. The last round given again with the same values returns its
        status; the last round with other values, or an earlier one, raises `ValueError`.
        """
        inputs = [plain(v) for v in (in_loop_reward, heldout_score, kl_to_init, entropy, reward_std)]
        if self._last_inputs is not None and round_idx <= self._last_inputs[0]:
            return self._again(round_idx, inputs)
        finite = _finite(in_loop_reward) and _finite(heldout_score)
        if finite:
            self._fold_scores(in_loop_reward, heldout_score)
        self._nonfinite = 0 if finite else self._nonfinite + 1
        for name, value in (("kl_to_init", kl_to_init), ("entropy", entropy), ("reward_std", reward_std)):
            if value is not None and math.isfinite(value):
                self._optional.setdefault(name, _Smoothed()).add(float(value), self.ema_alpha)
        self._last_inputs = [round_idx, *inputs]
        self._last_status = self._status(round_idx, self._verdict())
        return self._last_status

    def _again(self, round_idx: int, inputs: list[Any]) -> TripwireStatus:
        assert self._last_inputs is not None and self._last_status is not None
        if [round_idx, *inputs] != self._last_inputs:
            raise ValueError(
                f"round {round_idx} cannot be folded after round {self._last_inputs[0]}: rounds go forward, and a "
                "round folded again must bring the same values."
            )
        return self._last_status

    def _fold_scores(self, in_loop: float, heldout: float) -> None:
        self._updates += 1
        self._in_loop.add(float(in_loop), self.ema_alpha)
        self._heldout.add(float(heldout), self.ema_alpha)
        rising = self._in_loop.delta is not None and self._in_loop.delta > self.rise_eps
        declining = self._heldout.delta is not None and self._heldout.delta < -self.rise_eps
        if not declining:
            self._streak = 0
        elif rising:
            self._streak += 1

    def _verdict(self) -> str:
        """The reason why the guard fires or has fired; empty if it does not."""
        if self._fired_reason:
            return LATCHED + self._fired_reason
        self._fired_reason = self._first_tripwire()
        return self._fired_reason

    def _first_tripwire(self) -> str:
        if self._nonfinite >= _NONFINITE_ROUNDS:
            return f"nonfinite: no finite score in {self._nonfinite} consecutive rounds"
        if self._updates < self.min_steps:
            return ""
        kl = self._kl_ema
        if kl is not None and kl > self.kl_hard_stop:
            return f"kl_to_init {kl:.4g} is above the hard stop {self.kl_hard_stop:g} nats per token"
        if self._streak >= self.decline_patience:
            return f"held-out score fell while the training metric rose in {self._streak} consecutive rounds"
        if self.proxy_real_gap() > self.max_proxy_real_gap:
            return f"Hacking Gap {self.proxy_real_gap():.4g} is above {self.max_proxy_real_gap:g}"
        return ""

    # -- reading, which never advances anything ------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """The number of updates with finite scores so far."""
        return self._updates

    @property
    def last_status(self) -> TripwireStatus | None:
        """The status that the last update returned; None before the first."""
        return self._last_status

    def should_halt(self) -> bool:
        """Whether the guard has fired."""
        return bool(self._fired_reason)

    def proxy_real_gap(self) -> float:
        """The gain of the training metric minus that of the held-out score since the start; 0.0 before any update."""
        return self._in_loop.gain - self._heldout.gain

    def statistics(self) -> list[tuple[str, float, float]]:
        """(name, value, limit) of each firing condition. Counts fire when they reach the limit, the others above it."""
        found: list[tuple[str, float, float]] = [
            ("declines in a row", self._streak, self.decline_patience),
            ("Hacking Gap", self.proxy_real_gap(), self.max_proxy_real_gap),
        ]
        return found if self._kl_ema is None else [*found, ("KL", self._kl_ema, self.kl_hard_stop)]

    @property
    def _kl_ema(self) -> float | None:
        kl = self._optional.get("kl_to_init")
        return kl.ema if kl else None

    def _status(self, round_idx: int, reason: str) -> TripwireStatus:
        return TripwireStatus(
            fire=bool(reason),
            reason=reason,
            step=round_idx,
            proxy_real_gap=self.proxy_real_gap(),
            in_loop_ema=self._in_loop.ema,
            heldout_ema=self._heldout.ema,
            kl_ema=self._kl_ema,
        )

    # -- persistence --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All averages and counts of the guard as JSON, from which `restore` continues exactly."""
        return {
            "in_loop": asdict(self._in_loop),
            "heldout": asdict(self._heldout),
            "optional": {name: asdict(smoothed) for name, smoothed in sorted(self._optional.items())},
            "updates": self._updates,
            "streak": self._streak,
            "nonfinite": self._nonfinite,
            "fired_reason": self._fired_reason,
            "last_inputs": self._last_inputs,
            "last_status": asdict(self._last_status) if self._last_status else None,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], **settings: Any) -> Self:
        """A guard with these settings that continues from `state`, which may have been taken with other settings."""
        guard = cls(**settings)
        guard._in_loop, guard._heldout = _Smoothed(**state["in_loop"]), _Smoothed(**state["heldout"])
        guard._optional = {name: _Smoothed(**smoothed) for name, smoothed in state["optional"].items()}
        guard._updates, guard._streak = state["updates"], state["streak"]
        guard._nonfinite, guard._fired_reason = state["nonfinite"], state["fired_reason"]
        guard._last_inputs = state["last_inputs"]
        guard._last_status = TripwireStatus(**state["last_status"]) if state["last_status"] else None
        return guard


class HeldOutRule(GuardRule):
    """The guard rule "heldout-v1": `HeldOutGuard` over the rounds of a run."""

    name: ClassVar[str] = "heldout-v1"
    needs_in_loop: ClassVar[bool] = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    @classmethod
    def of(cls, config: GuardConfig, heldout: HeldoutSet) -> Self:
        settings = {each.name: getattr(config, each.name) for each in fields(HeldOutGuard)}
        return cls({**settings, "max_proxy_real_gap": config.gap_that_fires(heldout.metric)})

    def fold(self, state: Mapping[str, Any] | None, evidence: Evidence) -> tuple[dict[str, Any], Verdict]:
        settings = self._settings
        guard = HeldOutGuard(**settings) if state is None else HeldOutGuard.restore(state, **settings)
        if evidence.heldout is not None:
            assert evidence.in_loop is not None, "the rule needs one"
            more = evidence.kl_to_init, evidence.entropy, evidence.reward_std
            guard.update(evidence.round, evidence.in_loop, evidence.heldout, *more)
        return guard.state(), Verdict(
            fire=guard.should_halt(),
            reason=guard.last_status.reason if guard.last_status else "",
            proxy_real_gap=guard.proxy_real_gap(),
            folds=guard.updates,
            statistics=tuple(Statistic(*each) for each in guard.statistics()),
        )


def kl_token_trust_filter(half_squared_logratio: float, threshold: float = 0.08) -> bool:
    """Whether to mask a token in a policy-gradient loss: its half squared log-ratio is above `threshold`, or is NaN."""
    return not half_squared_logratio <= threshold
