"""`Remembered`, `RememberedTogether`: base classes that convert the guard's statistics to JSON; copies; a reproducible
sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
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


@dataclass
class RememberedTogether:
    """Statistics of held-out score and training metric, with those two relative to the first round's.

    A constant added to a metric changes no verdict. The stored state is by name: fields except those with init=False.
    """

    count: int = 0  # models judged
    origin: list[float | None] = field(default_factory=lambda: [None, None])  # first held-out score, training metric

    def since_the_first(self, which: int, value: float) -> float:
        """`value` minus the first that this was called with. `which`: 0 the held-out score, 1 the training metric."""
        first = self.origin[which]
        if first is None:
            first = self.origin[which] = value
        return value - first

    def gained_apart(self, heldout: float, in_loop: float) -> float:
        """Gain of the training metric minus gain of the held-out score since the first round; 0.0 before it.

        `heldout`, `in_loop`: present held-out score and training metric.
        """
        held, trained = self.origin
        return 0.0 if held is None or trained is None else (in_loop - trained) - (heldout - held)

    def state(self) -> dict[str, Any]:
        """All statistics as JSON, by name. The lists in it are shared with this object."""
        parts = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return {name: part.state() if isinstance(part, Remembered) else part for name, part in parts.items()}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """The statistics stored in `state`, whose lists they will change."""
        made = cls()
        for each in [each for each in fields(cls) if each.init]:
            part, kept = getattr(made, each.name), state[each.name]
            setattr(made, each.name, part.restore(kept) if isinstance(part, Remembered) else kept)
        return made


def copied(state: Any) -> Any:
    """A deep copy of a stored state (JSON). `copy.deepcopy` would take a quarter of the time of the guard's update."""
    if isinstance(state, Mapping):
        return {name: copied(value) for name, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def added(values: Sequence[float]) -> float:
    """The sum, rounded after each value: `sum` rounds differently from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
