"""`Remembered`: a channel's memory between rounds as JSON, and the sums that all machines compute alike."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass
class Remembered:
    """A channel whose state is the list of its fields; fields with init=False are of one round and are not kept.

    The order and the form of the fields are part of the rule: another one needs a new rule's name.
    """

    def state(self) -> Any:
        """The kept numbers, as JSON. It shares its lists with the channel."""
        return [getattr(self, each.name) for each in fields(self) if each.init]

    @classmethod
    def restore(cls, state: Any) -> Self:
        """The channel as it was when `state` was taken. It changes the lists in `state`."""
        return cls(*state)


def added(values: Sequence[float]) -> float:
    """The sum, rounded after each value: `sum` rounds differently from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
