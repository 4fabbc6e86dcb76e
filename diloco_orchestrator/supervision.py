"""What to do about a run's replicas, as a pure function of what is known: launch, cancel, give the run up.

Knows no executor and no store: `coordinator` observes and acts. Times are on the coordinator's own clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from diloco_orchestrator.config import RetryConfig

_LONGEST_BACKOFF_S = 60.0
LEFTOVER_S = 120.0  # after a stop, until replicas that are still there are cancelled


class Condition(StrEnum):
    """How a replica's newest attempt is doing: the vendor's word joined with its own records."""

    NONE = "not launched"
    ALIVE = "alive"  # or not known to be dead
    DONE = "done"
    PREEMPTED = "preempted"
    ERROR = "error"
    PERMANENT = "permanent error"  # a relaunch would end the same way


@dataclass(frozen=True)
class ReplicaView:
    """What the coordinator knows of one replica."""

    replica_id: int
    attempt: int  # the newest; 0 before the first
    condition: Condition
    ended_at: float  # when the coordinator saw it end
    errors: int  # attempts that ended so, the newest included
    preemptions: int
    reason: str = ""  # for people


@dataclass(frozen=True)
class FleetView:
    """What the coordinator knows of the run."""

    replicas: Sequence[ReplicaView]
    stopped_at: float | None  # when it saw the commit that stopped the leg; None while it goes on


@dataclass(frozen=True)
class Launch:
    replica_id: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Cancel:
    replica_id: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Fail:
    """Give the run up: its quorum cannot be reached any more."""

    why: str


Action = Launch | Cancel | Fail


def decide(view: FleetView, now: float, policy: RetryConfig) -> list[Action]:
    """What to do now; empty means wait."""
    if view.stopped_at is not None:
        return _cancel_leftovers(view, now, view.stopped_at)
    actions: list[Action] = []
    for replica in view.replicas:
        action = _for_replica(replica, now, policy)
        if isinstance(action, Fail):
            return [action]  # with quorum "all" one lost replica is a lost run
        if action is not None:
            actions.append(action)
    return actions


def _cancel_leftovers(view: FleetView, now: float, stopped_at: float) -> list[Action]:
    if now - stopped_at < LEFTOVER_S:
        return []
    alive = (replica for replica in view.replicas if replica.condition is Condition.ALIVE)
    return [Cancel(replica.replica_id, replica.attempt, "the run is over") for replica in alive]


def _for_replica(replica: ReplicaView, now: float, policy: RetryConfig) -> Action | None:
    who = f"replica {replica.replica_id}"
    match replica.condition:
        case Condition.NONE:
            return Launch(replica.replica_id, 1, "start of the run")
        case Condition.PERMANENT:
            return Fail(f"{who} cannot take part: {replica.reason}")
        case Condition.ERROR if replica.errors > policy.max_errors:
            return Fail(
                f"{who} failed {replica.errors} times, {policy.max_errors} relaunches are allowed: {replica.reason}"
            )
        case Condition.PREEMPTED if replica.preemptions > policy.max_preemptions:
            return Fail(f"{who} was preempted {replica.preemptions} times, {policy.max_preemptions} are allowed")
        case Condition.ERROR | Condition.PREEMPTED if now - replica.ended_at >= _backoff_s(replica, policy):
            return Launch(replica.replica_id, replica.attempt + 1, f"attempt {replica.attempt}: {replica.reason}")
    return None


def _backoff_s(replica: ReplicaView, policy: RetryConfig) -> float:
    """Pause before a relaunch; a preemption is nobody's fault and has none."""
    if replica.condition is Condition.PREEMPTED:
        return 0.0
    return float(min(policy.backoff_s * 2 ** (replica.errors - 1), _LONGEST_BACKOFF_S))
