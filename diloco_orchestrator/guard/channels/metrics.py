"""`MetricChannels`: all statistics by which `SequentialGuard` judges held-out score and training metric.

They are in units of the measured noise, so that a metric times 100 gives the same verdicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from diloco_orchestrator.guard.channels.alarm import Alarm, Shown
from diloco_orchestrator.guard.channels.apart import Apart
from diloco_orchestrator.guard.channels.early import ROUNDS, EarlyCollapse, NewLow
from diloco_orchestrator.guard.channels.falls import FIRST_JUDGED, BestLevel, Falls
from diloco_orchestrator.guard.channels.hacking_gap import FIRST_JUDGED as FIRST_GAP
from diloco_orchestrator.guard.channels.hacking_gap import HackingGap
from diloco_orchestrator.guard.channels.noise import Noise
from diloco_orchestrator.guard.channels.outliers import FallingShares
from diloco_orchestrator.guard.channels.remembered import RememberedTogether
from diloco_orchestrator.guard.channels.step_down import StepDown


@dataclass
class MetricChannels(RememberedTogether):
    """All statistics of `SequentialGuard` about held-out score and training metric, updated once a round.

    Values are kept relative to the first round's: a constant added to a metric changes no verdict.
    """

    # Whether alarms show losses as losses: rules before showed them with the sign with which they are folded.
    AS_REPORTED: ClassVar[bool] = True

    trained: float | None = None  # training metric of the last model that has one
    noise: Noise = field(default_factory=Noise)  # of the held-out score
    gap_noise: Noise = field(default_factory=Noise)  # of the training metric minus it
    best: BestLevel = field(default_factory=BestLevel)
    falls: Falls = field(default_factory=Falls)
    gap: HackingGap = field(default_factory=HackingGap)
    early: EarlyCollapse = field(default_factory=EarlyCollapse)
    new_low: NewLow = field(default_factory=NewLow)
    step_down: StepDown = field(default_factory=StepDown)
    shares: FallingShares = field(default_factory=FallingShares)
    apart: Apart = field(default_factory=Apart)
    narrow: str = field(default="", init=False)  # shares whose fall does not count in this round
    sign: float = field(default=1.0, init=False)  # from a score as folded to the metric's own sign: -1 for losses
    far: str = field(default="", init=False)  # the replica whose training metric is far from all others'

    def judge(
        self,
        model: int,
        heldout: float,
        in_loop: float | None,
        weight: float,
        threshold: float,
        tolerance: float | None,
        gains: Mapping[str, float],
    ) -> tuple[list[Alarm], list[Alarm]]:
        """Judge the scores of the base of round `model`, and add them to every statistic.

        `weight`: fraction of the held-out items that were scored. `threshold`: value of a statistic above which it
        halts (a setting). `tolerance`: gap, in sigmas, of training metric to held-out score that does not halt; None:
        no gap does. `gains`: by share of the held-out set, its score's gain since the start; empty if not known.
        Returns (alarms that may fire in any round, alarms that may fire after `min_steps`).
        """
        if self.count == 0:
            self.falls.begin(model)
            self.gap.begin(model)
        fallen, lost, moved = self.shares.judge(gains)
        measured = self.since_the_first(0, heldout)
        held, shown = measured + moved, Shown(heldout - measured, self.sign if self.AS_REPORTED else 1.0)
        trained = None if in_loop is None else self.since_the_first(1, in_loop)
        self.narrow = _narrow(fallen)
        at_once: list[Alarm] = []
        slow: list[Alarm] = []
        scores = [*self.noise.last, held]
        if self.count >= FIRST_JUDGED:
            counted = weight, threshold, lost, shown
            at_once = self.falls.judge(model, scores, self.noise, self.best, *counted)
        if self.count >= FIRST_GAP and trained is not None and tolerance is not None:
            measured_by = self.gap_noise, scores, self.falls.allowed(self.noise), self.noise.bend
            slow = self.gap.judge(model, held, trained, heldout + moved, *measured_by, tolerance, threshold)
        self._learn(model, measured, held, trained)
        known = self.noise.step or 0.0, lost, self.falls.recovers
        at_once += self.step_down.judge(model, self.noise.last, *known, threshold, shown)
        at_once += self.early.alarms(self.noise.last)
        return at_once + self.new_low.alarms(self.noise.last, trained or 0.0), slow

    def compare(self, trained: Mapping[int, float]) -> None:
        """Compare the replicas' training metrics of the round, by replica id, to find one far from all others."""
        self.far = self.apart.judge(trained)

    @property
    def warning(self) -> str:
        """Sentences about the last round that halt nothing, such as one replica far from all others; or empty."""
        return "; ".join(filter(None, [self.narrow, self.far]))

    def dismiss(self, model: int) -> None:
        """Restart the statistics at the base of round `model` after a dismissed alarm; noise and levels stay."""
        self.falls.begin(model)
        self.gap.begin(model)
        self.early.stop()
        self.new_low, self.step_down = NewLow(), type(self.step_down)()

    def _learn(self, model: int, measured: float, held: float, trained: float | None) -> None:
        self.count += 1
        self.early.learn(model, trained)
        if self.count > ROUNDS:
            self.early.stop()
        self.falls.learn(model, measured)
        self.noise.add(held)
        self.new_low.learn(model, self.noise.last)
        self.best.learn(model, self.noise.last, self.noise)
        if trained is not None:
            self.trained = trained
            self.gap_noise.add(trained - held)
            self.gap.learn(model, held, trained, self.noise)

    # -- reading -------------------------------------------------------------------------------------------------

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, value, threshold) of each statistic, as the guard's verdict lists them."""
        early = self.early.fall(self.noise.last)
        low = self.new_low.fall(self.noise.last, self.trained or 0.0)
        return [
            *self.falls.statistics(threshold),
            *self.step_down.statistics(threshold),
            ("Hacking Gap", self.gap.total, threshold),
            ("early collapse", early.share if early else 0.0, 1.0),
            ("new low", low.share if low else 0.0, 1.0),
        ]

    @property
    def sigma(self) -> float:
        """The long-run standard deviation of the held-out score. Before the first score: 0.0."""
        return self.noise.sigma()

    @property
    def best_model(self) -> int | None:
        """The round whose base has the highest held-out score; None before the first score."""
        return None if self.falls.top is None else int(self.falls.top[1])

    def outlook(self, threshold: float) -> str:
        """A sentence: how many rounds the statistics still need, or the fall that they notice within 15 rounds.

        `threshold`: of the slow falls (a setting).
        """
        if self.count < FIRST_JUDGED:
            missing = FIRST_JUDGED - self.count
            return f"needs {missing} more round{'s' if missing > 1 else ''} to know the noise of the held-out score"
        level, sigma = self.best.level(self.noise), self.noise.sigma()
        if level is None or not sigma > 0:
            return "waits for a held-out score that varies, to know its noise"
        slack, _, limit = self.falls.CUSUMS[0]
        worse = (
            level.mean - level.bound + self.falls.allowed(self.noise) + (slack + threshold / 10 * limit / 15) * sigma
        )
        return (
            f"would halt within 15 rounds of a held-out score that stays {worse:.2g} worse than its best level, that "
            f"of rounds {level.last - level.rounds + 1} to {level.last} (noise {sigma:.2g})"
        )


def _narrow(fallen: Sequence[int]) -> str:
    if not fallen:
        return ""
    return (
        f"the held-out score falls on a few shares alone ({', '.join(map(str, fallen))}), which does not halt: look at "
        "the replicas that score them"
    )
