"""`EarlyCollapse` and `NewLow`: detect a fall by comparing scores before and after it, without a noise estimate.

The other statistics need the long-run noise, which takes some 30 rounds to measure; a collapse in these rounds would be
part of the estimate. But exchangeable scores split into two groups that are further apart than each is wide only by a
rare chance, whatever their noise is. Only `+ - * /` and comparisons, so that every machine gets the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from diloco_orchestrator.guard.channels.alarm import Alarm, AlarmKind
from diloco_orchestrator.guard.channels.remembered import Remembered

ADVICE = "look for reward hacking or divergence there, or lower the learning rate"
BEFORE = 4  # rounds: early collapse compares the range of no more, since a healthy run moves; new low needs so many
OF_THE_GAIN = 0.125  # a fall smaller than this share of what training gained meanwhile is none

# -- early collapse
ROUNDS = 32  # from the start; then the noise is known
BETWEEN = 3  # rounds at most that belong to neither group: the fall itself
# Rounds that a fall must have lasted, and how many widths it must measure: if training gained meanwhile, and if not.
GAINED, OTHERWISE = (5, 2.0), (10, 2.5)
CONSTANT = 8  # rounds of one score that count, such as an accuracy of 0; fewer may be one score given again
STEPS = 4  # changes of value in both groups, with which they show how the score varies

# -- new low
SINCE = 10  # rounds that must lie below all before
LOW_BETWEEN = 4  # rounds that belong to neither group
NEEDS = 4.0  # times their own range by which they lie below


@dataclass(frozen=True)
class Fall:
    """A split of consecutive rounds into two groups, all scores of the later below all of the earlier one."""

    best: int  # round of the best model before the later group
    since: int  # round of the later group's first model
    ratio: float  # smallest distance of a score before from one since, by what scores vary by
    needs: float  # the ratio above which it halts
    after: int = 0  # early collapse: round of the best model from the earlier group's last one to the later group
    gained: bool = False  # early collapse: whether training gained meanwhile, by more than the width of its own groups

    @property
    def share(self) -> float:
        """Fall's ratio, distance of the two groups over their width, divided by the ratio above which the run halts."""
        return self.ratio / self.needs

    @property
    def halts(self) -> bool:
        return self.ratio > self.needs


@dataclass
class EarlyCollapse(Remembered):
    """Detector of a held-out score that falls in the first rounds of a run and stays down.

    Stored state: 2 numbers per round with both metrics, none after 32 rounds.
    """

    # Whether the first score may be left out: where the next two or three rise, and the first rise is larger than the
    # others together, it is the foot of a climb, and does not show what scores vary by.
    LEAVES_OUT_FOOT: ClassVar[bool] = True

    rows: list[list[Any]] | None = field(default_factory=list)  # model and its training metric; None: no longer judged

    def learn(self, model: int, trained: float | None) -> None:
        """Add the training metric observed in the first steps from the base of round `model`.

        None (not observed) empties the list of recent ones.
        """
        if self.rows is not None:
            self.rows = [] if trained is None else [*self.rows, [model, trained]]

    def stop(self) -> None:
        """Detect no fall any more in this run.

        The caller does so once the noise of scores is known, or a fall was dismissed.
        """
        self.rows = None

    def fall(self, scores: Sequence[float]) -> Fall | None:
        """The fall in `scores` that halts the run, else the fall closest to halting; None if the scores have no fall.

        A fall splits the rounds up to the last model into two groups. If several halt, the one with the fewest rounds
        between its groups, then the last. `scores`: held-out, of the last 32 models or of all, oldest first.
        """
        nearest: Fall | None = None
        for fall in self._falls(scores):
            if fall.halts:
                return fall
            if nearest is None or fall.share > nearest.share:
                nearest = fall
        return nearest

    def _falls(self, scores: Sequence[float]) -> Iterator[Fall]:
        rows = self.rows or []
        held = scores[len(scores) - len(rows) :]
        lost = [-row[1] for row in rows]  # so that what training gains is a fall as well
        held_since, lost_since = _groups_since(held), _groups_since(lost)
        for between in range(BETWEEN + 1):
            for end in range(len(rows) - between - GAINED[0], 0, -1):
                first, later, rounds = max(0, end - BEFORE), end + between, len(rows) - end - between
                window = slice(first + (self.LEAVES_OUT_FOOT and _has_foot(held[:end])), end)
                if held[end - 1] <= held_since[later].high:
                    continue  # no fall, as `_compared` would find: most pairs
                held_groups = _groups_since(held[window])[0], held_since[later]
                lost_groups = _groups_since(lost[window])[0], lost_since[later]
                known = _compared(held_groups, lost_groups, rounds)
                if known is not None:
                    # Rounds between the groups may have been better still: a climb, and then the fall.
                    top = max(range(end - 1, later), key=lambda index: held[index])
                    best = max(range(later), key=lambda index: held[index])
                    ratio, needs, gained = known
                    yield Fall(rows[best][0], rows[later][0], ratio, needs, rows[top][0], gained)

    def alarms(self, scores: Sequence[float]) -> list[Alarm]:
        """The alarm if held-out `scores`, one a round, have fallen early in the run and stayed down; else none."""
        fall = self.fall(scores)
        if fall is None or not fall.halts:
            return []
        training = "gained" if fall.gained else "did not gain"
        what = (
            f"early collapse: the held-out score fell after round {fall.after} and has stayed down since round "
            f"{fall.since}, by {fall.ratio:.1f} times what scores vary by before and since (halts above "
            f"{fall.needs:g}), while the training metric {training}"
        )
        return [Alarm(what, fall.best, ADVICE, AlarmKind.FALL)]

    def state(self) -> Any:
        return self.rows

    @classmethod
    def restore(cls, state: Any) -> Self:
        return cls(state)


@dataclass
class NewLow(Remembered):
    """Detector of a held-out score that stays below every earlier score of the run for ten rounds.

    Such scores need no noise estimate: their distance is compared with the earlier scores' range. Stored state: 21
    numbers.
    """

    models: list[int] = field(default_factory=list)  # the last ones, 14 at most
    # Of all scores before: rounds, changes of value, lowest, highest, model of the highest, last.
    before: list[Any] | None = None
    step: float | None = None  # smallest change between two rounds: scores can be no closer than that

    def learn(self, model: int, scores: Sequence[float]) -> None:
        """Add the held-out score of the base of round `model`, the last of `scores`.

        `scores`: of at least the last 15 bases or of all, oldest first.
        """
        if self.before is not None:
            change = abs(scores[-1] - scores[-2])
            if change and (self.step is None or change < self.step):
                self.step = change
        self.models = [*self.models, model]
        if self.before is None or self.before[0] < BEFORE or len(self.models) > SINCE + LOW_BETWEEN:
            oldest, *self.models = self.models
            self._learn_before(oldest, scores[-len(self.models) - 1])

    def _learn_before(self, model: int, score: float) -> None:
        if self.before is None:
            self.before = [1, 0, score, score, model, score]
            return
        rounds, changes, low, high, best, last = self.before
        high, best = (score, model) if score > high else (high, best)
        self.before = [rounds + 1, changes + (score != last), min(low, score), high, best, score]

    def fall(self, scores: Sequence[float], gained: float) -> Fall | None:
        """The fall to the last ten scores if they are below all before; None if not, or if they do not prove a fall.

        They do not if they recover, if the scores before changed in fewer than half of the rounds (a score that is
        repeated looks like a level), or if training gained much more than the held-out score lost. `scores`: held-out,
        of the last 15 bases or more, oldest first, the last model's included. `gained`: gain of the training metric
        since the first model.
        """
        if self.before is None or len(self.models) < SINCE or self.step is None:
            return None
        rounds, changes, lowest, high, best, _ = self.before
        last, since = scores[-len(self.models) :], scores[-SINCE:]
        highest, place = max(since), len(last) - SINCE
        width = max(highest - min(since), self.step)
        rise = 0.0
        for earlier, later in zip(since[: SINCE // 2], since[SINCE // 2 :], strict=True):
            rise += later - earlier
        # A steady recovery rises by 5/9 of its range from half to half; more than 1/5 is `width` in 5 pairs.
        if highest >= lowest or rise > width or 2 * changes < rounds - 1:
            return None
        place, lowest = self._joined(last, place, lowest)
        for model, score in zip(self.models[:place], last[:place], strict=True):
            high, best = (score, model) if score > high else (high, best)
        if high - highest <= OF_THE_GAIN * gained or lowest <= highest:
            return None
        return Fall(best, self.models[place], (lowest - highest) / width, NEEDS)

    def _joined(self, last: Sequence[float], place: int, lowest: float) -> tuple[int, float]:
        """Index of the later group's first score, and the lowest score before it.

        Scores right before the last ten belong to them if they lie below every score before. `place`: index of the ten
        in `last`; `lowest`: of all scores before `last`.
        """
        while place > 0 and last[place - 1] < min([lowest, *last[: place - 1]]):
            place -= 1
        return place, min([lowest, *last[:place]])

    def alarms(self, scores: Sequence[float], gained: float) -> list[Alarm]:
        """A list of one alarm if the last ten held-out scores lie far below all before, else an empty list.

        `scores`: held-out, oldest first. `gained`: gain of the training metric since the first model.
        """
        fall = self.fall(scores, gained)
        if fall is None or not fall.halts:
            return []
        what = (
            f"new low: since round {fall.since} the held-out score has been below every score before, by "
            f"{fall.ratio:.1f} times what it varies by since (halts above {NEEDS:g})"
        )
        return [Alarm(what, fall.best, ADVICE, AlarmKind.FALL)]


@dataclass(frozen=True)
class _Group:
    """Range, largest rise and number of changes of the scores of several consecutive rounds."""

    low: float
    high: float
    rise: float  # the largest from one round to a later one
    steps: int  # changes of value from one round to the next

    @property
    def range(self) -> float:
        return self.high - self.low


_Groups = tuple[_Group, _Group]  # before a fall, and since


def _has_foot(scores: Sequence[float]) -> bool:
    """Whether the first scores of a run, three to `BEFORE`, rise, and most of it in the first round."""
    if not 3 <= len(scores) <= BEFORE:
        return False
    first, *climbed = scores
    return climbed == sorted(climbed) and climbed[0] - first > climbed[-1] - climbed[0]


def _groups_since(values: Sequence[float]) -> list[_Group]:
    """For each index of `values`, range, largest rise and number of changes of that value and all later ones."""
    groups: list[_Group] = []
    for index in range(len(values) - 1, -1, -1):
        value = values[index]
        if not groups:
            groups.append(_Group(value, value, 0.0, 0))
            continue
        later, moved = groups[-1], value != values[index + 1]
        rise = max(later.rise, later.high - value)
        groups.append(_Group(min(value, later.low), max(value, later.high), rise, later.steps + moved))
    return groups[::-1]


def _distance(groups: _Groups) -> float:
    """Distance between the lowest value of the earlier group of rounds and the highest of the later one.

    Negative if they overlap.
    """
    return groups[0].low - groups[1].high


def _width(groups: _Groups) -> float:
    """The range that values have without a collapse: the earlier group's range, or the later one's largest rise if
    larger.

    A continuing fall is no noise, so of the later group only rises count. A single earlier value has no range; then the
    range of the later group counts.
    """
    before, since = groups
    return max(before.range, since.rise) if before.range > 0 else since.range


def _compared(held: _Groups, lost: _Groups, rounds: int) -> tuple[float, float, bool] | None:
    """A fall of the held-out score from an earlier group of rounds to a later one, as (ratio, limit, gained).

    `ratio`: distance of the groups over their width; `limit`: ratio above which the run halts; `gained`: whether the
    training metric rose meanwhile by more than its own width. None if the groups overlap, if the scores vary too
    little, or if the training metric explains the fall. `held`: (earlier, later group) of the held-out score; `lost`:
    those of the negated training metric. `rounds`: number of rounds since the fall.
    """
    distance, width, steps = _distance(held), _width(held), held[0].steps
    varies = steps + held[1].steps >= STEPS or (steps >= 2 and rounds >= CONSTANT)
    if distance <= 0 or width <= 0 or not varies:
        return None
    gain, usual = _distance(lost), _width(lost)
    if gain > usual:
        return (distance / width, GAINED[1], True) if distance > OF_THE_GAIN * gain else None
    if rounds >= OTHERWISE[0] and distance > usual:
        return distance / width, OTHERWISE[1], False
    return None
