"""The life of one attempt as a state machine: `advance` gives the next state, the effects to perform, and why.

Pure: the time is an argument, nothing is read or written. States, events and effects are defined in `attempt_types`,
the form of the table in `attempt_table`. Effects are performed by `fleet`; which attempt to launch, cancel or give up
is decided in `fleet_policy`.

`python -m diloco_orchestrator.supervision.attempt` prints the diagram that docs/protocol.md holds.
"""

from dataclasses import replace
from typing import Any

from diloco_orchestrator.executors.contract import ReplicaHandle, ReplicaState, ReplicaStatus
from diloco_orchestrator.supervision.attempt_launch import search_words  # which enters its rules, too
from diloco_orchestrator.supervision.attempt_outcome import end_step, outcome_of
from diloco_orchestrator.supervision.attempt_policy import AttemptPolicy
from diloco_orchestrator.supervision.attempt_table import (
    EVENTS,
    MOVES,
    REFUSED,
    STATES,
    RefusedEvent,
    Step,
    diagram,
    on,
    refuse,
)
from diloco_orchestrator.supervision.attempt_types import (
    AbandonLaunch,
    Alive,
    Beat,
    BeatSeen,
    CallCancel,
    CallFind,
    CancelAccepted,
    CancelAsked,
    CancelFailed,
    Cancelling,
    CancelSeen,
    ClaimLost,
    Ended,
    Event,
    ExitSeen,
    FindSuccessor,
    GaveUp,
    GivenUp,
    HandleSeen,
    IntentTaken,
    IntentWritten,
    LaunchDenied,
    LaunchFailed,
    Launching,
    LaunchReturned,
    LaunchUnavailable,
    LegStopped,
    Outcome,
    Postponed,
    Replaced,
    Reserved,
    Running,
    SearchDone,
    SearchFailed,
    State,
    Tick,
    TookPart,
    Unlaunched,
    Unreachable,
    VendorBlind,
    VendorSaid,
    WriteCancel,
    WriteHandle,
    WriteOut,
)


def advance(state: State, event: Event, now: float, policy: AttemptPolicy) -> Step:
    """The next state of an attempt, the effects to perform, and why. Raises `RefusedEvent` for a pair in `REFUSED`."""
    move = MOVES.get((type(state), type(event)))
    if move is None:
        raise RefusedEvent(
            f"{event} arrived while the attempt was {state}, but {REFUSED[type(state), type(event)]}. This is a bug of "
            "diloco-orchestrator: please report it with this line. Replicas go on by themselves; attach to the run "
            "again to supervise it."
        )
    return move.rule(state, event, now, policy)


# -- how an attempt ended ---------------------------------------------------------------------------------------------


@on((Reserved, Postponed, Running, Unreachable, Cancelling), ExitSeen, to=Ended)
def _exit_seen(state: Alive, event: ExitSeen, now: float, policy: AttemptPolicy) -> Step:
    return end_step(state, outcome_of(event.code, event.status), f"{event.reason} (exit code {event.code})", now)


@on((Reserved, Running, Unreachable, Cancelling), Replaced, to=Ended)
def _replaced(state: Alive, event: Replaced, now: float, policy: AttemptPolicy) -> Step:
    """A new coordinator finds an attempt that has a successor: the attempt ended, though without an exit record."""
    outcome, reason = event.outcome or Outcome.ERROR, event.reason or "it left no exit record"
    step = end_step(state, outcome, reason, now)
    assert isinstance(step.state, Ended)
    return step._replace(state=replace(step.state, took_part=event.took_part))


@on(Ended, Replaced)
def _judged(state: Ended, event: Replaced, now: float, policy: AttemptPolicy) -> Step:
    """The outcome in the successor's intent wins over the one seen here, so that all coordinators count alike."""
    if event.outcome is None:
        return Step(state)
    return Step(Ended(event.outcome, state.at, event.reason, event.took_part))


# -- running ----------------------------------------------------------------------------------------------------------


@on(Running, VendorSaid, to=(Running, Ended))
def _status_seen(state: Running, event: VendorSaid, now: float, policy: AttemptPolicy) -> Step:
    if event.status.state.ended:
        return _end_by_status(state, event.status, now)
    started = state.running_since is None and event.status.state is ReplicaState.RUNNING
    words = f"it runs image {event.status.image}" if started and event.status.image else ""
    waits_for = event.status.message if event.status.state is ReplicaState.PENDING and event.status.reason else ""
    if waits_for and waits_for != state.waits_for:
        words = f"it has not started yet: {waits_for}"
    running_since = now if started else state.running_since
    return Step(replace(state, running_since=running_since, blind_since=None, waits_for=waits_for), (), words)


@on(Running, VendorBlind)
def _status_unknown(state: Running, event: VendorBlind, now: float, policy: AttemptPolicy) -> Step:
    return Step(state if state.blind_since is not None else replace(state, blind_since=now))


def _end_by_status(state: Alive, status: ReplicaStatus, now: float) -> Step:
    return end_step(state, outcome_of(status.exit_code, status), status.message or status.reason or status.state, now)


@on((Reserved, Launching, Postponed, Running, Unreachable), BeatSeen)
def _beat_seen(
    state: Reserved | Launching | Postponed | Running | Unreachable, event: BeatSeen, now: float, policy: AttemptPolicy
) -> Step:
    moved = state.beat is None or state.beat.counter != event.counter
    return Step(replace(state, beat=Beat(event.counter, now)) if moved else state)


@on(Ended, ClaimLost, to=Unreachable)
def _claim_lost(state: Ended, event: ClaimLost, now: float, policy: AttemptPolicy) -> Step:
    return Step(Unreachable(now, None, "claim lost"), (), "another process has claimed it: followed by its records")


# -- cancelling -------------------------------------------------------------------------------------------------------


@on(Running, (CancelAsked, CancelSeen), to=Cancelling)
def _cancel(state: Running, event: CancelAsked | CancelSeen, now: float, policy: AttemptPolicy) -> Step:
    blind = state.blind_since is not None
    found = Cancelling(state.since, state.beat, event.why, now, state.handle, blind=blind)
    if isinstance(event, CancelSeen):
        return Step(found)  # the next Tick calls the provider: the writer of the record may have died before its call
    return Step(found, (WriteCancel(event.why), CallCancel(state.handle)), f"cancelling it: {event.why}")


@on((Reserved, Postponed, Launching), CancelAsked, to=Cancelling)
def _cancel_launch(
    state: Reserved | Postponed | Launching, event: CancelAsked, now: float, policy: AttemptPolicy
) -> Step:
    """Without a handle no cancel can be sent yet: the launch under way returns one, or the process is searched for."""
    search_at = None if isinstance(state, Launching) else state.launch_at if isinstance(state, Reserved) else now
    cancelled = Cancelling(state.since, state.beat, event.why, now, None, search_at)
    return Step(cancelled, (WriteCancel(event.why),), f"cancelling it: {event.why}")


@on(Reserved, CancelSeen, to=Cancelling)
def _cancel_recorded(state: Reserved, event: CancelSeen, now: float, policy: AttemptPolicy) -> Step:
    return Step(Cancelling(state.since, state.beat, event.why, now, None, state.launch_at))


@on(Unreachable, (CancelAsked, CancelSeen), to=Ended)
def _replace_unreachable(
    state: Unreachable, event: CancelAsked | CancelSeen, now: float, policy: AttemptPolicy
) -> Step:
    """The process can neither be cancelled nor polled here. If it still lives, its successor's claim makes it leave."""
    effects = (WriteCancel(event.why),) if isinstance(event, CancelAsked) else ()
    return end_step(state, Outcome.ERROR, event.why, now)._replace(effects=effects)


@on(Cancelling, LaunchReturned)
def _cancel_launched(state: Cancelling, event: LaunchReturned, now: float, policy: AttemptPolicy) -> Step:
    return _cancel_found(state, event.handle, event.hourly_usd)


@on(Cancelling, SearchDone, to=(Cancelling, Ended))
def _cancel_searched(state: Cancelling, event: SearchDone, now: float, policy: AttemptPolicy) -> Step:
    if event.handle is None:
        return end_step(state, Outcome.ERROR, state.why, now)
    return _cancel_found(state, event.handle, None)


def _cancel_found(state: Cancelling, handle: ReplicaHandle, hourly_usd: float | None) -> Step:
    return Step(replace(state, handle=handle, search_at=None), (WriteHandle(handle, hourly_usd), CallCancel(handle)))


@on(Cancelling, SearchFailed)
def _cancel_search_later(state: Cancelling, event: SearchFailed, now: float, policy: AttemptPolicy) -> Step:
    return Step(replace(state, search_at=now + policy.retry_denied_s), (), search_words(event))


@on(Cancelling, (LaunchDenied, LaunchUnavailable, LaunchFailed), to=Ended)
def _cancel_unlaunched(
    state: Cancelling, event: LaunchDenied | LaunchUnavailable | LaunchFailed, now: float, policy: AttemptPolicy
) -> Step:
    return end_step(state, Outcome.ERROR, state.why, now)


@on(Cancelling, HandleSeen, to=(Cancelling, Ended))
def _cancel_handle_seen(state: Cancelling, event: HandleSeen, now: float, policy: AttemptPolicy) -> Step:
    if not event.ours:
        return end_step(state, Outcome.ERROR, state.why, now)
    return Step(replace(state, handle=event.handle, search_at=None))


@on(Cancelling, VendorSaid, to=(Cancelling, Ended))
def _cancelling_status(state: Cancelling, event: VendorSaid, now: float, policy: AttemptPolicy) -> Step:
    if event.status.state.ended:
        return _end_by_status(state, event.status, now)
    return Step(replace(state, blind=False))


@on(Cancelling, VendorBlind)
def _cancelling_unknown(state: Cancelling, event: VendorBlind, now: float, policy: AttemptPolicy) -> Step:
    return Step(replace(state, blind=True))


@on(Cancelling, CancelAccepted)
def _cancel_accepted(state: Cancelling, event: CancelAccepted, now: float, policy: AttemptPolicy) -> Step:
    return Step(replace(state, accepted=True, cancelled_at=now))


@on(Cancelling, CancelFailed, to=(Cancelling, Ended))
def _cancel_failed(state: Cancelling, event: CancelFailed, now: float, policy: AttemptPolicy) -> Step:
    """The next Tick repeats the cancel. If the status is unknown too, the attempt ends: a successor makes it leave."""
    if state.blind:
        return end_step(state, Outcome.ERROR, state.why, now)
    return Step(state, (), f"it could not be cancelled: {event.error}")


@on(Cancelling, Tick, to=(Cancelling, Ended))
def _cancel_on(state: Cancelling, event: Tick, now: float, policy: AttemptPolicy) -> Step:
    """A lost machine never reports an end: give up waiting. If it still lives, its successor's claim makes it leave."""
    unanswered = state.accepted or state.handle is None
    if unanswered and now - state.cancelled_at > policy.cancelled_for_s:
        calling = state.handle is None and state.search_at is None
        return end_step(state, Outcome.ERROR, state.why, now)._replace(effects=(AbandonLaunch(),) if calling else ())
    if state.handle is not None and not state.accepted:
        return Step(state, (CallCancel(state.handle),))
    due = state.search_at is not None and now >= state.search_at
    return Step(state, (CallFind(),) if due else ())


# -- after the end ----------------------------------------------------------------------------------------------------


@on(Ended, Tick)
def _ended(state: Ended, event: Tick, now: float, policy: AttemptPolicy) -> Step:
    return Step(state, (FindSuccessor(),) if state.outcome is Outcome.SUPERSEDED else ())


@on(Ended, TookPart)
def _took_part(state: Ended, event: TookPart, now: float, policy: AttemptPolicy) -> Step:
    return Step(replace(state, took_part=True))


@on(Ended, GaveUp, to=GivenUp)
def _give_up(state: Ended, event: GaveUp, now: float, policy: AttemptPolicy) -> Step:
    words = f"the run goes on without its replica, which {event.reason}"
    return Step(GivenUp(event.reason), (WriteOut(event.reason),), words)


@on((Unlaunched, Launching, Running, Unreachable, GivenUp), (LegStopped, Tick))
@on((Cancelling, Ended), LegStopped)
@on(Cancelling, (BeatSeen, CancelAsked))
def _unchanged(state: State, event: Any, now: float, policy: AttemptPolicy) -> Step:
    return Step(state)


# -- what cannot happen -----------------------------------------------------------------------------------------------


_LAUNCH_ANSWERS = (LaunchReturned, LaunchDenied, LaunchUnavailable, LaunchFailed)
_CALL_ANSWERS = (CancelAccepted, CancelFailed, SearchDone, SearchFailed)

refuse(Unlaunched, EVENTS, "before its intent nothing of an attempt exists")
refuse(GivenUp, EVENTS, "a replica that was given up has no attempt that is observed")
refuse(Ended, EVENTS, "an attempt that has ended is not observed, and its calls were answered or abandoned before")
refuse(STATES, (IntentWritten, IntentTaken), "an attempt has one intent; the next attempt is a machine of its own")
refuse(STATES, ClaimLost, "only an attempt that ended as superseded asks for its successor")
refuse(STATES, TookPart, "it is asked once the attempt has ended")
refuse(STATES, GaveUp, "a replica is given up after the end of its newest attempt")
refuse(STATES, _LAUNCH_ANSWERS, "no launch call of this coordinator is under way")
refuse(STATES, _CALL_ANSWERS, "this coordinator did not make that call")
refuse(Launching, (HandleSeen, ExitSeen), "while our launch call is under way its records are not read")
refuse(STATES, HandleSeen, "it has a handle already, or one that is of no use here")
refuse(STATES, (VendorSaid, VendorBlind), "without a handle there is nothing to poll")
refuse(STATES, (CancelSeen, Replaced), "these records are read when a coordinator starts, before it calls anybody")


if __name__ == "__main__":
    print(diagram())
