"""What to do about a run's replicas, as a pure function of what is known: launch, cancel, give the run up.

Knows no executor and no store: `coordinator` observes and acts. Times are on the coordinator's own clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    TIMED_OUT = "timed out"  # the vendor's time limit: a rotation, nobody's fault
    NO_CAPACITY = "no capacity"  # the vendor has no machine now
    ERROR = "error"
    PERMANENT = "permanent error"  # a relaunch would end the same way


@dataclass(frozen=True)
class ReplicaView:
    """What the coordinator knows of one replica."""

    replica_id: int
    attempt: int  # the newest, of any leg; 0 before the first
    condition: Condition
    ended_at: float  # when the coordinator saw it end
    endings: Mapping[Condition, int] = field(default_factory=dict)  # attempts that ended so, the newest included
    silent_s: float = 0.0  # since its heartbeat moved last; 0 before the first beat
    cancelled: bool = False  # it was asked to end
    stuck: bool = False  # launched long ago, and it never showed a sign of life
    reason: str = ""  # for people


@dataclass(frozen=True)
class FleetView:
    """What the coordinator knows of the run."""

    replicas: Sequence[ReplicaView]
    stopped_at: float | None  # when it saw the commit that stopped the leg; None while it goes on
    halt: str = ""  # the reason of an operator's request; needs to be looked up only while somebody is not alive


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
class GiveUp:
    """Go on without this replica: it is not launched again in this leg."""

    replica_id: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Fail:
    """Give the run up: its quorum cannot be reached any more."""

    why: str


@dataclass(frozen=True)
class Halt:
    """Stop the run here: a halt is asked for and too few replicas live to see to it."""

    why: str


Action = Launch | Cancel | GiveUp | Fail | Halt


@dataclass(frozen=True)
class _Budget:
    """How often a kind of ending is followed by a relaunch, and after what pause."""

    relaunches: int
    words: str
    first_pause_s: float  # doubles with every ending of this kind
    setting: str


def _budgets(policy: RetryConfig) -> dict[Condition, _Budget]:
    """Apart from each other: a preemption must not spend what is meant for errors."""
    return {
        Condition.ERROR: _Budget(policy.max_errors, "failed", policy.backoff_s, "retry.max_errors"),
        Condition.PREEMPTED: _Budget(policy.max_preemptions, "was preempted", 0.0, "retry.max_preemptions"),
        Condition.TIMED_OUT: _Budget(policy.max_timeouts, "reached its time limit", 0.0, "retry.max_timeouts"),
        Condition.NO_CAPACITY: _Budget(policy.max_no_capacity, "got no machine", 10.0, "retry.max_no_capacity"),
    }


def decide(view: FleetView, now: float, policy: RetryConfig, quorum: int) -> list[Action]:
    """What to do now; empty means wait. `quorum`: replicas without which the run cannot go on."""
    if view.stopped_at is not None:
        return _cancel_leftovers(view, now, view.stopped_at)
    able = sum(r.condition is Condition.ALIVE and not r.stuck and not r.cancelled for r in view.replicas)
    if view.halt and able < quorum:
        return [Halt(f"halt requested: {view.halt}")]  # else replicas see to it
    actions: list[Action] = []
    lost: list[GiveUp] = []
    for replica in view.replicas:
        action = _for_replica(replica, now, policy)
        if isinstance(action, GiveUp):
            lost.append(action)
        if action is not None and not (view.halt and isinstance(action, Launch)):  # nobody is started to be halted
            actions.append(action)
    if lost and len(view.replicas) - len(lost) < quorum:
        return [Fail("; ".join(each.why for each in lost))]
    return actions


def _cancel_leftovers(view: FleetView, now: float, stopped_at: float) -> list[Action]:
    if now - stopped_at < LEFTOVER_S:
        return []
    alive = (r for r in view.replicas if r.condition is Condition.ALIVE and not r.cancelled)
    return [Cancel(replica.replica_id, replica.attempt, "the run is over") for replica in alive]


def _for_replica(replica: ReplicaView, now: float, policy: RetryConfig) -> Launch | Cancel | GiveUp | None:
    who = f"replica {replica.replica_id}"
    match replica.condition:
        case Condition.NONE:
            return Launch(replica.replica_id, replica.attempt + 1, "start of the leg")
        case Condition.PERMANENT:
            return GiveUp(replica.replica_id, replica.attempt, f"{who} cannot take part: {replica.reason}")
        case Condition.ALIVE if replica.silent_s > policy.hung_after_s and not replica.cancelled:
            return Cancel(replica.replica_id, replica.attempt, f"hung: no heartbeat for {replica.silent_s:.0f} s")
        case Condition.ALIVE | Condition.DONE:
            return None
    budget = _budgets(policy)[replica.condition]
    times = replica.endings.get(replica.condition, 1)
    if times > budget.relaunches:
        why = (
            f"{who} {budget.words} {times} times, {budget.relaunches} relaunches are allowed "
            f"({budget.setting}): {replica.reason}"
        )
        return GiveUp(replica.replica_id, replica.attempt, why)
    if now - replica.ended_at < min(budget.first_pause_s * 2 ** (times - 1), _LONGEST_BACKOFF_S):
        return None
    return Launch(replica.replica_id, replica.attempt + 1, f"attempt {replica.attempt}: {replica.reason}")
