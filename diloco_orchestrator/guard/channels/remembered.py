"""`Remembered`: base class of the guard's statistics, which converts them to JSON and back; and a reproducible sum."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass
class Remembered:
    """A statistic of the guard that is stored as the list of its fields, except fields with init=False.

    Order and form of the fields are part of the guard rule: to change them takes a new rule name.
    """

    def state(self) -> Any:
        """The stored fields as JSON. The lists in it are shared with this object."""
        return [getattr(self, each.name) for each in fields(self) if each.init]

    @classmethod
    def restore(cls, state: Any) -> Self:
        """The statistic stored in `state`, whose lists it will change."""
        return cls(*state)


def added(values: Sequence[float]) -> float:
    """The sum, rounded after each value: `sum` rounds differently from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
