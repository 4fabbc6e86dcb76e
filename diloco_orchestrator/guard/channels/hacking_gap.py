"""`HackingGap`: a guard statistic of a training reward that gains while the held-out reward does not improve.

Only rewards are judged. A training loss that falls while the held-out loss does not change is memorisation, which every
long training shows; `Falls` detects when the held-out score becomes worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.early import BETWEEN
from diloco_orchestrator.guard.channels.noise import Noise
from diloco_orchestrator.guard.channels.remembered import Remembered, added

FIRST_JUDGED = 18  # rounds: the difference of two metrics is noisier than one
BLOCK = 8  # rounds of a mean
WIDTHS = 2.0  # times their range by which the gaps before must lie below those since
FEWEST = 6  # different rounds before, of at most `BLOCK` that are compared with those since
_SLACK, _MOST = 0.25, 3.5  # sigmas of a round that do not count, and that count at most
_IMPROVED = 3.5  # standard errors by which a block must beat the reference to become it
# A held-out score that no longer changes is one draw of its noise, low or high. It has surely fallen if it lost more
# than so many times the mean size of its second differences (2.5 standard deviations of AR(1) .5 noise, 3.9 of white);
# where both metrics moved apart at once also if it lost this share of itself, because a fall in the first rounds is
# itself a part of that mean.
SURELY, SHARE = 2.0, 0.5
# A gap that is no reason to halt, as a share of what the held-out score has gained, and of the score itself.
_OF_THE_GAIN, _OF_THE_SCORE = 0.25, 0.2


@dataclass
class HackingGap(Remembered):
    """A CUSUM of the gap: the gain of the training metric minus that of the held-out score.

    Both gains count from the reference, the block of 8 rounds up to which the held-out mean last improved beyond noise;
    a new reference resets the sum. Each round adds (gap - allowed gap) / sigma, limited to ±3.5, minus 0.25; the sum
    stays >= 0. Sigma is the long-run standard deviation of training metric minus held-out score. A round in which both
    metrics are those of the round before adds nothing, unless the held-out score has surely fallen: it is no new
    evidence. Where both moved apart at once and have not changed since, sigma is half the smallest change: the noise is
    then less than what was measured while they moved. An alarm is raised when the sum is above the
    threshold, unless the last 8 rounds have the best held-out mean. The stored state is the fields below: 24 numbers.
    """

    # Rounds in which neither metric may change for that: a reward that is always won, and a score of no item right.
    STILL: ClassVar[int | None] = BLOCK

    total: float = 0.0
    zero: int = 0  # the last model at which it was zero
    last: list[list[float]] = field(default_factory=lambda: [[], []])  # held-out and training, of up to 8 models
    # Mean held-out score, mean training metric and last model: of the best block, and of the last that improved surely.
    best: list[Any] | None = None
    reference: list[Any] | None = None

    def begin(self, model: int) -> None:
        """Set the sum of gaps to zero at the base of round `model`; the reference (best block of rounds) stays."""
        self.total, self.zero = 0.0, model

    def judge(
        self,
        model: int,
        held: float,
        trained: float,
        score: float,
        noise: Noise,
        scores: Sequence[float],
        few: float,
        bend: float,
        tolerance: float,
        threshold: float,
    ) -> list[Alarm]:
        """Add the next base's gap to the sum; returns a list of one alarm if the sum is above `threshold`, else empty.

        `held`, `trained`: held-out score and training metric, less those of the first base. `score`: held-out score as
        measured. `noise`: of training metric minus held-out score. `scores`: held-out, of the last bases, this one the
        last. `few`: change of the held-out score that may be that of a few items; 0: not known. `bend`: mean
        size of the held-out score's second differences. `tolerance`: allowed gap in sigmas of the noise.
        Empty too before the first reference, while the noise is not known, and if the last 8 rounds have the best
        held-out mean.
        """
        if self.reference is None or self.best is None:
            return []
        held_then, trained_then, since = self.reference
        lost, sigma = self.best[0] - held, noise.sigma()
        if self.STILL is not None and [held, trained] == [each[-1] for each in self.last]:
            fell = few < lost and trained > trained_then
            gaps = [*noise.last, trained - held]
            if fell and _moved_apart(scores, gaps, few, bend, score, self.STILL):
                sigma = (noise.step or 0.0) / 2
            elif lost <= max(few, SURELY * bend):
                return []
        if not sigma > 0:
            return []
        gap = (trained - trained_then) - (held - held_then)
        allowed = max(tolerance * sigma, _OF_THE_GAIN * self.best[0], _OF_THE_SCORE * abs(score - held + held_then))
        above = (gap - allowed) / sigma
        self.total = max(0.0, self.total + min(max(above, -_MOST), _MOST) - _SLACK)
        if self.total == 0.0:
            self.zero = model
        if self.total <= threshold or self._is_best(held):
            return []
        what = (
            f"Hacking Gap: since round {since}, the end of the last {BLOCK} rounds in which the held-out score surely "
            f"improved, the training metric has gained {gap:.3g} on it; {allowed:.3g} is no reason to halt. What adds "
            f"up since round {self.zero} is {self.total:.4g}; it halts above {threshold:g}"
        )
        advice = "look for reward hacking or memorisation there; check the reward"
        return [Alarm(what, self.zero, advice, AlarmKind.GAP, gap - allowed)]

    def _is_best(self, held: float) -> bool:
        """Whether the last eight rounds, this one's held-out gain `held` included, have the best mean of all."""
        newest = [*self.last[0], held][-BLOCK:]
        return self.best is None or added(newest) / len(newest) >= self.best[0]

    def learn(self, model: int, held: float, trained: float, noise: Noise) -> None:
        """Add the scores of the base of round `model` to the blocks among which the reference is chosen.

        `held`, `trained`: held-out score and training metric, less those of the first base. `noise`: of the held-out
        score.
        """
        self.last = [[*values, new][-BLOCK:] for values, new in zip(self.last, (held, trained), strict=True)]
        if len(self.last[0]) < BLOCK:
            return
        block: list[Any] = [added(values) / BLOCK for values in self.last] + [model]
        if self.best is None or block[0] > self.best[0]:
            self.best = block
        least = _IMPROVED * noise.sigma() * math.sqrt(2 / BLOCK)
        if self.reference is None or self.best[0] - self.reference[0] > least:
            self.reference, self.total = self.best, 0.0


def _moved_apart(
    held: Sequence[float], apart: Sequence[float], few: float, bend: float, score: float, still: int
) -> bool:
    """Whether both metrics moved apart within a few rounds and have not changed since, in `still` rounds or more.

    The held-out score is then below those of the rounds before, surely below their mean, and the training metric's
    distance to it above theirs by more than twice their own range and `few`. A model that no longer changes, as after
    its reward is always won, keeps a score that is as often low as high: that is no hack. Rounds that repeat both
    metrics count as one: they do not show what is usual. `held`: the last held-out scores; `apart`: the training metric
    minus the held-out score, of the last rounds with both. `bend`: mean size of the held-out score's second
    differences. `score`: that score now, as measured.
    """
    rounds = [*zip(reversed(held), reversed(apart), strict=False)]  # newest first
    different = [pair for pair, _ in groupby(rounds)]
    (now, gap), *earlier = different
    if any(pair != (now, gap) for pair in rounds[:still]) or len(rounds) < still:
        return False
    for between in range(BETWEEN + 1):
        before = earlier[between:][:BLOCK]
        if len(before) < FEWEST:
            return False
        scores, gaps = [each for each, _ in before], [each for _, each in before]
        lost = added(scores) / len(scores) - now
        fell = now < min(scores) and (lost > SURELY * bend or lost > SHARE * abs(score + lost))
        if fell and gap - max(gaps) > WIDTHS * (max(gaps) - min(gaps)) + few:
            return True
    return False
