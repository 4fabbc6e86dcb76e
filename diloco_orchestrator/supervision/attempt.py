"""State machine of one attempt (launched process): `advance` gives the next state, the effects to perform, and why.

`ReplicaView` tracks one replica through its attempts of a leg (start or resume to stop). Pure: the time is an argument,
nothing is read or written. `attempt_types` defines states, events and effects, `fleet` performs effects, and
`fleet_policy` decides which attempt to launch, cancel or give up. docs/reference/protocol.md has the diagram.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, get_args

from diloco_orchestrator.executors.contract import ReplicaHandle, ReplicaState, ReplicaStatus
from diloco_orchestrator.protocol.attempt_records import VACATED
from diloco_orchestrator.supervision.attempt_outcome import outcome_of
from diloco_orchestrator.supervision.attempt_types import (
    AbandonLaunch,
    Alive,
    AttemptPolicy,
    Beat,
    BeatSeen,
    CallCancel,
    CallFind,
    CallLaunch,
    CancelAccepted,
    CancelAsked,
    CancelFailed,
    Cancelling,
    CancelSeen,
    ClaimLost,
    Effect,
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
    Refusal,
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
    WriteWaiting,
)

# -- the table: every pair of a state and an event has a rule, or a reason why it cannot occur ------------------------

StateClass = type[State]
EventClass = type[Event]
STATES: tuple[StateClass, ...] = get_args(State)
EVENTS: tuple[EventClass, ...] = get_args(Event)


class RefusedEvent(RuntimeError):
    """An event occurred in a state in which it cannot: a bug of this package, not of its user."""


class Step(NamedTuple):
    """The result of one event: next state, effects to perform, and the log line `reason`, empty if none is needed."""

    state: State
    effects: tuple[Effect, ...] = ()
    reason: str = ""


class Transition(NamedTuple):
    """An entry of the transition table of attempts: its rule, and every state class that the rule may lead to."""

    rule: Callable[..., Step]
    to: tuple[StateClass, ...]


MOVES: dict[tuple[StateClass, EventClass], Transition] = {}
REFUSED: dict[tuple[StateClass, EventClass], str] = {}  # why the event cannot arrive in that state

_Rule = TypeVar("_Rule", bound=Callable[..., Step])
_States = StateClass | tuple[StateClass, ...]
_Events = EventClass | tuple[EventClass, ...]


def _pairs(states: _States, events: _Events) -> list[tuple[StateClass, EventClass]]:
    of_states = states if isinstance(states, tuple) else (states,)
    of_events = events if isinstance(events, tuple) else (events,)
    return [(state, event) for state in of_states for event in of_events]


def on(states: _States, events: _Events, to: _States = ()) -> Callable[[_Rule], _Rule]:
    """Decorator that adds a rule `(state, event, now, policy) -> Step` to the table for `states` and `events`.

    `to`: the state classes that the rule may return; by default the class does not change.
    """

    def enter(rule: _Rule) -> _Rule:
        for state, event in _pairs(states, events):
            MOVES[state, event] = Transition(rule, (to if isinstance(to, tuple) else (to,)) or (state,))
        return rule

    return enter


def refuse(states: _States, events: _Events, why: str) -> None:
    """Enter into the table that `events` cannot occur in `states`, except in pairs with a rule, and `why`."""
    for pair in _pairs(states, events):
        if pair not in MOVES:
            REFUSED.setdefault(pair, why)


def advance(state: State, event: Event, now: float, policy: AttemptPolicy) -> Step:
    """The attempt's next state, effects to perform, and why. Raises `RefusedEvent` for a pair in `REFUSED`."""
    move = MOVES.get((type(state), type(event)))
    if move is None:
        raise RefusedEvent(
            f"{event} arrived while the attempt was {state}, but {REFUSED[type(state), type(event)]}. This is a bug of "
            "diloco-orchestrator: please report it with this line. Replicas go on by themselves; attach to the run "
            "again to supervise it."
        )
    return move.rule(state, event, now, policy)


# -- how an attempt ended ---------------------------------------------------------------------------------------------


def end_step(state: Alive, outcome: Outcome, reason: str, now: float, fault: str = "") -> Step:
    """The transition of an attempt to the state `Ended`.

    A cancelled attempt ends as an error, or as vacated if the run was scaled down, unless its outcome is done or
    superseded. `fault`: type and line of the error in its exit record; empty if there is none.
    """
    if outcome is Outcome.SUPERSEDED:
        words = "it exited because another process has its replica, which is followed now"
        return Step(Ended(outcome, now, reason), (FindSuccessor(),), words)
    if isinstance(state, Cancelling) and outcome is not Outcome.DONE:
        outcome, reason, fault = _outcome_of_cancel(state.why), state.why, ""
    return Step(
        Ended(outcome, now, reason, fault=fault), (), f"ended ({outcome}): {reason.removeprefix(f'{outcome}: ')}"
    )


def _outcome_of_cancel(why: str) -> Outcome:
    """The outcome of an attempt whose cancel record has this reason."""
    return Outcome.VACATED if why.startswith(VACATED) else Outcome.ERROR


@on((Reserved, Postponed, Running, Cancelling), ExitSeen, to=Ended)
def _exit_seen(state: Alive, event: ExitSeen, now: float, policy: AttemptPolicy) -> Step:
    outcome, reason = outcome_of(event.code, event.status), f"{event.reason} (exit code {event.code})"
    return end_step(state, outcome, reason, now, event.fault)


@on(Unreachable, ExitSeen, to=(Unreachable, Ended))
def _exit_of_unreachable(state: Unreachable, event: ExitSeen, now: float, policy: AttemptPolicy) -> Step:
    """End an attempt that this coordinator cannot poll, by its exit record; after a lost claim ignore "superseded".

    The claim is lost to another process, which is followed by its heartbeats. Ending it by that exit code would make
    the coordinator search for a successor, find the same process, and count its seconds without heartbeat from 0: with
    a forged exit record a dead attempt would never count as hung (no heartbeat for `hung_after_s`).
    """
    if state.why == "claim lost" and outcome_of(event.code, event.status) is Outcome.SUPERSEDED:
        return Step(state)
    return _exit_seen(state, event, now, policy)


@on((Reserved, Running, Unreachable, Cancelling), Replaced, to=Ended)
def _replaced(state: Alive, event: Replaced, now: float, policy: AttemptPolicy) -> Step:
    """End an attempt that has a successor, as a new coordinator finds, though it left no exit record."""
    outcome, reason = event.outcome or Outcome.ERROR, event.reason or "it left no exit record"
    step = end_step(state, outcome, reason, now)
    assert isinstance(step.state, Ended)
    return step._replace(state=replace(step.state, took_part=event.took_part, fault=event.fault))


@on(Ended, Replaced)
def _judged(state: Ended, event: Replaced, now: float, policy: AttemptPolicy) -> Step:
    """Replace an ended attempt's outcome by that in the next attempt's record, so that all coordinators count alike."""
    if event.outcome is None:
        return Step(state)
    return Step(Ended(event.outcome, state.at, event.reason, event.took_part))


# -- from the intent to the handle ------------------------------------------------------------------------------------


@on(Unlaunched, IntentWritten, to=Launching)
def _launch(state: Unlaunched, event: IntentWritten, now: float, policy: AttemptPolicy) -> Step:
    return Step(Launching(now, None), (CallLaunch(),))


@on(Unlaunched, IntentTaken, to=Reserved)
def _leave_to_other(state: Unlaunched, event: IntentTaken, now: float, policy: AttemptPolicy) -> Step:
    return Step(Reserved(now, None, launch_at=now + policy.adopt_after_s))


@on(Reserved, Tick, to=(Reserved, Launching))
def _adopt(state: Reserved, event: Tick, now: float, policy: AttemptPolicy) -> Step:
    """Repeat a launch whose coordinator may have died before the launch call or before it wrote the handle."""
    if now < state.launch_at:
        return Step(state)
    if not state.wanted:
        return Step(state, (CallFind(),))
    words = f"launched here: its intent has had no handle for {policy.adopt_after_s:g} s"
    return Step(Launching(state.since, state.beat), (CallLaunch(),), words)


@on((Reserved, Postponed), LegStopped, to=Reserved)
def _not_wanted(state: Reserved | Postponed, event: LegStopped, now: float, policy: AttemptPolicy) -> Step:
    """After the run's stop: launch nothing, but search for a process that a dead coordinator may have launched."""
    at = state.launch_at if isinstance(state, Reserved) else state.retry_at
    return Step(Reserved(state.since, state.beat, launch_at=at, wanted=False))


@on(Launching, LaunchReturned, to=Running)
def _launched(state: Launching, event: LaunchReturned, now: float, policy: AttemptPolicy) -> Step:
    return Step(Running(state.since, state.beat, event.handle), (WriteHandle(event.handle, event.hourly_usd),))


@on(Launching, LaunchFailed, to=Ended)
def _not_launched(state: Launching, event: LaunchFailed, now: float, policy: AttemptPolicy) -> Step:
    # No exit record will say it, and the intent of the next attempt may come in an hour.
    return end_step(state, event.outcome, event.reason, now)._replace(effects=(WriteWaiting(event.reason),))


@on(Launching, LaunchDenied, to=(Postponed, Ended))
def _denied(state: Launching, event: LaunchDenied, now: float, policy: AttemptPolicy) -> Step:
    """Retry the launch of this attempt for `denied_for_s`; then end it as permanent."""
    refusal = _refused(state, event.error, True, now)
    if now - refusal.since > policy.denied_for_s:
        return end_step(state, Outcome.PERMANENT, f"its provider refuses to launch it: {event.error}", now)
    return _postponed(state, refusal, now + policy.retry_denied_s)


@on(Launching, LaunchUnavailable, to=(Postponed, Ended))
def _unavailable(state: Launching, event: LaunchUnavailable, now: float, policy: AttemptPolicy) -> Step:
    """Retry the launch of this attempt for `unavailable_for_s`, no budget used; then end it as an error."""
    refusal = _refused(state, event.error, False, now)
    if now - refusal.since > policy.unavailable_for_s:
        hours = policy.unavailable_for_s / 3600
        return end_step(state, Outcome.ERROR, f"it could not be launched for {hours:g} h: {event.error}", now)
    return _postponed(state, refusal, now + _unavailable_pause_s(event, refusal.calls, policy))


def _refused(state: Launching, error: str, denied: bool, now: float) -> Refusal:
    """The provider's refusal of this launch call, counted with those before if `denied` is the same for both."""
    before = state.refusal
    if before is None or before.denied != denied:
        return Refusal(now, error, denied)
    return Refusal(before.since, error, denied, before.calls + 1)


def _postponed(state: Launching, refusal: Refusal, retry_at: float) -> Step:
    words = f"it is not launched yet: {refusal.error}" if refusal.calls == 1 else ""
    repeated = state.refusal is not None and state.refusal.error == refusal.error
    effects = () if repeated else (WriteWaiting(refusal.error),)
    return Step(Postponed(state.since, state.beat, refusal, retry_at), effects, words)


def _unavailable_pause_s(event: LaunchUnavailable, calls: int, policy: AttemptPolicy) -> float:
    first_s, longest_s = policy.retry_unavailable_s
    pause_s = min(longest_s, first_s * 2.0 ** min(calls - 1, 30)) * (1 + event.spread) / 2
    # A provider that asks for a day would outlast what the user waits for: it is asked again after an hour.
    return max(pause_s, min(event.retry_after_s or 0.0, 3600.0))


@on(Postponed, Tick, to=(Postponed, Launching))
def _try_again(state: Postponed, event: Tick, now: float, policy: AttemptPolicy) -> Step:
    if now < state.retry_at:
        return Step(state)
    return Step(Launching(state.since, state.beat, state.refusal), (CallLaunch(),))


@on((Reserved, Postponed), HandleSeen, to=(Running, Unreachable))
def _handle_seen(state: Reserved | Postponed, event: HandleSeen, now: float, policy: AttemptPolicy) -> Step:
    if event.ours:
        return Step(Running(state.since, state.beat, event.handle))
    words = f"it runs on {event.handle.executor}: followed by its records, and replaced here when it has ended"
    return Step(Unreachable(state.since, state.beat, "other executor"), (), words)


@on(Reserved, SearchDone, to=(Running, Ended))
def _searched(state: Reserved, event: SearchDone, now: float, policy: AttemptPolicy) -> Step:
    if event.handle is None:
        return end_step(state, Outcome.ERROR, "it was never launched", now)
    return Step(Running(state.since, state.beat, event.handle), (WriteHandle(event.handle, None),))


@on(Reserved, SearchFailed)
def _search_later(state: Reserved, event: SearchFailed, now: float, policy: AttemptPolicy) -> Step:
    return Step(replace(state, launch_at=now + policy.retry_denied_s), (), search_words(event))


def search_words(event: SearchFailed) -> str:
    """The log line about a failed search for an attempt's process."""
    return f"its provider could not be searched for its process: {event.error}"


# -- running ----------------------------------------------------------------------------------------------------------


@on(Running, VendorSaid, to=(Running, Ended))
def _status_seen(state: Running, event: VendorSaid, now: float, policy: AttemptPolicy) -> Step:
    if event.status.state.ended:
        return _end_by_status(state, event.status, now)
    runs_now = event.status.state is ReplicaState.RUNNING and (state.running_since is None or state.pending)
    words = f"it runs image {event.status.image}" if runs_now and event.status.image else ""
    pending = event.status.state is ReplicaState.PENDING
    waits_for = (event.status.message or event.status.native_state) if pending else ""
    effects: tuple[Effect, ...] = ()
    if waits_for != state.waits_for:
        words, effects = f"it has not started yet: {waits_for}" if waits_for else words, (WriteWaiting(waits_for),)
    running_since = now if state.running_since is None and event.status.has_machine else state.running_since
    seen = replace(state, running_since=running_since, blind_since=None, pending=pending, waits_for=waits_for)
    return Step(seen, effects, words)


@on(Running, VendorBlind)
def _status_unknown(state: Running, event: VendorBlind, now: float, policy: AttemptPolicy) -> Step:
    return Step(state if state.blind_since is not None else replace(state, blind_since=now, pending=False))


def _end_by_status(state: Alive, status: ReplicaStatus, now: float) -> Step:
    return end_step(state, outcome_of(status.exit_code, status), status.message or status.reason or status.state, now)


@on((Reserved, Launching, Postponed, Running, Unreachable), BeatSeen)
def _beat_seen(
    state: Reserved | Launching | Postponed | Running | Unreachable, event: BeatSeen, now: float, policy: AttemptPolicy
) -> Step:
    moved = state.beat is None or state.beat.counter < event.counter  # an older one was put back by somebody else
    return Step(replace(state, beat=Beat(event.counter, now)) if moved else state)


@on(Ended, ClaimLost, to=Unreachable)
def _claim_lost(state: Ended, event: ClaimLost, now: float, policy: AttemptPolicy) -> Step:
    return Step(Unreachable(now, None, "claim lost"), (), "another process has claimed it: followed by its records")


# -- cancelling -------------------------------------------------------------------------------------------------------


@on(Running, (CancelAsked, CancelSeen), to=Cancelling)
def _cancel(state: Running, event: CancelAsked | CancelSeen, now: float, policy: AttemptPolicy) -> Step:
    blind = state.blind_since is not None
    vacated = _outcome_of_cancel(event.why) is Outcome.VACATED and not state.pending
    call_at = now + policy.vacate_s if vacated else -math.inf
    found = Cancelling(state.since, state.beat, event.why, now, state.handle, call_at=call_at, blind=blind)
    if vacated:
        effects = (WriteCancel(event.why),) if isinstance(event, CancelAsked) else ()
        return Step(found, effects, f"it leaves within {policy.vacate_s:.0f} s: {event.why}")
    if isinstance(event, CancelSeen):
        return Step(found)  # the next Tick calls the provider: the writer of the record may have died before its call
    return Step(found, (WriteCancel(event.why), CallCancel(state.handle)), f"cancelling it: {event.why}")


@on((Reserved, Postponed, Launching), CancelAsked, to=Cancelling)
def _cancel_launch(
    state: Reserved | Postponed | Launching, event: CancelAsked, now: float, policy: AttemptPolicy
) -> Step:
    """Cancel an attempt without a handle: its process is ended once the launch call or a search finds it."""
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
    """End an attempt whose process can be neither cancelled nor polled here; a later one supersedes it."""
    effects = (WriteCancel(event.why),) if isinstance(event, CancelAsked) else ()
    return end_step(state, _outcome_of_cancel(event.why), event.why, now)._replace(effects=effects)


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


@on(Cancelling, (LaunchDenied, LaunchFailed), to=Ended)
def _cancel_unlaunched(
    state: Cancelling, event: LaunchDenied | LaunchFailed, now: float, policy: AttemptPolicy
) -> Step:
    return end_step(state, Outcome.ERROR, state.why, now)


@on(Cancelling, LaunchUnavailable)
def _cancel_unanswered(state: Cancelling, event: LaunchUnavailable, now: float, policy: AttemptPolicy) -> Step:
    """Search for the process: the provider may have started it, and its reply was lost."""
    return Step(replace(state, search_at=now))


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
    """Repeat the refused cancel after a pause; if the status is unknown too, end the attempt after `cancelled_for_s`.

    A provider that is away for a minute knows the process again after that; one on another host is never cancelled
    from here.
    """
    if state.blind and now - state.cancelled_at > policy.cancelled_for_s:
        return end_step(state, Outcome.ERROR, state.why, now)
    call_at = now + policy.retry_cancel_s
    return Step(replace(state, call_at=call_at), (), f"it could not be cancelled: {event.error}")


@on(Cancelling, Tick, to=(Cancelling, Ended))
def _cancel_on(state: Cancelling, event: Tick, now: float, policy: AttemptPolicy) -> Step:
    """Repeat an unaccepted cancel, or the search for the process; end the attempt after `cancelled_for_s`."""
    unanswered = state.accepted or state.handle is None
    if unanswered and now - state.cancelled_at > policy.cancelled_for_s:
        calling = state.handle is None and state.search_at is None
        return end_step(state, Outcome.ERROR, state.why, now)._replace(effects=(AbandonLaunch(),) if calling else ())
    if state.handle is not None and not state.accepted and now >= state.call_at:
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
    return Step(GivenUp(event.reason, state.cause), (WriteOut(event.reason),), words)


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


# -- a replica and its attempts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaView:
    """A coordinator's view of one replica since start or resume: its newest attempt, and how earlier ones ended.

    A running coordinator and a new one build it with the same function, `follow`: the former from events as they
    happen, the latter from the bucket's records (`record_events`).
    """

    replica_id: int
    attempt: int = 0  # number of the newest attempt, of any leg; 0 before the first
    state: State = field(default_factory=Unlaunched)
    # Ended attempts of this leg, the newest included, since the newest of them that took part in a commit.
    endings: Mapping[Outcome, int] = field(default_factory=dict)
    # Error type and line of the newest end, and how many ends in a row are alike; "" and 0 after any other end, and
    # after one of an attempt that took part in a commit.
    fault: str = ""
    faults: int = 0
    took_part: bool = False  # whether a commit of this leg averaged one of its attempts that have ended
    place: str = ""  # of the newest attempt, as its intent names it: of `Places`, or an executor's name

    @property
    def who(self) -> tuple[int, int]:
        """(replica id, attempt), to which events are addressed."""
        return self.replica_id, self.attempt

    def next_attempt(self, number: int, place: str) -> "ReplicaView":
        """A copy in which attempt `number`, launched at `place`, is the replica's newest one."""
        return replace(self, attempt=number, state=Unlaunched(), place=place)


def follow(view: ReplicaView, event: Event, now: float, policy: AttemptPolicy) -> tuple[ReplicaView, Step]:
    """Advance the replica's newest attempt by one event and count its end. Raises `RefusedEvent` if that cannot be."""
    step = advance(view.state, event, now, policy)
    endings = view.endings
    if isinstance(step.state, Ended) and step.state.took_part:
        endings = _counted({}, step.state, +1)
    elif not isinstance(step.state, GivenUp):
        endings = _counted(_counted(endings, view.state, -1), step.state, +1)
    fault, faults = _faults(view, step.state)
    took_part = view.took_part or (isinstance(step.state, Ended) and step.state.took_part)
    return replace(view, state=step.state, endings=endings, fault=fault, faults=faults, took_part=took_part), step


def _faults(view: ReplicaView, state: State) -> tuple[str, int]:
    """(the error with which the replica's last attempts in succession ended, the number of these attempts).

    `state`: the newest attempt's state. ("", 0) once it ended otherwise, or after a commit averaged its contribution.
    """
    if not isinstance(state, Ended):
        return view.fault, view.faults
    if state.took_part or state.outcome is not Outcome.ERROR or not state.fault:
        return "", 0
    if isinstance(view.state, Ended):
        return view.fault, view.faults
    return state.fault, view.faults + 1 if state.fault == view.fault else 1


def _counted(endings: Mapping[Outcome, int], state: State, change: int) -> Mapping[Outcome, int]:
    """`endings`, number of ends by outcome, plus `change` for the outcome of `state` if that counts as an end."""
    if not isinstance(state, Ended) or state.outcome is Outcome.SUPERSEDED:
        return endings
    return {**endings, state.outcome: endings.get(state.outcome, 0) + change}
