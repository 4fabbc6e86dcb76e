"""`EarlyCollapse`: a held-out score that falls in the first rounds of a run and stays down, while its noise is unknown.

The other statistics need the long-run noise, which takes some 30 rounds to measure, and a collapse in these rounds is
itself part of what they measure. Here the scores before and after a fall are compared with each other: exchangeable
scores fall apart into two groups that are further from each other than each is wide only by a rare chance, whatever
their noise is. Only `+ - * /` and comparisons, so that every machine gets the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

ROUNDS = 32  # from the start; then the noise is known
BEFORE = 4  # rounds at most whose range is compared, since a healthy run moves
BETWEEN = 3  # rounds at most that belong to neither group: the fall itself
# Rounds that a fall must have lasted, and how many widths it must measure: if training gained meanwhile, and if not.
GAINED, OTHERWISE = (5, 2.0), (10, 2.5)
CONSTANT = (
    8  # rounds of one and the same score that count, such as an accuracy of 0; fewer may be one score given again
)
STEPS = 4  # changes of value in both groups, with which they show how the score varies
OF_THE_GAIN = 0.125  # a fall smaller than this share of what training gained meanwhile is none


@dataclass(frozen=True)
class Fall:
    """Two groups of rounds, all scores of the later one below all of the earlier one."""

    after: int  # round of the best model from the earlier group's last one to the later group
    best: int  # round of the best model before the later group
    since: int  # round of the later group's first model
    rounds: int  # in the later group
    ratio: float  # smallest distance of a score before from one since, by the width of the groups
    needs: float  # the ratio above which it halts
    gained: bool  # whether training gained meanwhile, by more than the width of its own groups

    @property
    def share(self) -> float:
        """The ratio as a share of the one that is needed."""
        return self.ratio / self.needs

    @property
    def halts(self) -> bool:
        return self.ratio > self.needs


class EarlyCollapse:
    """The rounds so far with both metrics, while they are few. State: 2 numbers per round, none after 32 rounds."""

    def __init__(self) -> None:
        self._rows: list[list[Any]] | None = []  # model and its training metric; None: no longer judged

    def learn(self, model: int, trained: float | None) -> None:
        """Learn the next model. One without a training metric starts the rows anew."""
        if self._rows is not None:
            self._rows = [] if trained is None else [*self._rows, [model, trained]]

    def stop(self) -> None:
        """Judge no more: the other statistics know the noise now, or the fall was no fall."""
        self._rows = None

    def fall(self, scores: Sequence[float]) -> Fall | None:
        """The fall up to the last model that halts, else the one that comes nearest to it; None if there is none.

        Of several that halt, the one with the fewest rounds between its groups, then the last one: there it fell.
        `scores`: held-out, of the last 32 models or of all, oldest first.
        """
        nearest: Fall | None = None
        for fall in self._falls(scores):
            if fall.halts:
                return fall
            if nearest is None or fall.share > nearest.share:
                nearest = fall
        return nearest

    def _falls(self, scores: Sequence[float]) -> Iterator[Fall]:
        rows = self._rows or []
        held = scores[len(scores) - len(rows) :]
        lost = [-row[1] for row in rows]  # so that what training gains is a fall as well
        held_since, lost_since = _groups_since(held), _groups_since(lost)
        for between in range(BETWEEN + 1):
            for end in range(len(rows) - between - GAINED[0], 0, -1):
                window, later, rounds = slice(max(0, end - BEFORE), end), end + between, len(rows) - end - between
                if held[end - 1] <= held_since[later].high:
                    continue  # no fall, as `_compared` would find: most pairs
                held_groups = _groups_since(held[window])[0], held_since[later]
                lost_groups = _groups_since(lost[window])[0], lost_since[later]
                known = _compared(held_groups, lost_groups, rounds)
                if known is not None:
                    # Rounds between the groups may have been better still: a climb, and then the fall.
                    top = max(range(end - 1, later), key=lambda index: held[index])
                    best = max(range(later), key=lambda index: held[index])
                    yield Fall(rows[top][0], rows[best][0], rows[later][0], rounds, *known)

    def state(self) -> list[list[Any]] | None:
        return self._rows

    @classmethod
    def restore(cls, state: Sequence[Sequence[Any]] | None) -> Self:
        early = cls()
        early._rows = None if state is None else [list(row) for row in state]
        return early


@dataclass(frozen=True)
class _Group:
    """Values of consecutive rounds."""

    low: float
    high: float
    rise: float  # the largest from one round to a later one
    steps: int  # changes of value from one round to the next

    @property
    def range(self) -> float:
        return self.high - self.low


_Groups = tuple[_Group, _Group]  # before a fall, and since


def _groups_since(values: Sequence[float]) -> list[_Group]:
    """For each value, the group of it and all later ones."""
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
    """How far all values since are below all before; negative if they are not."""
    return groups[0].low - groups[1].high


def _width(groups: _Groups) -> float:
    """What values move without a collapse: their range before, or their largest rise since, if that is larger.

    A fall that goes on is no noise, so that only a rise counts. One value before has no range: then that since counts.
    """
    before, since = groups
    return max(before.range, since.rise) if before.range > 0 else since.range


def _compared(held: _Groups, lost: _Groups, rounds: int) -> tuple[float, float, bool] | None:
    """(ratio, ratio that halts, whether training gained) of a fall between two groups; None if it is none.

    `lost`: of the negated training metric. `rounds`: since the fall.
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
