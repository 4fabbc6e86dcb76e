"""The table of the attempt machine: every pair of a state and an event has a rule or a reason why it cannot occur.

Holds no rule: importing `attempt` fills the table.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, get_args

from diloco_orchestrator.supervision.attempt_types import Effect, Event, State

StateClass = type[State]
EventClass = type[Event]
STATES: tuple[StateClass, ...] = get_args(State)
EVENTS: tuple[EventClass, ...] = get_args(Event)


class RefusedEvent(RuntimeError):
    """An event arrived in a state in which it cannot occur: a bug of this package, not of its user."""


class Step(NamedTuple):
    """The result of one event: next state, effects to perform, and the log line `reason`, empty if none is needed."""

    state: State
    effects: tuple[Effect, ...] = ()
    reason: str = ""


class Move(NamedTuple):
    """One entry of the table: the rule, and every state class that it may lead to."""

    rule: Callable[..., Step]
    to: tuple[StateClass, ...]


MOVES: dict[tuple[StateClass, EventClass], Move] = {}
REFUSED: dict[tuple[StateClass, EventClass], str] = {}  # why the event cannot arrive in that state

_Rule = TypeVar("_Rule", bound=Callable[..., Step])
_States = StateClass | tuple[StateClass, ...]
_Events = EventClass | tuple[EventClass, ...]


def _pairs(states: _States, events: _Events) -> list[tuple[StateClass, EventClass]]:
    of_states = states if isinstance(states, tuple) else (states,)
    of_events = events if isinstance(events, tuple) else (events,)
    return [(state, event) for state in of_states for event in of_events]


def on(states: _States, events: _Events, to: _States = ()) -> Callable[[_Rule], _Rule]:
    """Decorator: enter a rule `(state, event, now, policy) -> Step` for all pairs of `states` and `events`.

    `to`: the state classes that the rule may return; by default the class does not change.
    """

    def enter(rule: _Rule) -> _Rule:
        for state, event in _pairs(states, events):
            MOVES[state, event] = Move(rule, (to if isinstance(to, tuple) else (to,)) or (state,))
        return rule

    return enter


def refuse(states: _States, events: _Events, why: str) -> None:
    """Enter the reason `why` for all pairs of `states` and `events` that have neither a rule nor a reason yet."""
    for pair in _pairs(states, events):
        if pair not in MOVES:
            REFUSED.setdefault(pair, why)


def diagram() -> str:
    """The moves between state classes as a Mermaid diagram, as docs/protocol.md holds it."""
    edges: dict[tuple[str, str], list[str]] = {}
    for state in STATES:
        for event in EVENTS:
            move = MOVES.get((state, event))
            for to in move.to if move else ():
                if to is not state:
                    edges.setdefault((state.__name__, to.__name__), []).append(event.__name__)
    lines = [f"    {begin} --> {end}: {', '.join(events)}" for (begin, end), events in edges.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> Unlaunched", *lines, "    Ended --> [*]", "    GivenUp --> [*]"])
