"""`Falls`: a held-out score that has fallen below its best level and stays there; `BestLevel` is that level.

Page's CUSUM twice: each round adds by how many sigmas the score is below the best level, less a slack, never below
zero. What one round can add is limited, so that neither one nor three bad rounds halt, however bad. A score on its way
back up does not halt: spikes, warm restarts and bumps heal, and a fault does not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind, Shown
from diloco_orchestrator.guard.channels.early import ADVICE
from diloco_orchestrator.guard.channels.noise import KEPT, Noise
from diloco_orchestrator.guard.channels.remembered import Remembered, added

FIRST_JUDGED = 8  # rounds after which the noise is known well enough, its uncertainty included in sigma
# Rounds in a block: short ones follow a climb, long ones know a plateau more exactly. Three lucky scores of hundreds of
# rounds say little, and only the first rounds climb so fast that eight lag far behind.
BLOCKS = (3, 8, 32)
SHORT_UNTIL = 32
# Scores of a climb, and sigmas between its halves from which on it counts as one: noise makes none so steep, and blocks
# lag little behind slower ones. The rise of its last pair as a share of what the halves say: a climb that has stopped
# is none. The error of its end in sigmas, found by simulation.
CLIMB, STEEP, STILL, CLIMB_ERROR = 8, 4.0, 0.8, 0.55
CHANGES = 4  # from one round to the next, the smallest of which is that of few items' answers
_DEFAULT = 10.0
_NAMES = ("slow fall", "fast fall")
# Recovery, in sigmas: the last two scores above the two before; or the last four above the lowest four of twelve
# rounds, by that much and by this share of what is still missing. Then a sum is cut to this share of its threshold.
_RISES, _HEALS, _SHARE, _CUT = 0.5, 0.5, 0.4, 0.6
_LOST = (
    100.0  # sigmas below the run's first score, from which on no recovery counts: an exploded model shrinks for ever
)
_SINKS = 0.3  # sigmas by which the last two scores are below the two before in a fall that goes on
_WITHIN = 12


@dataclass(frozen=True)
class Level:
    """A level that a held-out score has surely reached: its mean over some rounds, less what chance explains."""

    bound: float  # the level less what chance explains
    mean: float  # the level as measured
    rounds: int  # in which it was measured
    last: int  # their last model


@dataclass
class BestLevel(Remembered):
    """The best level that a held-out score has surely reached, from means over blocks of rounds and ends of climbs.

    The mean of a block lies half a block behind a climb. So where the last eight scores climb steeply, their straight
    line is a fourth measure: its end, but no more than the highest of them, so that a climb that stops is no fall.
    Stored state: 12 numbers.
    """

    # By block, the climb last: level as measured, size of second differences then, and last model.
    best: list[Any] = field(default_factory=lambda: [None] * (len(BLOCKS) + 1))

    def learn(self, model: int, scores: Sequence[float], noise: Noise) -> None:
        """Compare the blocks of rounds that end with the base of round `model` with the best blocks so far.

        `noise` and `scores` (held-out, oldest first) include that base.
        """
        for index, size in enumerate(BLOCKS):
            if noise.count < max(size, FIRST_JUDGED - 2) or (index == 0 and noise.count > SHORT_UNTIL):
                continue
            block = scores[-size:]
            self._compare(index, (added(block) - max(block) - min(block)) / (size - 2), model, noise)
        end = _end_of_climb(scores[-CLIMB:], noise.sigma()) if noise.count >= CLIMB else None
        if end is not None:
            self._compare(len(BLOCKS), end, model, noise)

    def _compare(self, index: int, level: float, model: int, noise: Noise) -> None:
        found, best = [level, noise.present(), model], self.best[index]
        if best is None or self._bound(index, found, noise) > self._bound(index, best, noise):
            self.best[index] = found

    def level(self, noise: Noise) -> Level | None:
        """The measured level of the held-out score with the highest lower bound; None until enough scores exist."""
        sizes = [*BLOCKS, CLIMB]
        found = [
            Level(self._bound(index, best, noise), best[0], size, best[2])
            for index, (size, best) in enumerate(zip(sizes, self.best, strict=True))
            if best is not None
        ]
        return max(found, key=lambda each: each.bound) if found else None

    def _bound(self, index: int, block: list[Any], noise: Noise) -> float:
        """The mean of a block of rounds less what chance explains, by the noise of that time or now, whichever is
        larger.

        The best of many blocks is above its level by chance; by how much grows with the logarithm of the rounds: of
        all, because a plateau after a fast climb has almost as many chances.
        """
        level, sigma = block[0], noise.sigma(block[1])
        errors = math.sqrt(max(noise.count.bit_length() - 1, 1))
        part = 1 / math.sqrt(BLOCKS[index]) if index < len(BLOCKS) else CLIMB_ERROR
        return float(level - errors * part * sigma)


def _end_of_climb(scores: Sequence[float], sigma: float) -> float | None:
    """The level at the last of `scores` if they climb steeply to their end, else None. `sigma`: their noise.

    From the two middle scores of each half, so that an outlier makes no climb; no higher than the highest score.
    """
    half = len(scores) // 2
    earlier, later = (sorted(part)[1:-1] for part in (scores[:half], scores[half:]))
    now = added(later) / len(later)
    rise = now - added(earlier) / len(earlier)
    if not rise > STEEP * sigma or _mean(scores, 2) - _mean(scores[:-2], 2) < STILL * rise / 2:
        return None
    # The later half's mean lies (half - 1) / 2 rounds before the end, and a round rises by rise / half.
    return min(now + rise * (half - 1) / (2 * half), max(scores))


@dataclass
class Falls(Remembered):
    """Two CUSUM statistics of how far the held-out score is below its best level. Stored state: 6 numbers."""

    # Slack, most that one round counts, threshold (at the setting's default of 10): the first finds small falls, and
    # big ones after 6 rounds; the second those that still go on after 5, as a hack does and a spike does not.
    CUSUMS: ClassVar = ((0.35, 1.4, 5.3), (0.5, 1.85, 5.45))
    STEPS: ClassVar = 3.0  # smallest changes between two rounds, that are no fall: answers of some items

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    zero: list[int] = field(default_factory=lambda: [0, 0])  # the last models at which they were zero
    top: list[Any] | None = None  # highest score, and its model
    recovers: bool = field(default=False, init=False)  # whether the last judged score was on its way back up

    def begin(self, model: int) -> None:
        """Set both statistics to zero, so that they add up from the base of round `model` on."""
        self.sums, self.zero = [0.0, 0.0], [model, model]

    def learn(self, model: int, score: float) -> None:
        """Keep `score`, the held-out score of the base of round `model`, if none before was higher."""
        if self.top is None or score >= self.top[0]:
            self.top = [score, model]

    def judge(
        self,
        model: int,
        scores: Sequence[float],
        noise: Noise,
        best: BestLevel,
        weight: float,
        threshold: float,
        lost: float,
        shown: Shown,
    ) -> list[Alarm]:
        """Add the held-out score of the base of round `model` to both statistics; returns alarms for those above their
        limits.

        `noise` and `best`, noise and best level of the scores before; while one of them is unknown the result is empty.

        `scores`: held-out, of the last bases and of this one, each minus the run's first score. `weight`: fraction of
        the held-out items that were scored. `lost`: how much shares of the held-out set whose fall does not count lower
        the mean. `shown`: how the alarm's text shows scores.
        """
        level, sigma, alarms = best.level(noise), noise.sigma(), []
        if level is None or not sigma > 0:
            return []
        below = (level.bound - self.allowed(noise) - scores[-1] - lost) / sigma
        rise = (_mean(scores, 2) - _mean(scores[:-2], 2)) / sigma
        usual = sigma * (noise.bend / noise.present() if noise.bend > 0 else 1.0)  # an explosion is no burst of noise
        self.recovers = scores[-1] > -_LOST * usual and (rise > _RISES or _heals(scores, level.bound, sigma))
        for index, (slack, most, at_default) in enumerate(self.CUSUMS):
            limit = threshold / _DEFAULT * at_default
            total = max(0.0, self.sums[index] + weight * (min(max(below, -most), most) - slack))
            if self.recovers:
                total = min(total, _CUT * limit)
            if index == 1 and rise > -_SINKS:
                total = min(total, limit)
            self.sums[index] = total
            if total == 0.0:
                self.zero[index] = model
            elif total > limit:
                alarms.append(self._alarm(index, total, limit, scores, level, sigma, shown))
        return alarms

    def _alarm(
        self,
        index: int,
        total: float,
        limit: float,
        scores: Sequence[float],
        level: Level,
        sigma: float,
        shown: Shown,
    ) -> Alarm:
        now, since = _mean(scores, 3), self.zero[index]
        first, reached, side = level.last - level.rounds + 1, shown.of(level.bound), shown.worse
        what = (
            f"the held-out score is {side} its best level: {shown.of(now):.4g} in the mean of the last 3 rounds, "
            f"{(level.bound - now) / sigma:.1f} sigmas of {sigma:.2g} {side} the {reached:.4g} that it has surely "
            f"reached (rounds {first} to {level.last}). What adds up since round {since} is {total:.4g}, and "
            f"halts above {limit:.4g}"
        )
        return Alarm(what, since if self.top is None else self.top[1], ADVICE, AlarmKind.FALL)

    def allowed(self, noise: Noise) -> float:
        """The distance below the best level up to which a score has not fallen: `STEPS` of its smallest changes.

        0 until the score has changed four times, because fewer changes do not say how small one can be.
        """
        return self.STEPS * (noise.step or 0.0) if noise.bends >= CHANGES - 1 else 0.0

    def statistics(self, threshold: float) -> list[tuple[str, float, float]]:
        """(name, value, threshold) of both CUSUM statistics, as the guard's verdict lists them."""
        rows = zip(_NAMES, self.sums, self.CUSUMS, strict=True)
        return [(name, total, threshold / _DEFAULT * at_default) for name, total, (_, _, at_default) in rows]


def _heals(scores: Sequence[float], level: float, sigma: float) -> bool:
    """Whether the held-out score has made up for a part of its fall below `level` within the last rounds."""
    now = _mean(scores, 4)
    lowest = min(_mean(scores[: len(scores) - ago], 4) for ago in range(min(_WITHIN, len(scores) - 3)))
    return now - lowest > _SHARE * max(level - now, 0.0) + _HEALS * sigma


def _mean(values: Sequence[float], count: int) -> float:
    return added(values[-count:]) / count


assert max(BLOCKS) <= KEPT
