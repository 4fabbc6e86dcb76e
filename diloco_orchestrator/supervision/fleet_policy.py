"""Decides what to do about a run's replicas, from their states: launch, cancel, give up, fail or halt the run.

Pure: `coordinator` observes and acts, `attempt` moves an attempt from state to state. Times are seconds on the
coordinator's own clock.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from diloco_orchestrator.config import RetryConfig
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.attempt_records import VACATED
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.supervision.attempt import ReplicaView
from diloco_orchestrator.supervision.attempt_outcome import named
from diloco_orchestrator.supervision.attempt_types import (
    Alive,
    AttemptPolicy,
    Cancelling,
    Ended,
    GivenUp,
    Outcome,
    Running,
    State,
    Unlaunched,
    Unreachable,
)

_LONGEST_PAUSE_S = 60.0  # between an end and the relaunch; machine time is worth less than a replica that is back
_SELDOM_S = (
    600.0  # between two launches of a replica that has got no machine for more than `retry.max_no_capacity` times
)
_NO_CAPACITY_PAUSE_S = 10.0  # the first one; providers find machines within minutes, and asking is free


@dataclass(frozen=True)
class FleetView:
    """A coordinator's observations of a run: its replicas' states, a request to halt, and the run's stop."""

    replicas: Sequence[ReplicaView]
    stopped_at: float | None  # when the coordinator saw the stop; None while the leg goes on
    halt: str = ""  # reason of a halt request; only needed while a replica cannot take part
    watched_since: float = -math.inf  # since when the coordinator has read records without a long break
    wanted: int | None = None  # replicas to train with; None: all
    elsewhere: Collection[int] = ()  # whose place failed them, and whom another one may give a machine
    opens: bool = True  # whether there is a place at which a vacant id may be opened
    offered: Collection[int] = ()  # ids opened beyond these: their launch is an offer that costs nothing until taken


@dataclass(frozen=True)
class Launch:
    replica_id: int
    attempt: int
    why: str
    place: str = ""  # of an executor that has several; empty: the executor's own choice
    placed: str = ""  # why it is launched there


@dataclass(frozen=True)
class Cancel:
    replica_id: int
    attempt: int
    why: str
    keeps_output: bool = False  # whether its output is written to its log.txt before, because it cannot do that itself


@dataclass(frozen=True)
class GiveUp:
    """Action: launch no further attempt of this replica until a resume. `why` continues the words "replica 1"."""

    replica_id: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Stop:
    """Action: stop the run as failed (its quorum is out of reach) or as halted (too few replicas can commit a halt)."""

    status: rounds.Stop
    why: str


Action = Launch | Cancel | GiveUp | Stop


def decide(view: FleetView, now: float, policy: AttemptPolicy, retry: RetryConfig, quorum: int) -> list[Action]:
    """The actions to take now; empty means wait. `quorum`: number of replicas without which the run cannot go on."""
    if view.stopped_at is not None:
        return _cancel_leftovers(view, now - view.stopped_at, policy)
    able = sum(can_take_part(replica.state, now, policy) for replica in view.replicas)
    if view.halt and able < quorum:
        return [Stop("halted", f"halt requested: {view.halt}")]  # otherwise replicas obey it in their next commit
    begun = [each for each in view.replicas if each.endings or each.replica_id not in view.offered]
    if common := _error_of_all(begun):
        return [Stop("failed", common)]
    lost = {each.replica_id: each.state.reason for each in view.replicas if isinstance(each.state, GivenUp)}
    actions: list[Action] = []
    held = held_open(view)
    for replica in view.replicas:
        if replica.replica_id not in held:
            if (vacate := _vacated(replica, view.wanted)) is not None:
                actions.append(vacate)
            continue
        action = _for_replica(replica, now, policy, retry, view.watched_since)
        if isinstance(action, GiveUp) and isinstance(replica.state, Ended) and replica.replica_id in view.elsewhere:
            action = Launch(replica.replica_id, replica.attempt + 1, named(replica.attempt, replica.state))
        if isinstance(action, GiveUp):
            lost[replica.replica_id] = action.why
            action = _asked_seldom(replica, action, now)
        if action is not None and not (view.halt and isinstance(action, Launch)):  # no launch only to be halted
            actions.append(action)
    if lost and len(_left(view, actions) - lost.keys()) < quorum:
        return [Stop("failed", _lost_words(lost))]
    return actions


def _left(view: FleetView, actions: Sequence[Action]) -> set[int]:
    """The replica ids that train, leave, or may get an attempt once `actions` have been taken."""
    leaving = {each.replica_id for each in view.replicas if is_leaving(each.state)}
    return held_open(replace(view, replicas=given_up_by(actions, view.replicas))) | leaving


def given_up_by(actions: Sequence[Action], fleet: Sequence[ReplicaView]) -> list[ReplicaView]:
    """The replicas, with those given up that `actions` give up."""
    out = {each.replica_id: each.why for each in actions if isinstance(each, GiveUp)}
    return [
        replace(each, state=GivenUp(out[each.replica_id], each.state.cause))
        if each.replica_id in out and isinstance(each.state, Ended)
        else each
        for each in fleet
    ]


def is_vacant(state: State) -> bool:
    """Whether a replica id has no attempt and gets none until more replicas are wanted: unlaunched, or vacated."""
    return isinstance(state, Unlaunched) or (isinstance(state, Ended) and state.outcome is Outcome.VACATED)


def is_leaving(state: State) -> bool:
    """Whether an attempt is being ended because the run was scaled down."""
    return isinstance(state, Cancelling) and state.why.startswith(VACATED)


def held_open(view: FleetView) -> set[int]:
    """The replica ids that keep or may get an attempt: `wanted` of them, and those of `offered`. Others are vacated.

    Attempts that send heartbeats come first, then those that start, then those that have ended and may be relaunched,
    then vacant ids, each by id. A replica that was given up, or is leaving, is not held: a vacant id takes its place,
    unless it would end alike (see `_of_common_causes`) or no place is left to open it at.
    """
    able = [each for each in view.replicas if not isinstance(each.state, GivenUp) and not is_leaving(each.state)]
    ranked = sorted(able, key=lambda each: (_rank(each.state), each.replica_id))
    chosen = ranked if view.wanted is None else ranked[: view.wanted]
    alike = _of_common_causes(view.replicas) if view.wanted is not None else 0
    to_open = len(chosen) if view.opens else 0
    if alike:
        to_open = max(0, (view.wanted or 0) - alike)
    chosen = [each for number, each in enumerate(chosen) if number < to_open or not is_vacant(each.state)]
    return {each.replica_id for each in chosen} | {i.replica_id for i in able if i.replica_id in view.offered}


def _of_common_causes(fleet: Sequence[ReplicaView]) -> int:
    """The number of replicas that were given up for a cause that any other is taken to meet.

    They are those that a commit never averaged, all but one of each cause: where a second replica ends for the cause of
    the first one, it is neither in that one's data nor in its machine, and a third would only cost its start.
    """
    causes = Counter(each.state.cause for each in fleet if isinstance(each.state, GivenUp) and not each.took_part)
    return causes.total() - len(causes)


def places_of_common_causes(fleet: Sequence[ReplicaView]) -> set[str]:
    """The places (executors) where two replicas, of which no commit averaged any, were given up for the same cause."""
    lost = [(each.place, each.state.cause) for each in fleet if isinstance(each.state, GivenUp) and not each.took_part]
    return {place for (place, _), count in Counter(lost).items() if count > 1}


def _rank(state: State) -> int:
    if is_vacant(state):
        return 3
    if not isinstance(state, Alive):
        return 2
    return 0 if state.beat is not None else 1


def _vacated(replica: ReplicaView, wanted: int | None) -> Cancel | None:
    """The action that ends the attempt of a replica that is not wanted any more; None if none runs, or it ends."""
    if not isinstance(replica.state, Alive) or isinstance(replica.state, Cancelling):
        return None
    return Cancel(*replica.who, f"{VACATED}: {wanted} replicas are wanted")


def _error_of_all(fleet: Sequence[ReplicaView]) -> str:
    """Reason to stop the run where every replica, of two or more, failed with one error at one line; else empty.

    A replica whose next attempt has begun (it sends heartbeats) does not count: that attempt may get further.
    """
    fleet = [each for each in fleet if not is_vacant(each.state)]
    faults = {each.fault if _is_down(each.state) else "" for each in fleet}
    if len(fleet) < 2 or len(faults) > 1 or "" in faults:
        return ""
    reason = next((each.state.reason for each in fleet if isinstance(each.state, Ended)), "")
    return f"every replica failed in the same way, {faults.pop()}{reason and f': {reason}'}"


def _is_down(state: State) -> bool:
    return isinstance(state, Ended | GivenUp) or (isinstance(state, Alive) and state.beat is None)


def _lost_words(lost: Mapping[int, str]) -> str:
    """A sentence about lost replicas and the reasons (`lost`, by replica id), equal reasons once."""
    return "; ".join(
        f"{replicas(ids)}{':' if len(ids) > 1 else ''} {why}" for ids, why in grouped(sorted(lost.items()))
    )


def _asked_seldom(replica: ReplicaView, action: GiveUp, now: float) -> Launch | GiveUp | None:
    """`action`, unless the replica's last attempt ended because the provider had no machine.

    Then the replica is not given up: the result is a launch once ten minutes have passed since that end, None until
    then. For the quorum the replica counts as lost all the same: a run that cannot go on without it ends.
    """
    ended = replica.state
    if not isinstance(ended, Ended) or ended.outcome is not Outcome.NO_CAPACITY:
        return action
    if now - ended.at < _SELDOM_S:
        return None
    return Launch(replica.replica_id, replica.attempt + 1, named(replica.attempt, ended))


def _cancel_leftovers(view: FleetView, stopped_for_s: float, policy: AttemptPolicy) -> list[Action]:
    """Actions after the run's stop: cancel attempts that wait for a machine, and after `leftover_s` all others.

    Until then an attempt that runs may write the last snapshot, and ends by itself.
    """
    left = [each for each in view.replicas if isinstance(each.state, Alive) and not isinstance(each.state, Cancelling)]
    late = stopped_for_s >= policy.leftover_s
    due = (each for each in left if late or (isinstance(each.state, Running) and each.state.pending))
    return [Cancel(*replica.who, "the run is over") for replica in due]


def _for_replica(
    replica: ReplicaView, now: float, policy: AttemptPolicy, retry: RetryConfig, watched_since: float
) -> Launch | Cancel | GiveUp | None:
    match replica.state:
        case Unlaunched():
            return Launch(replica.replica_id, replica.attempt + 1, "start of the leg")
        case Ended(outcome=Outcome.VACATED):
            return Launch(replica.replica_id, replica.attempt + 1, named(replica.attempt, replica.state))
        case Ended():
            return _after_end(replica, replica.state, now, retry)
        case _:
            hung = hung_reason(replica.state, now, policy, watched_since)
            return Cancel(*replica.who, hung, keeps_output=True) if hung else None


# -- attempts that are alive ------------------------------------------------------------------------------------------


def can_take_part(state: State, now: float, policy: AttemptPolicy) -> bool:
    """Whether an attempt is alive and can obey a halt by itself: it is neither being cancelled nor stuck."""
    return isinstance(state, Alive) and not isinstance(state, Cancelling) and not stuck_reason(state, now, policy)


def stuck_reason(state: Alive, now: float, policy: AttemptPolicy) -> str:
    """Reason why a halt does not wait for an attempt: no first heartbeat for too long. Empty if it waits."""
    known_for_s = now - state.since
    if state.beat is not None or known_for_s <= policy.no_first_beat_s:
        return ""
    why = f" ({state.waits_for})" if isinstance(state, Running) and state.waits_for else ""
    return f"stuck: no heartbeat at all for {known_for_s:.0f} s{why}"


def hung_reason(state: State, now: float, policy: AttemptPolicy, watched_since: float) -> str:
    """Reason why an attempt must be replaced: no heartbeat for `hung_after_s`. Empty if it need not be.

    Silence before `watched_since` does not count: heartbeats could not be written, or were not read here.
    """
    silent_s = min(silence_s(state, now, policy), now - watched_since)
    why = f" ({state.waits_for})" if isinstance(state, Running) and state.waits_for else ""
    return f"hung: no heartbeat for {silent_s:.0f} s{why}" if silent_s > policy.hung_after_s else ""


def silence_s(state: State, now: float, policy: AttemptPolicy) -> float:
    """Seconds without a heartbeat, for the hung check. 0 for an attempt that is being cancelled or has ended.

    It is also 0 until `startup_timeout_s` for an attempt that never sent one; from then on its silence counts since the
    provider reported that it has a machine, or stopped responding. Waiting for a machine is not silence; a machine that
    cannot start the attempt, as without its image, costs money.
    """
    if not isinstance(state, Alive) or isinstance(state, Cancelling):
        return 0.0
    if state.beat is not None:
        return now - state.beat.at
    match state:
        case Unreachable(why="claim lost"):
            return now - state.since  # a process claimed it, so it is not starting any more
        case Unreachable():
            since = state.since
        case Running(running_since=since) if since is not None:
            pass
        case Running(blind_since=since) if since is not None:
            pass
        case _:
            return 0.0
    return now - since if now - since > policy.startup_timeout_s else 0.0


# -- attempts that have ended -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Budget:
    """Number of relaunches allowed after attempts with one outcome, and the first pause (s) between them."""

    relaunches: int
    words: str
    first_pause_s: float  # doubles with every further end of this kind
    setting: str


def _budgets(retry: RetryConfig) -> dict[Outcome, _Budget]:
    """The budget of each outcome, separate so that preemptions do not use up the budget of errors."""
    return {
        Outcome.ERROR: _Budget(retry.max_errors, "failed", retry.backoff_s, "retry.max_errors"),
        Outcome.PREEMPTED: _Budget(retry.max_preemptions, "was preempted", 0.0, "retry.max_preemptions"),
        Outcome.TIMED_OUT: _Budget(retry.max_timeouts, "reached its time limit", 0.0, "retry.max_timeouts"),
        Outcome.NO_CAPACITY: _Budget(
            retry.max_no_capacity, "got no machine", _NO_CAPACITY_PAUSE_S, "retry.max_no_capacity"
        ),
        # No attempt ends as done before the stop of its leg, which is read here within seconds: the record was forged,
        # or the stop was written since the log was read here: a run without relaunches would fail as it ends.
        Outcome.DONE: _Budget(
            max(1, retry.max_errors), "ended as done while the leg went on", _LONGEST_PAUSE_S, "retry.max_errors"
        ),
    }


def _after_end(replica: ReplicaView, ended: Ended, now: float, retry: RetryConfig) -> Launch | GiveUp | None:
    if ended.outcome is Outcome.PERMANENT:
        cause = ended.reason.removeprefix(f"{Outcome.PERMANENT}: ")
        return GiveUp(*replica.who, f"cannot take part: {cause}")
    budget = _budgets(retry).get(ended.outcome)
    if budget is None:  # superseded, and its successor is not found yet
        return None
    if ended.outcome is Outcome.ERROR and replica.fault and replica.faults > 1:
        return GiveUp(*replica.who, f"failed twice in a row in the same way, {replica.fault}: {ended.reason}")
    times = replica.endings.get(ended.outcome, 1)
    if times > budget.relaunches:
        why = (
            f"{budget.words} {times} times, {budget.relaunches} relaunches are allowed "
            f"({budget.setting}): {ended.reason}"
        )
        return GiveUp(*replica.who, why)
    if now - ended.at < pause_s(budget.first_pause_s, times):
        return None
    return Launch(replica.replica_id, replica.attempt + 1, named(replica.attempt, ended))


def pause_s(first_s: float, times: int) -> float:
    """Seconds between the end of an attempt and the launch of the next, after `times` ends with that outcome.

    `first_s` after the first end, doubled with each further one, at most 60.
    """
    return min(math.ldexp(first_s, min(times - 1, 32)), _LONGEST_PAUSE_S)  # 2 ** 1024 is no float
