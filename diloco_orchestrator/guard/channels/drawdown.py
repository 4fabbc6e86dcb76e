"""`BestLevel`: the best level that a noisy series has surely reached, from the means of blocks of rounds."""

import math
from collections.abc import Sequence
from typing import Any, Self

BLOCKS = (8, 64)  # rounds: short blocks follow a rise, long ones know a plateau more exactly


class BestLevel:
    """The best means of full blocks of a series. State: 10 numbers."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0]
        self._best: list[float | None] = [None, None]
        self._full = [0, 0]  # blocks so far
        self.count = 0
        self.first: float | None = None  # mean of the first short block

    def add(self, value: float) -> float | None:
        """Learn the next value; returns the mean of the short block that it fills, if it fills one."""
        self.count += 1
        filled: float | None = None
        for index, size in enumerate(BLOCKS):
            self._sums[index] += value
            if self.count % size == 0:
                mean = self._sums[index] / size
                best = self._best[index]
                self._best[index] = mean if best is None else max(best, mean)
                self._sums[index] = 0.0
                self._full[index] += 1
                filled = mean if index == 0 else filled
        if self.first is None:
            self.first = filled
        return filled

    def level(self, sigma: float) -> float:
        """A lower confidence bound of the best level. The best of more blocks is further above the mean by chance,
        so the bound widens with their number. Before the first full block: 0.0.
        """
        bounds = [
            best - math.sqrt(1.2 + 1.3 * (full.bit_length() - 1)) * sigma / math.sqrt(size)
            for best, full, size in zip(self._best, self._full, BLOCKS, strict=True)
            if best is not None
        ]
        return max(bounds, default=0.0)

    def gain(self) -> float:
        """The best short block's mean minus the first one's."""
        best = self._best[0]
        return 0.0 if best is None or self.first is None else best - self.first

    def state(self) -> list[Any]:
        return [self._sums, self._best, self._full, self.count, self.first]

    @classmethod
    def restore(cls, state: Sequence[Any]) -> Self:
        level = cls()
        sums, best, full, level.count, level.first = state
        level._sums, level._best, level._full = list(sums), list(best), list(full)
        return level
