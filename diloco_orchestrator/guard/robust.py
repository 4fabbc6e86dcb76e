"""Means over replicas or shares in which no single one counts beyond its share, whatever number it sends.

Pure, and with the same bits on every machine: sums are exactly rounded (`math.fsum`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FEWEST = 3  # values: with fewer, a median does not show who differs
_CLIP = 2.5  # spreads from the median at which a value is clipped
_FAR = 8.0  # times that distance, beyond which the commit names a value …
_FEWEST_TO_NAME = 6  # … of at least so many: the median deviation of fewer is often tiny, or moved by one of them
_ABSURD = 1e6  # times the scale of first values, beyond which a value is clipped
_PAST = 0.9  # weight of the past in the spread


@dataclass(frozen=True)
class ClippedMean:
    """A weighted mean of clipped values, and the spread to clip the next ones by."""

    mean: float
    kept: tuple[float, ...]  # the values after clipping, in their order
    spread: float | None  # usual distance of a value from the median; None while there were too few values
    far: tuple[int, ...] = ()  # positions of values that are more than eight times as far away as the clip allows


def clipped_mean(values: Sequence[tuple[int, float]], spread: float | None) -> ClippedMean:
    """The mean of `values`, (weight, finite number) each, none of them further than 2.5 spreads from their median.

    `spread`: of the rounds before; None if there is none. The larger of it and of this round's median absolute
    deviation is used, so that values may move apart together, and a quarter of them can move the mean by 2.5 spreads
    of their share at most. One or two values are not clipped: nothing says which of them is wrong.
    """
    if len(values) < _FEWEST:
        return ClippedMean(weighted_mean(values), tuple(value for _, value in values), spread)
    middle = median([value for _, value in values])
    deviation = median([abs(value - middle) for _, value in values])
    limit = _CLIP * max(deviation, spread or 0.0)
    kept = [(weight, min(max(value, middle - limit), middle + limit)) for weight, value in values]
    after = deviation if spread is None else _PAST * spread + (1 - _PAST) * deviation
    named = len(values) >= _FEWEST_TO_NAME and spread is not None
    far = tuple(i for i, (_, value) in enumerate(values) if named and abs(value - middle) > _FAR * limit > 0)
    return ClippedMean(weighted_mean(kept), tuple(value for _, value in kept), after, far)


def first_mean(values: Sequence[tuple[int, float]]) -> float:
    """The mean of `values` as in `clipped_mean`, before anything is known of how far apart they usually are.

    Only what nobody can have measured is clipped: it would leave no digits for the others' changes. From three values
    on none counts as further from the median than a million times its size, that of the deviations, or 1.
    """
    if len(values) < _FEWEST:
        return weighted_mean(values)
    middle = median([value for _, value in values])
    limit = _ABSURD * max(1.0, abs(middle), median([abs(value - middle) for _, value in values]))
    return weighted_mean([(weight, min(max(value, middle - limit), middle + limit)) for weight, value in values])


def weighted_mean(values: Sequence[tuple[int, float]]) -> float:
    """The mean of `values`, (weight, number) each; the weights must not all be zero. Finite if all numbers are."""
    total = sum(weight for weight, _ in values)
    try:
        mean = math.fsum(weight * value for weight, value in values) / total
    except (OverflowError, ValueError):  # a sum beyond the range, or of both infinities
        mean = math.nan
    if math.isfinite(mean) or not all(math.isfinite(value) for _, value in values):
        return mean
    return math.fsum(weight / total * value for weight, value in values)  # of numbers that replicas made up


def median(values: Sequence[float]) -> float:
    """The middle one of the sorted values, or the mean of the two middle ones. `values` must not be empty."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
