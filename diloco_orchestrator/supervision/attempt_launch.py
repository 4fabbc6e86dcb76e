"""The rules of the attempt machine from the intent to the handle: who launches, and when a launch is tried again.

Importing it enters them in the table. What follows the launch is in `attempt`.
"""

from dataclasses import replace

from diloco_orchestrator.supervision.attempt_outcome import end_step
from diloco_orchestrator.supervision.attempt_policy import AttemptPolicy
from diloco_orchestrator.supervision.attempt_table import Step, on
from diloco_orchestrator.supervision.attempt_types import (
    CallFind,
    CallLaunch,
    Ended,
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
    Reserved,
    Running,
    SearchDone,
    SearchFailed,
    Tick,
    Unlaunched,
    Unreachable,
    WriteHandle,
)


@on(Unlaunched, IntentWritten, to=Launching)
def _launch(state: Unlaunched, event: IntentWritten, now: float, policy: AttemptPolicy) -> Step:
    return Step(Launching(now, None), (CallLaunch(),))


@on(Unlaunched, IntentTaken, to=Reserved)
def _leave_to_other(state: Unlaunched, event: IntentTaken, now: float, policy: AttemptPolicy) -> Step:
    return Step(Reserved(now, None, launch_at=now + policy.adopt_after_s))


@on(Reserved, Tick, to=(Reserved, Launching))
def _adopt(state: Reserved, event: Tick, now: float, policy: AttemptPolicy) -> Step:
    """Take over a launch whose coordinator may have died before the launch call or before it wrote the handle."""
    if now < state.launch_at:
        return Step(state)
    if not state.wanted:
        return Step(state, (CallFind(),))
    words = f"launched here: its intent has had no handle for {policy.adopt_after_s:g} s"
    return Step(Launching(state.since, state.beat), (CallLaunch(),), words)


@on((Reserved, Postponed), LegStopped, to=Reserved)
def _not_wanted(state: Reserved | Postponed, event: LegStopped, now: float, policy: AttemptPolicy) -> Step:
    """After the stop do not launch it here, but keep searching: a coordinator that died may have launched it."""
    at = state.launch_at if isinstance(state, Reserved) else state.retry_at
    return Step(Reserved(state.since, state.beat, launch_at=at, wanted=False))


@on(Launching, LaunchReturned, to=Running)
def _launched(state: Launching, event: LaunchReturned, now: float, policy: AttemptPolicy) -> Step:
    return Step(Running(state.since, state.beat, event.handle), (WriteHandle(event.handle, event.hourly_usd),))


@on(Launching, LaunchFailed, to=Ended)
def _not_launched(state: Launching, event: LaunchFailed, now: float, policy: AttemptPolicy) -> Step:
    return end_step(state, event.outcome, event.reason, now)


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
    """The refusal of a call, which goes on from that of the call before if both are of one kind."""
    before = state.refusal
    if before is None or before.denied != denied:
        return Refusal(now, error, denied)
    return Refusal(before.since, error, denied, before.calls + 1)


def _postponed(state: Launching, refusal: Refusal, retry_at: float) -> Step:
    words = f"it is not launched yet: {refusal.error}" if refusal.calls == 1 else ""
    return Step(Postponed(state.since, state.beat, refusal, retry_at), (), words)


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
    """The log line about a search that failed."""
    return f"its provider could not be searched for its process: {event.error}"
