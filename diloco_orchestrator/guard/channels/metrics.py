"""`MetricChannels`: the statistics of a sequential rule over the held-out score and the training metric.

Five of them: a sustained drawdown of the held-out score below its best level, whatever training does; training that
gains while the held-out score does not improve (the Hacking Gap); a sudden fall; an early collapse
(`guard.channels.early`); and a new low (`guard.new_low`). All are in units of how the metrics vary, so that they do not
depend on the metrics' unit.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

from diloco_orchestrator.guard.channels.breadth import Breadth
from diloco_orchestrator.guard.channels.drawdown import BLOCKS, BestLevel
from diloco_orchestrator.guard.channels.early import ROUNDS, EarlyCollapse
from diloco_orchestrator.guard.channels.noise import Noise
from diloco_orchestrator.guard.new_low import NewLow
from diloco_orchestrator.guard.vault import Alarm, AlarmKind

FIRST_JUDGED = 18  # rounds after which noise is known well enough for statistics to add up
# Slack in sigmas per round, and threshold as a share of the setting: slow drifts, fast falls (Page's CUSUM).
CUSUMS = ((0.25, 1.0), (0.6, 0.6))
_FALL_NAMES = ("slow fall", "fast fall")
CLIP = 3.5  # sigmas at most that one round can add: no single round halts
_IMPROVED = 3.5  # standard errors by which a block of held-out scores must beat the reference to become it
_OF_THE_GAIN = 0.25  # of what held-out has gained: a gap this size is no reason to halt
_SUDDEN = 8.0  # times the largest recent change of either metric between two rounds
_FADES = 0.9  # of the largest change with each new score: the first rounds of a run change most, and say little later
_SUDDEN_ROUNDS = 2  # in a row
_SUDDEN_FROM = 6  # rounds before a sudden fall is judged
_QUARTET = 4  # rounds in the level that a sudden fall is measured from


class MetricChannels:
    """The statistics so far. Values are kept relative to the first ones: a shift of a metric changes nothing."""

    def __init__(self) -> None:
        self.count = 0  # models judged
        self._origin: list[float | None] = [None, None]  # first held-out score, first training metric
        self._noise, self._gap_noise = Noise(), Noise()
        self._best = BestLevel()
        self._falls = [0.0, 0.0]
        self._fall_zero = [0, 0]  # the last models at which they were zero
        self._gap, self._gap_zero = 0.0, 0
        # Held-out level, training level and last model of the block in which held-out improved last.
        self._reference: list[Any] | None = None
        self._training = [0.0, 0.0]  # sum and count of the training metric in the block that is being filled
        self._largest = 0.0  # recent change of either metric between two rounds
        self._last_trained: float | None = None
        self._quartet: list[Any] = [0.0, 0, None, 0]  # sum, count, best mean, last model of the best
        self._strikes = 0  # rounds in a row with a sudden fall
        self._at_best = 0  # the last model not below the best level by more than one usual change
        self._early = EarlyCollapse()
        self._new_low = NewLow()
        self._breadth = Breadth(len(CUSUMS))
        self.narrow = ""  # of the last round: a fall that does not count, because few shares carry it

    # -- one model -----------------------------------------------------------------------------------------------

    def judge(
        self,
        model: int,
        heldout: float,
        in_loop: float | None,
        weight: float,
        threshold: float,
        tolerance: float,
        gains: Mapping[str, float],
    ) -> tuple[list[Alarm], list[Alarm]]:
        """Judge the next model and learn from it.

        `weight`: share of the held-out items that were scored. `threshold`: of the slow drawdown statistic.
        `tolerance`: gap in sigmas that is no reason to halt. `gains`: of each share, empty if not known. Returns
        (alarms that may fire in any round, alarms that may fire after warm-up).
        """
        if self.count == 0:
            self._fall_zero, self._gap_zero = [model, model], model
        held = self._since_the_first(0, heldout)
        trained = None if in_loop is None else self._since_the_first(1, in_loop)
        self._breadth.begin_round(gains)
        self.narrow = ""
        sudden, slow = self._sudden(model, held), []
        if self.count >= FIRST_JUDGED:
            slow = self._drawdown(model, held, weight, threshold)
            if trained is not None:
                slow += self._hacking(model, held, trained, weight, threshold, tolerance)
        self._learn(model, held, trained)
        return sudden + self._collapse() + self._new_low.alarms(self._noise.last, trained or 0.0), slow

    def dismiss(self, model: int) -> None:
        """Start the statistics anew from this model, because what they added up was no fall; noise and levels stay."""
        self._falls, self._fall_zero = [0.0, 0.0], [model, model]
        self._breadth.dismiss()
        self._gap, self._gap_zero = 0.0, model
        self._early.stop()
        self._new_low = NewLow()
        self._quartet, self._strikes, self._at_best = [0.0, 0, None, 0], 0, model

    def _since_the_first(self, which: int, value: float) -> float:
        first = self._origin[which]
        if first is None:
            first = self._origin[which] = value
        return value - first

    def _sudden(self, model: int, held: float) -> list[Alarm]:
        best, best_model = self._quartet[2], self._quartet[3]
        if best is None or best - held <= self._largest:
            self._at_best = model
        if self.count < _SUDDEN_FROM or best is None:
            return []
        fell = best - held > _SUDDEN * self._largest > 0
        self._strikes = self._strikes + 1 if fell else 0
        if self._strikes < _SUDDEN_ROUNDS:
            return []
        times = f"{(best - held) / self._largest:.0f} times"
        what = f"the held-out score fell below its level of round {best_model} by {times} the largest recent change"
        advice = "look for a loss spike or bad data there, or lower the learning rate"
        # A change that was the largest once, and has faded, may have let a fallen model pass for one at the best level.
        ago, last = model - self._at_best, self._noise.last
        fallen = 0 < ago <= len(last) and best - last[-ago] > _SUDDEN * self._largest
        return [Alarm(what, best_model if fallen else self._at_best, advice, AlarmKind.FALL)]

    def _collapse(self) -> list[Alarm]:
        fall = self._early.fall(self._noise.last)
        if fall is None or not fall.halts:
            return []
        training = "gained" if fall.gained else "did not gain"
        what = (
            f"early collapse: the held-out score fell after round {fall.after} and has stayed down since round "
            f"{fall.since}, by {fall.ratio:.1f} times what scores vary by before and since (halts above "
            f"{fall.needs:g}), while the training metric {training}"
        )
        advice = "look for reward hacking or divergence there, or lower the learning rate"
        return [Alarm(what, fall.best, advice, AlarmKind.FALL)]

    def _drawdown(self, model: int, held: float, weight: float, threshold: float) -> list[Alarm]:
        sigma = self._noise.sigma(held)
        below = _in_sigmas(self._best.level(sigma) - held, sigma)
        alarms = []
        for index, (slack, share) in enumerate(CUSUMS):
            self._falls[index] = max(0.0, self._falls[index] + weight * (_clipped(below) - slack))
            self._breadth.add(index, zero=self._falls[index] == 0.0)
            if self._falls[index] == 0.0:
                self._fall_zero[index] = model
            elif self._falls[index] > share * threshold:
                if not self._breadth.is_broad(index, self._falls[index], sigma, share * threshold):
                    self.narrow = (
                        f"the held-out score falls since round {self._fall_zero[index]} on a few shares alone "
                        f"({', '.join(map(str, self._breadth.most(index)))}), which does not halt: look at the "
                        "replicas that score them"
                    )
                    continue
                what = (
                    f"the held-out score is below its best level since round {self._fall_zero[index]}, by {below:.1f} "
                    f"sigmas in the last round (statistic {self._falls[index]:.1f} of {share * threshold:g})"
                )
                advice = "look for reward hacking or divergence there, or lower the learning rate"
                alarms.append(Alarm(what, self._fall_zero[index], advice, AlarmKind.FALL))
        return alarms

    def _hacking(
        self, model: int, held: float, trained: float, weight: float, threshold: float, tolerance: float
    ) -> list[Alarm]:
        if self._reference is None:
            return []
        sigma = self._gap_noise.sigma(trained - held)
        gap = (trained - self._reference[1]) - (held - self._reference[0])
        above = _in_sigmas(gap - max(tolerance * sigma, _OF_THE_GAIN * self._best.gain()), sigma)
        self._gap = max(0.0, self._gap + weight * (_clipped(above) - CUSUMS[0][0]))
        if self._gap == 0.0:
            self._gap_zero = model
        if self._gap <= threshold:
            return []
        what = (
            f"Hacking Gap: the training metric gained {_in_sigmas(gap, sigma):.1f} sigmas on the held-out score, which "
            f"has not improved since round {self._reference[2]}; beyond what noise explains since round "
            f"{self._gap_zero} (statistic {self._gap:.1f} of {threshold:g})"
        )
        advice = "look for reward hacking or memorisation there; check the reward"
        return [Alarm(what, self._gap_zero, advice, AlarmKind.GAP)]

    def _learn(self, model: int, held: float, trained: float | None) -> None:
        if self._noise.last:
            self._learn_largest(held, trained)
        self._last_trained = trained
        self._learn_quartet(model, held)
        self.count += 1
        self._early.learn(model, trained)
        if self.count > ROUNDS:
            self._early.stop()
        self._breadth.learn(calm=self._falls[0] == 0.0)
        self._noise.add(held)
        self._new_low.learn(model, self._noise.last)
        if trained is not None:
            self._gap_noise.add(trained - held)
            self._training = [self._training[0] + trained, self._training[1] + 1]
        mean = self._best.add(held)
        if mean is None:
            return
        if self._training[1]:
            least = _IMPROVED * self._noise.sigma(held) * math.sqrt(2 / BLOCKS[0])
            if self._reference is None or mean - self._reference[0] > least:
                self._reference, self._gap = [mean, self._training[0] / self._training[1], model], 0.0
        self._training = [0.0, 0.0]

    def _learn_largest(self, held: float, trained: float | None) -> None:
        if self._strikes:
            return  # a fall must not set the scale that it is judged by
        change = abs(held - self._noise.last[-1])
        self._largest = max(_FADES * self._largest if change else self._largest, change)
        if trained is not None and self._last_trained is not None:
            self._largest = max(self._largest, abs(trained - self._last_trained))

    def _learn_quartet(self, model: int, held: float) -> None:
        total, count, best, at = self._quartet
        total, count = total + held, count + 1
        if count == _QUARTET:
            if best is None or total / count > best:
                best, at = total / count, model
            total, count = 0.0, 0
        self._quartet = [total, count, best, at]

    # -- reading -------------------------------------------------------------------------------------------------

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, value, threshold) of each statistic."""
        falls = [
            (name, fall, share * threshold)
            for name, fall, (_, share) in zip(_FALL_NAMES, self._falls, CUSUMS, strict=True)
        ]
        early = self._early.fall(self._noise.last)
        low = self._new_low.low(self._noise.last, self._last_trained or 0.0)
        return [
            *falls,
            ("Hacking Gap", self._gap, threshold),
            ("sudden fall", float(self._strikes), _SUDDEN_ROUNDS),
            ("early collapse", early.share if early else 0.0, 1.0),
            ("new low", low.share if low else 0.0, 1.0),
        ]

    @property
    def sigma(self) -> float:
        """The long-run standard deviation of the held-out score. Before the first score: 0.0."""
        return self._noise.sigma(self._noise.last[-1]) if self._noise.last else 0.0

    def gap(self, heldout: float, in_loop: float) -> float:
        """Gain of the training metric minus gain of the held-out score since the first model."""
        held, trained = self._origin
        return 0.0 if held is None or trained is None else (in_loop - trained) - (heldout - held)

    def state(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "origin": self._origin,
            "noise": self._noise.state(),
            "gap_noise": self._gap_noise.state(),
            "best": self._best.state(),
            "falls": [self._falls, self._fall_zero],
            "gap": [self._gap, self._gap_zero, self._reference, self._training],
            "sudden": [self._largest, self._strikes, self._last_trained, self._quartet, self._at_best],
            "early": self._early.state(),
            "new_low": self._new_low.state(),
            "breadth": self._breadth.state(),
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        channels = cls()
        channels.count, channels._origin = state["count"], list(state["origin"])
        channels._noise, channels._gap_noise = Noise.restore(state["noise"]), Noise.restore(state["gap_noise"])
        channels._best = BestLevel.restore(state["best"])
        channels._falls, channels._fall_zero = (list(part) for part in state["falls"])
        channels._gap, channels._gap_zero = state["gap"][:2]
        channels._reference, channels._training = state["gap"][2], list(state["gap"][3])
        channels._largest, channels._strikes, channels._last_trained = state["sudden"][:3]
        channels._quartet, channels._at_best = list(state["sudden"][3]), state["sudden"][4]
        channels._early = EarlyCollapse.restore(state["early"])
        channels._new_low = NewLow.restore(state["new_low"])
        channels._breadth = Breadth.restore(state["breadth"])
        return channels


def _in_sigmas(value: float, sigma: float) -> float:
    return value / sigma if sigma > 0 else 0.0


def _clipped(sigmas: float) -> float:
    return min(max(sigmas, -CLIP), CLIP)
