"""`SuddenFall`: detects a held-out score that falls by many times the largest change seen before."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.remembered import Remembered

TIMES = 8.0  # the largest recent change of either metric between two rounds
FADES = 0.9  # of the largest change with each new score: the first rounds of a run change most, and say little later
ROUNDS = 2  # in a row
FROM = 6  # rounds before it is judged
QUARTET = 4  # rounds in the level that it is measured from


@dataclass
class SuddenFall(Remembered):
    """Statistic: the number of rounds in a row in which the held-out score is far below its best four-round mean."""

    largest: float = 0.0  # recent change of either metric between two rounds
    strikes: int = 0  # rounds in a row with a sudden fall
    last_trained: float | None = None
    quartet: list[Any] = field(default_factory=lambda: [0.0, 0, None, 0])  # sum, count, best mean, its last model
    at_best: int = 0  # the last model not below the best level by more than one usual change

    def begin(self, model: int) -> None:
        """Restart from this model; the size of usual changes stays."""
        self.quartet, self.strikes, self.at_best = [0.0, 0, None, 0], 0, model

    def judge(self, model: int, held: float, last: Sequence[float]) -> list[Alarm]:
        """The alarms after the next model. `last`: the scores before it, oldest first, at most 32."""
        best, best_model = self.quartet[2], self.quartet[3]
        if best is None or best - held <= self.largest:
            self.at_best = model
        if len(last) < FROM or best is None:
            return []
        self.strikes = self.strikes + 1 if best - held > TIMES * self.largest > 0 else 0
        if self.strikes < ROUNDS:
            return []
        times = f"{(best - held) / self.largest:.0f} times"
        what = f"the held-out score fell below its level of round {best_model} by {times} the largest recent change"
        # A change that was the largest once, and has faded, may have let a fallen model pass for one at the best level.
        ago = model - self.at_best
        fallen = 0 < ago <= len(last) and best - last[-ago] > TIMES * self.largest
        advice = "look for a loss spike or bad data there, or lower the learning rate"
        return [Alarm(what, best_model if fallen else self.at_best, advice, AlarmKind.FALL)]

    def learn(self, model: int, held: float, trained: float | None, last: Sequence[float]) -> None:
        """Add the next model. `last`: as for `judge`."""
        if last and not self.strikes:  # a fall must not set the scale that it is judged by
            change = abs(held - last[-1])
            self.largest = max(FADES * self.largest if change else self.largest, change)
            if trained is not None and self.last_trained is not None:
                self.largest = max(self.largest, abs(trained - self.last_trained))
        self.last_trained = trained
        total, count, best, at = self.quartet
        total, count = total + held, count + 1
        if count == QUARTET:
            if best is None or total / count > best:
                best, at = total / count, model
            total, count = 0.0, 0
        self.quartet = [total, count, best, at]
