"""`Verdict`: the guard's judgement of a round, as commits and results store it.

`guard` computes it; `protocol.rounds` decides whether it stops the run.
"""

from dataclasses import dataclass
from enum import StrEnum


class VerdictKind(StrEnum):
    """The consequence of the guard's verdict for the run: go on, warn, pause, or halt."""

    CONTINUE = "continue"
    QUARANTINE = "quarantine"  # leave the contribution of `Verdict.replica` out; the run goes on
    CONFIRM = "confirm"  # an alarm waits until the confirmation set is scored in the next round; the run goes on
    INCONCLUSIVE = "inconclusive"  # too little evidence in this round; the run goes on
    PAUSE = "pause"  # stop the run: nothing is known to be wrong, but nothing can be judged; no rollback
    HALT = "halt"  # stop the run and go back to `Verdict.rollback_to`

    @property
    def stops(self) -> bool:
        return self in (VerdictKind.PAUSE, VerdictKind.HALT)


@dataclass(frozen=True)
class Statistic:
    """A statistic that a guard rule computes, and the threshold above which the rule fires."""

    name: str
    value: float
    threshold: float

    @property
    def share(self) -> float:
        """Value divided by threshold; never below 0."""
        return max(self.value / self.threshold, 0.0) if self.threshold else 0.0


@dataclass(frozen=True)
class Verdict:
    """Whether the guard stops the run, why, and the numbers it judged. Higher scores are better."""

    fire: bool  # never False again once it is True
    reason: str  # why it fired, or why the round was not folded; empty for a clean fold
    proxy_real_gap: float  # gain of the training metric minus gain of the held-out score since the start
    folds: int  # so far, of rounds with finite numbers
    folded: bool = False  # whether this round was folded
    value: float | None = None  # held-out score of the base before the round, comparable between rounds
    in_loop: float | None = None  # the training metric that `value` was paired with
    warning: str = ""
    action: VerdictKind | None = None  # None from a rule that only fires; read `kind`
    rollback_to: int | None = None  # HALT: the round whose model is the last one above suspicion
    replica: int | None = None  # QUARANTINE: whose contribution to leave out
    heldout_root: str | None = None  # Merkle root of the items that were scored, as start.json has it
    statistics: tuple[Statistic, ...] = ()  # of the rule after this round, for display

    @property
    def kind(self) -> VerdictKind:
        """The consequence for the run: `action`, or where the guard rule sets none, what follows from `fire`."""
        if self.action is not None:
            return self.action
        if self.fire:
            return VerdictKind.HALT
        return VerdictKind.CONTINUE if self.folded else VerdictKind.INCONCLUSIVE
