"""`Vault`: confirms an alarm of the guard on a second, rarely used held-out set before the alarm halts the run.

An alarm waits for one round, in which the replicas score that set on the round's base and on the best earlier one. This
file only decides by the scores.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind

_ROUNDS = 2  # without enough scores, after which the alarm halts unconfirmed


@dataclass(frozen=True)
class VaultChange:
    """Mean and standard error of an item's score change from the best earlier base to this one. Higher is better."""

    mean: float  # NaN if most scores are not finite
    error: float  # its standard error


@dataclass(frozen=True)
class Answer:
    """The decision about an alarm of the guard that awaits confirmation: confirmed, dismissed or still waiting."""

    halts: bool
    waits: bool
    words: str  # a part of a sentence


class Vault:
    """The best base so far, and the guard's alarm that awaits scores on the confirmation set (a second held-out set).

    Stored state: 3 values.
    """

    def __init__(self) -> None:
        self._best: list[Any] | None = None  # held-out score and round of the best base that can be rebuilt
        self._waiting: dict[str, Any] | None = None

    def learn(self, model: int, heldout: float) -> None:
        """Keep the base of round `model`, which can be rebuilt, if its held-out score `heldout` is the best so far."""
        if self._best is None or heldout > self._best[0]:
            self._best = [heldout, model]

    def why_not(self, alarm: Alarm, heldout: float, final_evaluation: bool) -> str:
        """Reason why an alarm halts at once; empty if the second held-out set (confirmation set) is to be scored first.

        The confirmation set cannot be scored in the final evaluation round, nor without a kept base that scored better
        than `heldout`, the round's held-out score.
        """
        if final_evaluation:
            return "this is the last round, so that the vault set is not asked"
        if self._best is None or (alarm.kind is AlarmKind.FALL and self._best[0] <= heldout):
            return "no better base is kept that the vault set could be compared on"
        return ""

    def ask(self, alarm: Alarm) -> str:
        """Make an alarm wait for the next round's scores on the confirmation set. Returns the verdict's sentence."""
        assert self._best is not None
        against = self._best[1]
        kept = {name: value for name, value in asdict(alarm).items() if value is not None}
        self._waiting = {"alarm": kept, "against": against, "score": self._best[0], "missed": 0}
        return f"{alarm.what}. Before a halt the vault set is scored on the next model and on that of round {against}."

    @property
    def waiting(self) -> Alarm | None:
        if self._waiting is None:
            return None
        given = self._waiting["alarm"]
        return Alarm(**{**given, "kind": AlarmKind(given["kind"])})

    @property
    def against(self) -> int | None:
        """The round whose base is scored next on the confirmation set, beside the newest; None if no alarm waits."""
        return None if self._waiting is None else int(self._waiting["against"])

    def answer(
        self, change: VaultChange | None, heldout: float | None, noise: float, sigmas: float, share: float
    ) -> Answer:
        """The decision about the waiting alarm: confirmed, dismissed, or still waiting.

        The mean change confirms a fall if it is negative by more than `sigmas` standard errors and by more than
        `noise` (or half of the held-out score's fall if that is smaller), because two healthy bases differ on every
        set, and if the interval of `sigmas` standard errors around it reaches `share` of the held-out score's fall. A
        Hacking Gap is confirmed by a change of no more than `noise` and `sigmas` standard errors; as a fall is, if
        without the held-out score's fall there would be no such gap.

        Args:
            change: on the confirmation set, in the next round; None if too few items were scored.
            heldout: held-out score of the same base; None if it has none, and then the size of its fall is not asked.
            noise: long-run standard deviation of the held-out score.
            share: of the held-out score's fall, that confirms it.
        """
        alarm, waiting = self.waiting, self._waiting
        assert alarm is not None and waiting is not None
        against = f"against round {waiting['against']}"
        if change is None:
            waiting["missed"] += 1
            words = f"the vault set was not scored by enough replicas {against}"
            if waiting["missed"] < _ROUNDS:
                return Answer(False, True, f"{alarm.what}; {words} yet")
            self._waiting = None
            return Answer(True, False, f"{words} in {_ROUNDS} rounds, so that nothing refutes it")
        self._waiting = None
        if math.isnan(change.mean):
            return Answer(True, False, f"the vault set confirms it: its scores are not finite {against}")
        shown = f"it changed by {change.mean:+.3g} ± {change.error:.2g} {against}"
        fell = 0.0 if heldout is None else waiting["score"] - heldout
        if alarm.kind is AlarmKind.FALL or (alarm.excess is not None and alarm.excess < fell):
            least = max(sigmas * change.error, min(noise, fell / 2) if fell > 0 else noise)
            most = sigmas * change.error - change.mean
            confirmed = change.mean < -least and most >= share * fell
            if change.mean < -least and not confirmed:
                shown += (
                    f"; that is a fall of at most {most:.3g} ({sigmas:g} standard errors added), less than {share:.0%} "
                    f"of the held-out score's, {fell:.3g}"
                )
        else:
            confirmed = change.mean <= max(sigmas * change.error, noise)
        if confirmed:
            return Answer(True, False, f"the vault set confirms it: {shown}")
        return Answer(False, False, f"the vault set does not confirm it: {shown}")

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "waiting": self._waiting}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        vault = cls()
        vault._best = None if state["best"] is None else list(state["best"])
        vault._waiting = None if state["waiting"] is None else dict(state["waiting"])
        return vault
