"""`NewLow`: a held-out score that has left every score before it behind for ten rounds, whatever it did before.

A collapse right after a steep climb is hidden from the other statistics: the climb counts as noise. But scores that
all lie below every score of the run so far, the first one included, need no noise to be known. Their distance is
compared with their own range. Only `+ - * /` and comparisons, so that every machine gets the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from diloco_orchestrator.guard.vault import Alarm, AlarmKind

SINCE = 10  # rounds that must lie below all before
BETWEEN = 4  # rounds that belong to neither group: the fall itself
BEFORE = 4  # rounds at least before
NEEDS = 4.0  # times their own range by which they lie below
OF_THE_GAIN = 0.125  # a fall from the best score that is smaller than this share of what training gained is none


@dataclass(frozen=True)
class Low:
    """Scores that all lie below every score before them."""

    best: int  # round of the best model before
    since: int  # round of the first model that is below every score before
    ratio: float  # smallest distance of a score before from one since, by the range of those since

    @property
    def share(self) -> float:
        """The ratio as a share of the one that is needed."""
        return self.ratio / NEEDS

    @property
    def halts(self) -> bool:
        return self.ratio > NEEDS


class NewLow:
    """The scores so far, divided into those long ago and the last ones. State: 21 numbers."""

    def __init__(self) -> None:
        self._models: list[int] = []  # the last ones, 14 at most
        # Of all scores before: rounds, changes of value, lowest, highest, model of the highest, last.
        self._before: list[Any] | None = None
        self._step: float | None = None  # smallest change between two rounds: scores can be no closer than that

    def learn(self, model: int, scores: Sequence[float]) -> None:
        """Learn the next model. `scores`: held-out, of the last 15 models at least or of all, oldest first."""
        if self._before is not None:
            change = abs(scores[-1] - scores[-2])
            if change and (self._step is None or change < self._step):
                self._step = change
        self._models = [*self._models, model]
        if self._before is None or self._before[0] < BEFORE or len(self._models) > SINCE + BETWEEN:
            oldest, *self._models = self._models
            self._learn_before(oldest, scores[-len(self._models) - 1])

    def _learn_before(self, model: int, score: float) -> None:
        if self._before is None:
            self._before = [1, 0, score, score, model, score]
            return
        rounds, changes, low, high, best, last = self._before
        high, best = (score, model) if score > high else (high, best)
        self._before = [rounds + 1, changes + (score != last), min(low, score), high, best, score]

    def low(self, scores: Sequence[float], gained: float) -> Low | None:
        """The last ten scores, if they are below all before; None if not, or if they say nothing.

        They say nothing if they recover, if the scores before changed in fewer than half of the rounds (one score that
        is given again for ten rounds looks like a level), or if training gained much more than was lost. `scores`: as
        in `learn`, with the last model's. `gained`: by the training metric since the first model.
        """
        if self._before is None or len(self._models) < SINCE or self._step is None:
            return None
        rounds, changes, lowest, high, best, _ = self._before
        last, since = scores[-len(self._models) :], scores[-SINCE:]
        highest, place = max(since), len(last) - SINCE
        width = max(highest - min(since), self._step)
        rise = 0.0
        for earlier, later in zip(since[: SINCE // 2], since[SINCE // 2 :], strict=True):
            rise += later - earlier
        # A steady recovery rises by 5/9 of its range from half to half; more than 1/5 is `width` in 5 pairs.
        if highest >= lowest or rise > width or 2 * changes < rounds - 1:
            return None
        while place > 0 and last[place - 1] < lowest:
            place -= 1
        for model, score in zip(self._models[:place], last[:place], strict=True):
            high, best = (score, model) if score > high else (high, best)
        if high - highest <= OF_THE_GAIN * gained:
            return None
        return Low(best, self._models[place], (lowest - highest) / width)

    def alarms(self, scores: Sequence[float], gained: float) -> list[Alarm]:
        """The alarm, if it halts. Arguments as in `low`."""
        low = self.low(scores, gained)
        if low is None or not low.halts:
            return []
        what = (
            f"new low: since round {low.since} the held-out score has been below every score before, by "
            f"{low.ratio:.1f} times what it varies by since (halts above {NEEDS:g})"
        )
        advice = "look for reward hacking or divergence there, or lower the learning rate"
        return [Alarm(what, low.best, advice, AlarmKind.FALL)]

    def state(self) -> list[Any]:
        return [self._models, self._before, self._step]

    @classmethod
    def restore(cls, state: Sequence[Any]) -> Self:
        new_low = cls()
        models, before, new_low._step = state
        new_low._models, new_low._before = list(models), None if before is None else list(before)
        return new_low
