"""`ReplicaView`: one replica as a coordinator sees it: its newest attempt, and how earlier attempts of the leg ended.

A running coordinator and a new one build it with the same function, `follow`: the former from events as they happen,
the latter from the bucket's records (`record_events`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from diloco_orchestrator.supervision.attempt import Step, advance
from diloco_orchestrator.supervision.attempt_types import (
    AttemptPolicy,
    Ended,
    Event,
    GivenUp,
    Outcome,
    State,
    Unlaunched,
)


@dataclass(frozen=True)
class ReplicaView:
    """One replica in one leg, as a coordinator sees it."""

    replica_id: int
    attempt: int = 0  # number of the newest attempt, of any leg; 0 before the first
    state: State = field(default_factory=Unlaunched)
    # Ended attempts of this leg, the newest included, since the newest of them that took part in a commit.
    endings: Mapping[Outcome, int] = field(default_factory=dict)

    @property
    def who(self) -> tuple[int, int]:
        """(replica id, attempt): the address of events."""
        return self.replica_id, self.attempt

    def next_attempt(self, number: int) -> "ReplicaView":
        """The view when attempt `number` begins."""
        return replace(self, attempt=number, state=Unlaunched())


def follow(view: ReplicaView, event: Event, now: float, policy: AttemptPolicy) -> tuple[ReplicaView, Step]:
    """Advance the newest attempt by one event and count its end. Raises `RefusedEvent` for an impossible event."""
    step = advance(view.state, event, now, policy)
    endings = view.endings
    if isinstance(step.state, Ended) and step.state.took_part:
        endings = _counted({}, step.state, +1)
    elif not isinstance(step.state, GivenUp):
        endings = _counted(_counted(endings, view.state, -1), step.state, +1)
    return replace(view, state=step.state, endings=endings), step


def follow_all(view: ReplicaView, events: Iterable[Event], now: float, policy: AttemptPolicy) -> ReplicaView:
    """Advance a view by past events, as `follow` does, but without their effects, which were performed then."""
    for event in events:
        view, _ = follow(view, event, now, policy)
    return view


def _counted(endings: Mapping[Outcome, int], state: State, change: int) -> Mapping[Outcome, int]:
    """Add `change` to the count of the outcome if `state` is an end that counts.

    An attempt that ended as superseded is not counted: another attempt of the replica was alive.
    """
    if not isinstance(state, Ended) or state.outcome is Outcome.SUPERSEDED:
        return endings
    return {**endings, state.outcome: endings.get(state.outcome, 0) + change}
