"""`SequentialGuard`: judges the rounds of a run one after another, at a stated rate of false halts.

`guard.channels` has the statistics, `guard.fold` computes a round's numbers, and
docs/inside/kill-switch-figures.md has error rates and delays.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.hacking_gap import FIRST_JUDGED as FIRST_GAP
from diloco_orchestrator.guard.channels.kl import KLChannel
from diloco_orchestrator.guard.channels.metrics import MetricChannels
from diloco_orchestrator.guard.channels.remembered import copied
from diloco_orchestrator.guard.rule import LATCHED, Evidence, GuardRule, check_number, finite_or_none, plain
from diloco_orchestrator.guard.vault import Vault
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Statistic, Verdict, VerdictKind

_NONFINITE_ROUNDS = 2  # in a row
_QUORUM = 0.5  # share of the held-out items that a round needs, as `guard.fold` has it; part of the settings' digest
# Sigmas of a lasting drop that is noticed at last, and more of them times the rounds of delay, at the default
# threshold: found by simulation, within a tenth from 8 to 60 rounds.
_NOTICED, _FASTER = 0.73, 13.4
_NOTICED_WITHIN = 15  # rounds, for `GuardConfig.notice_drop`


@dataclass(frozen=True, kw_only=True)
class SequentialGuard(GuardRule):
    """Halts on non-finite or sinking held-out scores, on a training metric that outruns them, and on KL drift.

    The state is JSON of 6 to 12 KB (4 to 32 replicas) whatever the run's length, and names the rule and its settings.
    With `vault_sigmas` an alarm about held-out score or training metric halts only if the next round's scores on the
    confirmation set (`Evidence.vault`) confirm it (`guard.vault`).
    """

    name: ClassVar[str] = "sequential-v5"
    channels: ClassVar[type[MetricChannels]] = MetricChannels
    asks_vault: ClassVar[bool] = True
    vault_share: ClassVar[float] = 0.25  # of a fall of the held-out score, that the confirmation set must show

    min_steps: int = 20  # models before a Hacking Gap or drift above its budget may fire
    threshold: float = 10.0  # of the Hacking Gap, in sigmas added up over rounds; those of falls are about half of it
    gap_sigmas: float | None = 5.0  # gap of training over held-out that is no reason to halt; None: no gap is one
    kl_hard_stop: float = 0.08  # nats per token, token mean
    pause_after: int = 5  # inconclusive rounds in a row
    vault_sigmas: float | None = (
        None  # standard errors of a fall that confirm an alarm; None: there is no confirmation set
    )
    losses: bool = False  # held-out scores are losses with the opposite sign: for texts alone, and so not in the digest

    def __post_init__(self) -> None:
        for name in ("threshold", "kl_hard_stop"):
            check_number(name, getattr(self, name), lambda v: v > 0, "a number > 0")
        for name in ("min_steps", "pause_after"):
            value = getattr(self, name)
            check_number(name, value, lambda v: isinstance(v, int) and v >= 1, "a whole number >= 1")
        for name in ("gap_sigmas", "vault_sigmas"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), lambda v: v > 0, "a number > 0")

    @classmethod
    def of(cls, config: GuardConfig, heldout: HeldoutSet) -> Self:
        """Rule with the settings in `config`. It judges a Hacking Gap of rewards only: of losses it is memorisation."""
        return cls(
            min_steps=config.min_steps,
            threshold=config.threshold,
            gap_sigmas=config.gap_sigmas if heldout.metric == "reward" else None,
            kl_hard_stop=config.kl_hard_stop,
            pause_after=config.pause_after,
            vault_sigmas=config.vault_sigmas if heldout.vault else None,
            losses=heldout.metric == "loss",
        )

    @classmethod
    def check_set(cls, config: GuardConfig, items: int) -> None:
        """Raise `ConfigError`, with the number needed, if `items` items are too few to notice `notice_drop`."""
        drop = config.notice_drop
        if drop is None:
            return
        needed = items_needed(drop, item_sd=config.item_sd, rounds=_NOTICED_WITHIN)
        if items < needed:
            raise ConfigError(
                f"the held-out set of {items} items is too small for the sensitivity asked: to notice a drop of "
                f"{drop:g} within {_NOTICED_WITHIN} rounds takes {needed} items (one item's score varies by "
                f"{config.item_sd:g}). Add items, or ask for a larger drop or more rounds."
            )

    @classmethod
    def vault_base(cls, state: Mapping[str, Any] | None) -> int | None:
        return Vault.restore(state["vault"]).against if state and "vault" in state else None

    @classmethod
    def outlook(cls, state: Mapping[str, Any] | None, config: GuardConfig) -> str:
        metrics = cls.channels.restore(copied(state["metrics"])) if state else cls.channels()
        return metrics.outlook(config.threshold)

    @property
    def digest(self) -> str:
        """A digest of the rule's name and settings, by which states name them: the first 16 hex digits of a sha256."""
        given = {**asdict(self), "quorum": _QUORUM}
        del given["losses"]
        settings = {name: float(value) for name, value in given.items() if value is not None}
        text = json.dumps([self.name, settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # -- folding -------------------------------------------------------------------------------------------------

    def fold(self, state: Mapping[str, Any] | None, evidence: Evidence) -> tuple[dict[str, Any], Verdict]:
        """The state and the verdict after one more round, as for every `GuardRule`.

        Raises `ValueError` for the last round again or an earlier one, and for a state of another rule or other
        settings.
        """
        run = self._restore(state)
        if run.last is not None and evidence.round <= run.last[0]:
            raise ValueError(f"round {evidence.round} cannot be folded after round {run.last[0]}: rounds go forward.")
        run.last = _recorded(evidence)
        run.verdict = self._judge(run, evidence)
        return run.to_json(self), run.verdict

    def _restore(self, state: Mapping[str, Any] | None) -> "_Run":
        if state is None:
            return _Run(self)
        if state.get("rule") != self.name or state.get("settings") != self.digest:
            raise ValueError(
                f"the guard's state is of rule {state.get('rule')!r} with settings {state.get('settings')!r}, not of "
                f"{self.name!r} with settings {self.digest!r}: judge a run with the rule and settings of its "
                "run.json, or begin with a new state."
            )
        return _Run.from_json(state, self)

    # -- judging -------------------------------------------------------------------------------------------------

    def _judge(self, run: "_Run", evidence: Evidence) -> Verdict:
        before = run.verdict
        conclusive = evidence.heldout is not None and not evidence.is_nonfinite
        run.nonfinite = run.nonfinite + 1 if evidence.is_nonfinite else 0
        run.inconclusive = 0 if conclusive or evidence.is_nonfinite else run.inconclusive + 1
        alarms = self._alarms(run, evidence, conclusive=conclusive)
        if conclusive:
            run.model = evidence.model
        numbers = self._numbers(run, evidence, folded=conclusive)
        if before.fire:
            reason = before.reason if before.reason.startswith(LATCHED) else LATCHED + before.reason
            return Verdict(fire=True, reason=reason, action=before.kind, rollback_to=before.rollback_to, **numbers)
        if self.vault_sigmas is not None and (alarms or run.vault.waiting):
            verdict = self._after_the_vault(run, alarms, evidence, numbers)
            if verdict is not None:
                return verdict
        elif alarms:
            return _halt(run, alarms[0], alarms[0].what, numbers)
        if run.inconclusive >= self.pause_after:
            reason = (
                f"{run.inconclusive} rounds in a row could not be judged (the last one: {evidence.why_not}). Mend the "
                "held-out evaluation and resume; nothing says that the model is at fault."
            )
            return Verdict(fire=True, reason=reason, action=VerdictKind.PAUSE, **numbers)
        if not conclusive:
            reason = evidence.why_not or "inconclusive: the metrics are not finite"
            return Verdict(fire=False, reason=reason, action=VerdictKind.INCONCLUSIVE, **numbers)
        return Verdict(fire=False, reason="", action=VerdictKind.CONTINUE, **numbers)

    def _after_the_vault(
        self, run: "_Run", alarms: list[Alarm], evidence: Evidence, numbers: dict[str, Any]
    ) -> Verdict | None:
        """The verdict of a round in which an alarm is raised, or awaits scores on the confirmation set.

        It halts, or waits for a round; None if that set's scores dismiss the alarm, and the round goes on without it.
        `run`: the statistics; `alarms`: those of this round; `numbers`: further fields of the verdict.
        """
        certain = [alarm for alarm in alarms if alarm.kind is AlarmKind.CERTAIN]
        if certain:
            return _halt(run, certain[0], certain[0].what, numbers)
        waiting = run.vault.waiting
        if waiting is None:
            assert evidence.heldout is not None, "an alarm of the metrics has them"
            why_not = run.vault.why_not(alarms[0], evidence.heldout, evidence.final_evaluation)
            if why_not:
                return _halt(run, alarms[0], f"{alarms[0].what} ({why_not})", numbers)
            reason = run.vault.ask(alarms[0])
        else:
            assert self.vault_sigmas is not None
            heldout = finite_or_none(evidence.heldout)
            noise, sigmas = run.metrics.sigma, self.vault_sigmas
            answer = run.vault.answer(evidence.vault, heldout, noise, sigmas, self.vault_share)
            if answer.halts or (answer.waits and evidence.final_evaluation):
                return _halt(run, waiting, f"{waiting.what}; {answer.words}", numbers)
            if not answer.waits:
                run.metrics.dismiss(evidence.model)
                numbers["warning"] = f"dismissed: {waiting.what}; {answer.words}"
                numbers["statistics"] = self._statistics(run)
                return None
            reason = f"{waiting.what}; {answer.words}."
        return Verdict(fire=False, reason=reason, action=VerdictKind.CONFIRM, **{**numbers, "warning": reason})

    def _alarms(self, run: "_Run", evidence: Evidence, *, conclusive: bool) -> list[Alarm]:
        """The alarms that fire in this round, the most serious first; empty if none does.

        `conclusive`: whether enough held-out items have finite scores, so that scores and training metric are judged.
        """
        model, alarms = evidence.model, []
        if run.nonfinite >= _NONFINITE_ROUNDS:
            what = f"nonfinite: no finite metrics in {run.nonfinite} consecutive rounds"
            alarms.append(Alarm(what, run.model, "look for an overflow there, or lower the learning rate"))
        if evidence.kl_to_init is not None and math.isfinite(evidence.kl_to_init):
            wrong = run.kl.judge(evidence.kl_to_init, model, self.kl_hard_stop, self.min_steps)
            if wrong:
                back = run.kl.clean if run.kl.clean is not None else 0
                alarms.append(Alarm(wrong, back, "raise the KL penalty, or lower the learning rate"))
        if conclusive:
            assert evidence.heldout is not None
            if self.vault_sigmas is not None and evidence.rebuildable:
                run.vault.learn(model, evidence.heldout)
            run.metrics.sign = -1.0 if self.losses else 1.0
            weight = evidence.items / evidence.total_items if evidence.total_items else 1.0
            sudden, slow = run.metrics.judge(
                model,
                evidence.heldout,
                evidence.in_loop,
                weight,
                self.threshold,
                self.gap_sigmas,
                evidence.gains,
            )
            run.metrics.compare(evidence.trained)
            alarms += sudden
            if run.metrics.count >= max(self.min_steps, FIRST_GAP):
                alarms += slow
        return alarms

    def _numbers(self, run: "_Run", evidence: Evidence, *, folded: bool) -> dict[str, Any]:
        value, in_loop = finite_or_none(evidence.heldout), finite_or_none(evidence.in_loop)
        gap = run.verdict.proxy_real_gap
        if folded and value is not None and in_loop is not None:
            gap = run.metrics.gained_apart(value, in_loop)
        return {
            "proxy_real_gap": gap,
            "folds": run.metrics.count,
            "folded": folded,
            "value": value,
            "in_loop": in_loop,
            "warning": run.metrics.warning if folded else "",
            "statistics": self._statistics(run),
        }

    def _statistics(self, run: "_Run") -> tuple[Statistic, ...]:
        found = run.metrics.statistics(self.threshold)
        if run.kl.level is not None:
            found.append(("KL", run.kl.level, self.kl_hard_stop))
        found.append(("rounds not judged", float(run.inconclusive), self.pause_after))
        return tuple(Statistic(*each) for each in found)


class _Run:
    """The statistics of `SequentialGuard` while one round is added."""

    def __init__(self, guard: SequentialGuard) -> None:
        self.metrics, self.kl, self.vault = guard.channels(), KLChannel(), Vault()
        self.nonfinite = self.inconclusive = 0  # rounds in a row
        self.model = 0  # the last round that was judged
        self.last: list[Any] | None = None  # evidence, as `_recorded`
        self.verdict = Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=0, action=VerdictKind.CONTINUE)

    def to_json(self, guard: SequentialGuard) -> dict[str, Any]:
        judged = asdict(replace(self.verdict, statistics=()))
        del judged["statistics"]  # they follow from the rest
        return {
            "rule": guard.name,
            "settings": guard.digest,
            "metrics": self.metrics.state(),
            "kl": self.kl.state(),
            **({} if guard.vault_sigmas is None else {"vault": self.vault.state()}),
            "counts": [self.nonfinite, self.inconclusive, self.model],
            "last": self.last,
            "verdict": {name: value for name, value in judged.items() if value not in (None, "")},
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], guard: SequentialGuard) -> "_Run":
        run, state = cls(guard), copied(state)
        run.metrics, run.kl = guard.channels.restore(state["metrics"]), KLChannel.restore(state["kl"])
        run.vault = Vault.restore(state["vault"]) if "vault" in state else Vault()
        run.nonfinite, run.inconclusive, run.model = state["counts"]
        run.last = state["last"]
        given = {"reason": "", **state["verdict"]}
        run.verdict = Verdict(**{**given, "action": VerdictKind(given["action"])})
        return run


def _halt(run: _Run, alarm: Alarm, what: str, numbers: Mapping[str, Any]) -> Verdict:
    """The verdict that `alarm` stops the run, with the round to resume from: no later than the best scored base.

    `what`: first sentence of its reason. `numbers`: further fields of the verdict.
    """
    best = run.metrics.best_model
    back = alarm.rollback_to if best is None else min(best, alarm.rollback_to)
    reason = f"{what}. Roll back to round {back} and {alarm.what_to_do}."
    return Verdict(fire=True, reason=reason, action=VerdictKind.HALT, rollback_to=back, **numbers)


def _recorded(evidence: Evidence) -> list[Any]:
    """The evidence as JSON for the state, in the field order of version 1.

    Five fields of that order are always empty: the model (it follows from the round), held-out items found in training
    data, whether numbers were reported as not finite, and a suspected replica with the reason.
    """
    why_not = evidence.why_not if evidence.heldout is None else ""
    vault = None if evidence.vault is None else [plain(evidence.vault.mean), plain(evidence.vault.error)]
    metrics = [plain(evidence.heldout), plain(evidence.in_loop), evidence.items, evidence.total_items]
    unmeasured = [0, False, None, ""]
    rest = [why_not, dict(evidence.gains), vault, evidence.rebuildable, evidence.final_evaluation]
    return [evidence.round, None, *metrics, plain(evidence.kl_to_init), *unmeasured, *rest]


def items_needed(
    drop: float, *, item_sd: float, rounds: int = 15, autocorrelation: float = 0.5, threshold: float = 10.0
) -> int:
    """Held-out items with which `SequentialGuard` halts about `rounds` rounds after the score fell by `drop` for good.

    The drop must be .73 + 13.4 / rounds sigmas, as simulations of the rule say; sigma of a score of n items is
    `item_sd` * sqrt((1 + a) / (1 - a) / n).

    Args:
        drop: in the metric's unit.
        item_sd: standard deviation of one item's score between rounds, at most 0.5 for scores in [0, 1].
        rounds: rounds from the fall to the halt; fewer take more items.
        autocorrelation: of the score's noise from round to round, AR(1).
        threshold: `GuardConfig.threshold`.

    Raises `ValueError` for a number out of range.
    """
    if not (drop > 0 and item_sd > 0 and rounds >= 1 and 0 <= autocorrelation < 1 and threshold > 0):
        raise ValueError(
            f"drop={drop!r}, item_sd={item_sd!r}, rounds={rounds!r}, autocorrelation={autocorrelation!r}, "
            f"threshold={threshold!r}: all must be > 0, rounds >= 1 and autocorrelation in [0, 1)."
        )
    sigmas = _NOTICED + _FASTER * (threshold / 10) / rounds
    long_run = item_sd * item_sd * (1 + autocorrelation) / (1 - autocorrelation)
    return math.ceil(long_run * (sigmas / drop) ** 2)
