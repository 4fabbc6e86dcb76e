"""`SequentialGuard`: judges the rounds of a run one after another, at a stated rate of false halts.

A pure fold: (state, evidence) -> (state, verdict). The statistics are in `guard.metric_channels` and
`guard.kl_channel`; how a round's evidence is measured is left to the fold of rounds. How often it is wrong, and how
late, is in docs/kill-switch.md.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from diloco_orchestrator.guard.evidence import Evidence
from diloco_orchestrator.guard.kl_channel import KLChannel
from diloco_orchestrator.guard.metric_channels import FIRST_JUDGED, MetricChannels
from diloco_orchestrator.guard.vault import Alarm, AlarmKind, Vault
from diloco_orchestrator.protocol.verdict import Statistic, Verdict, VerdictKind

_NONFINITE_ROUNDS = 2  # in a row
_LATCHED = "latched: "


@dataclass(frozen=True, kw_only=True)
class SequentialGuard:
    """Halts on contaminated, non-finite or sinking held-out scores, on training that leaves them behind, and on drift.

    `fold` takes the state of the round before (None at the start) and the round's evidence, and returns the next state
    and the verdict. It changes nothing else and gives the same bits on every machine. The state is JSON of about 3 KB
    whatever the run's length, and names the rule and its settings. With `vault_sigmas` an alarm of held-out score or
    training metric waits for the evidence of the next round (`Evidence.vault`) before it halts (`guard.vault`).
    """

    rule: ClassVar[str] = "sequential-v1"  # a change of the arithmetic or of the state's form needs a new name

    min_steps: int = 20  # models before other than sudden alarms may fire
    threshold: float = 10.0  # of the drawdown and gap statistics, in sigmas added up over rounds
    gap_sigmas: float = 5.0  # gap of training over held-out that is no reason to halt
    kl_hard_stop: float = 0.08  # nats per token, token mean
    quorum: float = 0.5  # share of the held-out items that a conclusive round needs
    pause_after: int = 5  # inconclusive rounds in a row
    vault_sigmas: float | None = None  # standard errors of a fall that confirm an alarm; None: there is no vault set

    def __post_init__(self) -> None:
        for name in ("threshold", "gap_sigmas", "kl_hard_stop"):
            _check(name, getattr(self, name), lambda v: v > 0, "a number > 0")
        _check("quorum", self.quorum, lambda v: 0 < v <= 1, "a number in (0, 1]")
        for name in ("min_steps", "pause_after"):
            value = getattr(self, name)
            _check(name, value, lambda v: isinstance(v, int) and v >= 1, "a whole number >= 1")
        if self.vault_sigmas is not None:
            _check("vault_sigmas", self.vault_sigmas, lambda v: v > 0, "a number > 0")

    @property
    def digest(self) -> str:
        """Names the rule with these settings: the first 16 hex digits of a sha256."""
        settings = {name: float(value) for name, value in asdict(self).items() if value is not None}
        text = json.dumps([self.rule, settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # -- folding -------------------------------------------------------------------------------------------------

    def fold(self, state: Mapping[str, Any] | None, evidence: Evidence) -> tuple[dict[str, Any], Verdict]:
        """The state and the verdict after one more round.

        The last round again with the same evidence returns the state and its verdict unchanged. Raises `ValueError`
        for the last round with other evidence, an earlier round, and a state of another rule or other settings.
        """
        run = self._restore(state)
        if run.last is not None and evidence.round <= run.last[0]:
            if evidence.plain() != run.last:
                raise ValueError(
                    f"round {evidence.round} cannot be folded after round {run.last[0]}: rounds go forward, and a "
                    "round folded again must bring the same evidence."
                )
            assert state is not None
            return dict(state), run.verdict
        run.last = evidence.plain()
        run.verdict = self._judge(run, evidence)
        return run.to_json(self), run.verdict

    def verdict_of(self, state: Mapping[str, Any] | None) -> Verdict:
        """The verdict of the last fold; before the first, one that continues."""
        return self._restore(state).verdict

    def _restore(self, state: Mapping[str, Any] | None) -> "_Run":
        if state is None:
            return _Run()
        if state.get("rule") != self.rule or state.get("settings") != self.digest:
            raise ValueError(
                f"the guard's state is of rule {state.get('rule')!r} with settings {state.get('settings')!r}, not of "
                f"{self.rule!r} with settings {self.digest!r}: judge a run with the rule and settings of its "
                "run.json, or begin with a new state."
            )
        run = _Run.from_json(state)
        run.verdict = replace(run.verdict, statistics=self._statistics(run))
        return run

    # -- judging -------------------------------------------------------------------------------------------------

    def _judge(self, run: "_Run", evidence: Evidence) -> Verdict:
        before = run.verdict
        why_not = self._why_not(evidence)
        nonfinite = evidence.is_nonfinite
        run.nonfinite = run.nonfinite + 1 if nonfinite else 0
        run.inconclusive = run.inconclusive + 1 if why_not and not nonfinite else 0
        alarms = self._alarms(run, evidence, conclusive=not why_not and not nonfinite)
        if not why_not and not nonfinite:
            run.model = evidence.scored_round
        numbers = self._numbers(run, evidence, folded=not why_not and not nonfinite)
        if before.fire:
            reason = before.reason if before.reason.startswith(_LATCHED) else _LATCHED + before.reason
            return Verdict(fire=True, reason=reason, action=before.kind, rollback_to=before.rollback_to, **numbers)
        if self.vault_sigmas is not None and (alarms or run.vault.waiting):
            verdict = self._after_the_vault(run, alarms, evidence, numbers)
            if verdict is not None:
                return verdict
        elif alarms:
            return _halt(alarms[0], alarms[0].what, numbers)
        if run.inconclusive >= self.pause_after:
            reason = (
                f"{run.inconclusive} rounds in a row could not be judged (the last one: {why_not}). Mend the held-out "
                "evaluation and resume; nothing says that the model is at fault."
            )
            return Verdict(fire=True, reason=reason, action=VerdictKind.PAUSE, **numbers)
        if evidence.suspect is not None:
            reason = (
                f"replica {evidence.suspect} is left out of round {evidence.round}: "
                f"{evidence.why_suspect or 'its local scores differ from the others'}. Inspect its data and machine."
            )
            return Verdict(
                fire=False, reason=reason, action=VerdictKind.QUARANTINE, replica=evidence.suspect, **numbers
            )
        if why_not or nonfinite:
            reason = why_not or "inconclusive: the metrics are not finite"
            return Verdict(fire=False, reason=reason, action=VerdictKind.INCONCLUSIVE, **numbers)
        return Verdict(fire=False, reason="", action=VerdictKind.CONTINUE, **numbers)

    def _after_the_vault(
        self, run: "_Run", alarms: list[Alarm], evidence: Evidence, numbers: dict[str, Any]
    ) -> Verdict | None:
        """The verdict of a round with an alarm, or after one that waits; None if what waited is dismissed."""
        certain = [alarm for alarm in alarms if alarm.kind is AlarmKind.CERTAIN]
        if certain:
            return _halt(certain[0], certain[0].what, numbers)
        waiting = run.vault.waiting
        if waiting is None:
            assert evidence.heldout is not None, "an alarm of the metrics has them"
            why_not = run.vault.why_not(alarms[0], evidence.heldout, evidence.closing)
            if why_not:
                return _halt(alarms[0], f"{alarms[0].what} ({why_not})", numbers)
            reason = run.vault.ask(alarms[0])
        else:
            assert self.vault_sigmas is not None
            heldout = _finite_or_none(evidence.heldout)
            answer = run.vault.answer(evidence.vault, heldout, run.metrics.sigma, self.vault_sigmas)
            if answer.halts or (answer.waits and evidence.closing):
                return _halt(waiting, f"{waiting.what}; {answer.words}", numbers)
            if not answer.waits:
                run.metrics.dismiss(evidence.scored_round)
                numbers["warning"] = f"dismissed: {waiting.what}; {answer.words}"
                numbers["statistics"] = self._statistics(run)
                return None
            reason = f"{waiting.what}; {answer.words}."
        return Verdict(fire=False, reason=reason, action=VerdictKind.CONFIRM, **{**numbers, "warning": reason})

    def _why_not(self, evidence: Evidence) -> str:
        if evidence.heldout is None and not evidence.is_nonfinite:
            return evidence.why_not or "inconclusive: the model has no held-out score"
        if evidence.items < self.quorum * evidence.total_items:
            needed = math.ceil(self.quorum * evidence.total_items)
            return f"inconclusive: {evidence.items} of {evidence.total_items} held-out items, {needed} needed"
        return ""

    def _alarms(self, run: "_Run", evidence: Evidence, *, conclusive: bool) -> list[Alarm]:
        """What fires in this round, the gravest first."""
        model, alarms = evidence.scored_round, []
        if evidence.contaminated:
            what = (
                f"{evidence.contaminated} held-out items were found in the training data of round {model}, so that the "
                "held-out score no longer measures anything new"
            )
            alarms.append(Alarm(what, run.model, "take them out of the training data"))
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
            alarms += sudden
            if run.metrics.count >= max(self.min_steps, FIRST_JUDGED):
                alarms += slow
        return alarms

    def _numbers(self, run: "_Run", evidence: Evidence, *, folded: bool) -> dict[str, Any]:
        value, in_loop = _finite_or_none(evidence.heldout), _finite_or_none(evidence.in_loop)
        gap = run.verdict.proxy_real_gap
        if folded and value is not None and in_loop is not None:
            gap = run.metrics.gap(value, in_loop)
        return {
            "proxy_real_gap": gap,
            "folds": run.metrics.count,
            "folded": folded,
            "value": value,
            "in_loop": in_loop,
            "warning": run.metrics.narrow if folded else "",
            "statistics": self._statistics(run),
        }

    def _statistics(self, run: "_Run") -> tuple[Statistic, ...]:
        found = run.metrics.statistics(self.threshold)
        if run.kl.level is not None:
            found.append(("KL", run.kl.level, self.kl_hard_stop))
        found.append(("rounds not judged", float(run.inconclusive), self.pause_after))
        return tuple(Statistic(*each) for each in found)


class _Run:
    """The mutable inside of one fold: everything that the state holds."""

    def __init__(self) -> None:
        self.metrics, self.kl, self.vault = MetricChannels(), KLChannel(), Vault()
        self.nonfinite = self.inconclusive = 0  # rounds in a row
        self.model = 0  # the last one that was judged
        self.last: list[Any] | None = None  # evidence
        self.verdict = Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=0, action=VerdictKind.CONTINUE)

    def to_json(self, guard: SequentialGuard) -> dict[str, Any]:
        judged = asdict(replace(self.verdict, statistics=()))
        del judged["statistics"]  # they follow from the rest
        return {
            "rule": guard.rule,
            "settings": guard.digest,
            "metrics": self.metrics.state(),
            "kl": self.kl.state(),
            **({} if guard.vault_sigmas is None else {"vault": self.vault.state()}),
            "counts": [self.nonfinite, self.inconclusive, self.model],
            "last": self.last,
            "verdict": {name: value for name, value in judged.items() if value not in (None, "")},
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "_Run":
        run = cls()
        run.metrics, run.kl = MetricChannels.restore(state["metrics"]), KLChannel.restore(state["kl"])
        run.vault = Vault.restore(state["vault"]) if "vault" in state else Vault()
        run.nonfinite, run.inconclusive, run.model = state["counts"]
        run.last = list(state["last"])
        given = {"reason": "", **state["verdict"]}
        run.verdict = Verdict(**{**given, "action": VerdictKind(given["action"])})
        return run


def _halt(alarm: Alarm, what: str, numbers: Mapping[str, Any]) -> Verdict:
    reason = f"{what}. Roll back to round {alarm.rollback_to} and {alarm.what_to_do}."
    return Verdict(fire=True, reason=reason, action=VerdictKind.HALT, rollback_to=alarm.rollback_to, **numbers)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check(name: str, value: Any, allowed: Any, words: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not allowed(value):
        raise ValueError(f"{name}={value!r} must be {words}.")
