"""The attempt machine: one row for each move, a reason for each refusal, and the diagram of the docs."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from diloco_orchestrator.supervision.attempt import EVENTS, MOVES, REFUSED, STATES, RefusedEvent, advance
from diloco_orchestrator.supervision.attempt_types import (
    AbandonLaunch,
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
from executors.contract import ReplicaHandle, ReplicaState, ReplicaStatus

PROTOCOL = Path(__file__).parents[2] / "docs" / "reference" / "protocol.md"
NOW = 1000.0
POLICY = AttemptPolicy(startup_timeout_s=300.0, hung_after_s=180.0)

HANDLE = ReplicaHandle("scripted", "run-1", 0, 1, "native")
OTHER = ReplicaHandle("another", "run-1", 0, 1, "native")
BEAT = Beat(7, 950.0)
DENIAL = Refusal(500.0, "expired", denied=True)
OUTAGE = Refusal(500.0, "503", denied=False, calls=3)
FINE, LOST = ReplicaStatus(ReplicaState.SUCCEEDED), ReplicaStatus(ReplicaState.PREEMPTED, "lost")
OOM = ReplicaStatus(ReplicaState.FAILED, "oom", 137)

UNLAUNCHED = Unlaunched()
RESERVED = Reserved(900.0, BEAT, launch_at=1000.0)
LAUNCHING = Launching(900.0, BEAT)
DENIED = Postponed(900.0, BEAT, DENIAL, retry_at=1000.0)
WAITING = Postponed(900.0, BEAT, OUTAGE, retry_at=1000.0)
RUNNING = Running(900.0, BEAT, HANDLE, running_since=910.0)
UNREACHABLE = Unreachable(900.0, BEAT, "other executor")
CANCELLING = Cancelling(900.0, BEAT, "hung", 990.0, HANDLE)
ACCEPTED = replace(CANCELLING, accepted=True)
CALLED = replace(CANCELLING, handle=None)  # our launch call is under way
SOUGHT = replace(CANCELLING, handle=None, search_at=1000.0)
SUPERSEDED = Ended(Outcome.SUPERSEDED, 990.0, "superseded")


def ended(outcome: Outcome, reason: str, at: float = NOW) -> Ended:
    return Ended(outcome, at, reason)


QUEUED = replace(RUNNING, pending=True)
NO_IMAGE = VendorSaid(ReplicaStatus(ReplicaState.PENDING, "image", message="no image"))
STARTS_NOT = replace(QUEUED, waits_for="no image")
REFUSED_POD = VendorSaid(ReplicaStatus(ReplicaState.PENDING, "refused", message="its pod is refused"))


def said(state: ReplicaState, reason: str = "", code: int | None = None) -> VendorSaid:
    return VendorSaid(ReplicaStatus(state, reason, code))


HUNG = ended(Outcome.ERROR, "hung")
FOUND = (WriteHandle(HANDLE, None), CallCancel(HANDLE))
ROWS = [
    # state, event, next state, effects
    (UNLAUNCHED, IntentWritten(), Launching(NOW, None), CallLaunch()),
    (UNLAUNCHED, IntentTaken(), Reserved(NOW, None, launch_at=1005.0)),
    (UNLAUNCHED, LegStopped(), UNLAUNCHED),
    (UNLAUNCHED, Tick(), UNLAUNCHED),
    # another coordinator's intent
    (RESERVED, HandleSeen(HANDLE, ours=True), Running(900.0, BEAT, HANDLE)),
    (RESERVED, HandleSeen(OTHER, ours=False), UNREACHABLE),
    (RESERVED, ExitSeen(0, "told"), ended(Outcome.DONE, "told (exit code 0)")),
    (RESERVED, BeatSeen(8), replace(RESERVED, beat=Beat(8, NOW))),
    (RESERVED, BeatSeen(7), RESERVED),
    (RESERVED, BeatSeen(6), RESERVED),  # an older one, which somebody has put back
    (RESERVED, CancelAsked("enough"), replace(SOUGHT, why="enough", cancelled_at=NOW), WriteCancel("enough")),
    (RESERVED, CancelSeen("hung"), replace(SOUGHT, cancelled_at=NOW)),
    (RESERVED, SearchDone(HANDLE), Running(900.0, BEAT, HANDLE), WriteHandle(HANDLE, None)),
    (RESERVED, SearchDone(None), ended(Outcome.ERROR, "it was never launched")),
    (RESERVED, SearchFailed("away"), replace(RESERVED, launch_at=1030.0)),
    (RESERVED, LegStopped(), replace(RESERVED, wanted=False)),
    (RESERVED, Replaced(), ended(Outcome.ERROR, "it left no exit record")),
    (RESERVED, Replaced(Outcome.NO_CAPACITY, "none"), ended(Outcome.NO_CAPACITY, "none")),
    (RESERVED, Tick(), LAUNCHING, CallLaunch()),
    (replace(RESERVED, launch_at=1000.1), Tick(), replace(RESERVED, launch_at=1000.1)),
    (replace(RESERVED, wanted=False), Tick(), replace(RESERVED, wanted=False), CallFind()),
    # our launch call
    (LAUNCHING, LaunchReturned(HANDLE, 2.0), Running(900.0, BEAT, HANDLE), WriteHandle(HANDLE, 2.0)),
    (
        LAUNCHING,
        LaunchFailed(Outcome.NO_CAPACITY, "no machine"),
        ended(Outcome.NO_CAPACITY, "no machine"),
        WriteWaiting("no machine"),
    ),
    (
        LAUNCHING,
        LaunchDenied("no"),
        Postponed(900.0, BEAT, Refusal(NOW, "no", denied=True), retry_at=1030.0),
        WriteWaiting("no"),
    ),
    (  # the same words again are not written again
        replace(LAUNCHING, refusal=DENIAL),
        LaunchDenied(DENIAL.error),
        replace(DENIED, refusal=replace(DENIAL, calls=2), retry_at=1030.0),
    ),
    (
        replace(LAUNCHING, refusal=replace(DENIAL, since=399.0)),
        LaunchDenied("no"),
        ended(Outcome.PERMANENT, "its provider refuses to launch it: no"),
    ),
    # the provider is down: first pause 2 s, doubled, at most 120 s; a random part of its second half is left out
    (
        LAUNCHING,
        LaunchUnavailable("502", None, 0.0),
        Postponed(900.0, BEAT, Refusal(NOW, "502", denied=False), retry_at=1001.0),
        WriteWaiting("502"),
    ),
    (
        replace(LAUNCHING, refusal=OUTAGE),
        LaunchUnavailable("502", None, 0.5),
        replace(WAITING, refusal=Refusal(500.0, "502", denied=False, calls=4), retry_at=1012.0),
        WriteWaiting("502"),
    ),
    (
        replace(LAUNCHING, refusal=replace(OUTAGE, calls=1000)),
        LaunchUnavailable("502", None, 0.0),
        replace(WAITING, refusal=Refusal(500.0, "502", denied=False, calls=1001), retry_at=1060.0),
        WriteWaiting("502"),
    ),
    (  # the pause that it asks for, if that is longer
        replace(LAUNCHING, refusal=OUTAGE),
        LaunchUnavailable("429", 300.0, 0.5),
        replace(WAITING, refusal=Refusal(500.0, "429", denied=False, calls=4), retry_at=1300.0),
        WriteWaiting("429"),
    ),
    (
        replace(LAUNCHING, refusal=OUTAGE),
        LaunchUnavailable("429", 1e6, 0.5),
        replace(WAITING, refusal=Refusal(500.0, "429", denied=False, calls=4), retry_at=4600.0),
        WriteWaiting("429"),
    ),
    (  # a refusal of another kind begins anew
        replace(LAUNCHING, refusal=DENIAL),
        LaunchUnavailable("502", None, 0.0),
        Postponed(900.0, BEAT, Refusal(NOW, "502", denied=False), retry_at=1001.0),
        WriteWaiting("502"),
    ),
    (
        replace(LAUNCHING, refusal=replace(OUTAGE, since=NOW - 21601.0)),
        LaunchUnavailable("502", None, 0.0),
        ended(Outcome.ERROR, "it could not be launched for 6 h: 502"),
    ),
    (WAITING, Tick(), replace(LAUNCHING, refusal=OUTAGE), CallLaunch()),
    (LAUNCHING, BeatSeen(8), replace(LAUNCHING, beat=Beat(8, NOW))),
    (LAUNCHING, CancelAsked("hung"), replace(CALLED, cancelled_at=NOW), WriteCancel("hung")),
    (LAUNCHING, LegStopped(), LAUNCHING),
    (LAUNCHING, Tick(), LAUNCHING),
    # our launch call was rejected
    (DENIED, HandleSeen(HANDLE, ours=True), Running(900.0, BEAT, HANDLE)),
    (DENIED, HandleSeen(OTHER, ours=False), UNREACHABLE),
    (DENIED, ExitSeen(78, "told"), ended(Outcome.PERMANENT, "told (exit code 78)")),
    (DENIED, BeatSeen(8), replace(DENIED, beat=Beat(8, NOW))),
    (DENIED, CancelAsked("hung"), replace(SOUGHT, cancelled_at=NOW), WriteCancel("hung")),
    (DENIED, LegStopped(), replace(RESERVED, wanted=False)),
    (DENIED, Tick(), replace(LAUNCHING, refusal=DENIAL), CallLaunch()),
    (replace(DENIED, retry_at=1000.1), Tick(), replace(DENIED, retry_at=1000.1)),
    # launched
    (RUNNING, said(ReplicaState.PENDING), QUEUED),
    (replace(RUNNING, running_since=None), said(ReplicaState.PENDING), replace(QUEUED, running_since=None)),
    (replace(RUNNING, running_since=None), NO_IMAGE, replace(STARTS_NOT, running_since=NOW), WriteWaiting("no image")),
    (RUNNING, REFUSED_POD, replace(QUEUED, waits_for="its pod is refused"), WriteWaiting("its pod is refused")),
    (replace(RUNNING, waits_for="its pod is refused"), REFUSED_POD, replace(QUEUED, waits_for="its pod is refused")),
    (QUEUED, said(ReplicaState.RUNNING), RUNNING),
    (replace(QUEUED, waits_for="its pod is refused"), said(ReplicaState.RUNNING), RUNNING, WriteWaiting("")),
    (replace(RUNNING, running_since=None), said(ReplicaState.RUNNING), replace(RUNNING, running_since=NOW)),
    (replace(RUNNING, blind_since=5.0), said(ReplicaState.RUNNING), RUNNING),
    (RUNNING, said(ReplicaState.SUCCEEDED), ended(Outcome.DONE, "succeeded")),
    (RUNNING, said(ReplicaState.FAILED, code=0), ended(Outcome.DONE, "failed")),
    (RUNNING, said(ReplicaState.PREEMPTED, "lost"), ended(Outcome.PREEMPTED, "lost")),
    (RUNNING, said(ReplicaState.FAILED, code=75), ended(Outcome.PREEMPTED, "failed")),
    (RUNNING, said(ReplicaState.TIMED_OUT, "deadline"), ended(Outcome.TIMED_OUT, "deadline")),
    (RUNNING, said(ReplicaState.FAILED, "no_capacity"), ended(Outcome.NO_CAPACITY, "no_capacity")),
    (RUNNING, said(ReplicaState.FAILED, "permanent", 78), ended(Outcome.PERMANENT, "permanent")),
    (RUNNING, said(ReplicaState.FAILED, "oom", 137), ended(Outcome.ERROR, "oom")),
    (RUNNING, said(ReplicaState.CANCELLED, "user"), ended(Outcome.ERROR, "user")),
    (RUNNING, said(ReplicaState.FAILED, "superseded", 76), replace(SUPERSEDED, at=NOW), FindSuccessor()),
    (RUNNING, VendorBlind(), replace(RUNNING, blind_since=NOW)),
    (replace(RUNNING, blind_since=5.0), VendorBlind(), replace(RUNNING, blind_since=5.0)),
    (RUNNING, ExitSeen(1, "told"), ended(Outcome.ERROR, "told (exit code 1)")),
    (RUNNING, ExitSeen(0, "told", OOM), ended(Outcome.DONE, "told (exit code 0)")),
    (
        RUNNING,
        ExitSeen(1, "told", ReplicaStatus(ReplicaState.PREEMPTED)),
        ended(Outcome.PREEMPTED, "told (exit code 1)"),
    ),
    (RUNNING, ExitSeen(1, "told", ReplicaStatus(ReplicaState.SUCCEEDED)), ended(Outcome.ERROR, "told (exit code 1)")),
    (RUNNING, ExitSeen(76, "told"), ended(Outcome.SUPERSEDED, "told (exit code 76)"), FindSuccessor()),
    (RUNNING, BeatSeen(7), RUNNING),
    (RUNNING, BeatSeen(6), RUNNING),  # likewise
    (replace(RUNNING, beat=None), BeatSeen(0), replace(RUNNING, beat=Beat(0, NOW))),
    (RUNNING, CancelAsked("hung"), replace(CANCELLING, cancelled_at=NOW), WriteCancel("hung"), CallCancel(HANDLE)),
    (
        replace(RUNNING, blind_since=5.0),
        CancelAsked("hung"),
        replace(CANCELLING, cancelled_at=NOW, blind=True),
        WriteCancel("hung"),
        CallCancel(HANDLE),
    ),
    (RUNNING, CancelSeen("hung"), replace(CANCELLING, cancelled_at=NOW)),
    (RUNNING, Replaced(), ended(Outcome.ERROR, "it left no exit record")),
    (RUNNING, LegStopped(), RUNNING),
    (RUNNING, Tick(), RUNNING),
    # followed by its records alone
    (UNREACHABLE, ExitSeen(75, "told"), ended(Outcome.PREEMPTED, "told (exit code 75)")),
    (UNREACHABLE, BeatSeen(8), replace(UNREACHABLE, beat=Beat(8, NOW))),
    (UNREACHABLE, CancelAsked("hung"), HUNG, WriteCancel("hung")),
    (UNREACHABLE, CancelSeen("hung"), HUNG),
    (UNREACHABLE, Replaced(Outcome.TIMED_OUT, "a day"), ended(Outcome.TIMED_OUT, "a day")),
    (
        UNREACHABLE,
        Replaced(Outcome.TIMED_OUT, "a day", took_part=True),
        replace(ended(Outcome.TIMED_OUT, "a day"), took_part=True),
    ),
    (UNREACHABLE, LegStopped(), UNREACHABLE),
    (UNREACHABLE, Tick(), UNREACHABLE),
    # asked to end
    (CALLED, LaunchReturned(HANDLE, 2.0), CANCELLING, WriteHandle(HANDLE, 2.0), CallCancel(HANDLE)),
    (CALLED, LaunchFailed(Outcome.NO_CAPACITY, "no machine"), HUNG),
    (CALLED, LaunchDenied("no"), HUNG),
    (CALLED, LaunchUnavailable("502", None, 0.0), SOUGHT),
    (SOUGHT, HandleSeen(HANDLE, ours=True), CANCELLING),
    (SOUGHT, HandleSeen(OTHER, ours=False), HUNG),
    (SOUGHT, SearchDone(HANDLE), CANCELLING, *FOUND),
    (SOUGHT, SearchDone(None), HUNG),
    (SOUGHT, SearchFailed("away"), replace(SOUGHT, search_at=1030.0)),
    (SOUGHT, Replaced(), HUNG),
    (CANCELLING, said(ReplicaState.RUNNING), CANCELLING),
    (replace(CANCELLING, blind=True), said(ReplicaState.RUNNING), CANCELLING),
    (CANCELLING, said(ReplicaState.PREEMPTED), HUNG),
    (CANCELLING, said(ReplicaState.FAILED, code=75), HUNG),
    (CANCELLING, said(ReplicaState.SUCCEEDED), ended(Outcome.DONE, "succeeded")),
    (CANCELLING, said(ReplicaState.FAILED, "superseded", 76), replace(SUPERSEDED, at=NOW), FindSuccessor()),
    (CANCELLING, VendorBlind(), replace(CANCELLING, blind=True)),
    (CANCELLING, ExitSeen(75, "told"), HUNG),
    (CANCELLING, ExitSeen(0, "told"), ended(Outcome.DONE, "told (exit code 0)")),
    (CANCELLING, CancelAccepted(), replace(ACCEPTED, cancelled_at=NOW)),
    (CANCELLING, CancelFailed("away"), replace(CANCELLING, call_at=1010.0)),
    (replace(CANCELLING, blind=True), CancelFailed("away"), replace(CANCELLING, blind=True, call_at=1010.0)),
    (replace(CANCELLING, blind=True, cancelled_at=879.9), CancelFailed("away"), HUNG),
    (CANCELLING, CancelAsked("again"), CANCELLING),
    (CANCELLING, BeatSeen(8), CANCELLING),
    (CANCELLING, LegStopped(), CANCELLING),
    (CANCELLING, Tick(), CANCELLING, CallCancel(HANDLE)),
    (replace(CANCELLING, call_at=1000.1), Tick(), replace(CANCELLING, call_at=1000.1)),
    (replace(CANCELLING, cancelled_at=0.0), Tick(), replace(CANCELLING, cancelled_at=0.0), CallCancel(HANDLE)),
    (ACCEPTED, Tick(), ACCEPTED),
    (replace(ACCEPTED, cancelled_at=879.9), Tick(), HUNG),
    (CALLED, Tick(), CALLED),
    (replace(CALLED, cancelled_at=879.9), Tick(), HUNG, AbandonLaunch()),
    (SOUGHT, Tick(), SOUGHT, CallFind()),
    (replace(SOUGHT, search_at=1000.1), Tick(), replace(SOUGHT, search_at=1000.1)),
    (replace(SOUGHT, cancelled_at=879.9), Tick(), HUNG),
    # ended
    (SUPERSEDED, ClaimLost(), Unreachable(NOW, None, "claim lost")),
    (Unreachable(990.0, None, "claim lost"), ExitSeen(76, "forged"), Unreachable(990.0, None, "claim lost")),
    (SUPERSEDED, Tick(), SUPERSEDED, FindSuccessor()),
    (HUNG, Tick(), HUNG),
    (HUNG, LegStopped(), HUNG),
    (HUNG, Replaced(), HUNG),
    (SUPERSEDED, Replaced(Outcome.ERROR, "hung"), replace(HUNG, at=990.0)),
    (SUPERSEDED, Replaced(Outcome.ERROR, "hung", took_part=True), replace(HUNG, at=990.0, took_part=True)),
    (HUNG, TookPart(), replace(HUNG, took_part=True)),
    (HUNG, GaveUp("too often"), GivenUp("too often", "error"), WriteOut("too often")),
    (GivenUp("too often"), LegStopped(), GivenUp("too often")),
    (GivenUp("too often"), Tick(), GivenUp("too often")),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row[0]).__name__}-{type(row[1]).__name__}")
def test_moves(row):
    state, event, expected, *effects = row
    step = advance(state, event, NOW, POLICY)
    assert (step.state, list(step.effects)) == (expected, effects)


def test_every_pair_of_a_state_and_an_event_is_a_move_or_a_named_refusal():
    for pair in [(state, event) for state in STATES for event in EVENTS]:
        assert (pair in MOVES) != (pair in REFUSED), pair
    assert all(REFUSED.values()) and len(MOVES) + len(REFUSED) == len(STATES) * len(EVENTS)


def test_the_table_above_has_every_move_and_leads_wherever_it_may():
    reached: dict[tuple[type, type], set[type]] = {}
    for state, event, expected, *_ in ROWS:
        reached.setdefault((type(state), type(event)), set()).add(type(expected))
    assert reached == {pair: set(move.to) for pair, move in MOVES.items()}
    effects = {type(effect) for row in ROWS for effect in row[3:]}
    assert effects == set(get_args(Effect))


def test_what_cannot_happen_is_refused_with_the_reason():
    with pytest.raises(RefusedEvent, match=r"CancelAccepted.*Launching.*did not make that call.*report it"):
        advance(LAUNCHING, CancelAccepted(), NOW, POLICY)


def diagram() -> str:
    """The transitions between state classes as a Mermaid diagram."""
    edges: dict[tuple[str, str], list[str]] = {}
    for state in STATES:
        for event in EVENTS:
            move = MOVES.get((state, event))
            for to in move.to if move else ():
                if to is not state:
                    edges.setdefault((state.__name__, to.__name__), []).append(event.__name__)
    lines = [f"    {begin} --> {end}: {', '.join(events)}" for (begin, end), events in edges.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> Unlaunched", *lines, "    Ended --> [*]", "    GivenUp --> [*]"])


def test_the_docs_hold_the_diagram_of_the_table():
    documented = PROTOCOL.read_text().split("<!-- attempt machine -->")[1].split("<!-- /attempt machine -->")[0]
    assert documented.strip() == f"```mermaid\n{diagram()}\n```"


# -- pauses -----------------------------------------------------------------------------------------------------------


def pause_s(call: int, spread: float = 0.999999, retry_after_s: float | None = None) -> float:
    """The pause after the `call`-th answer of a provider that is down."""
    before = Refusal(500.0, "503", denied=False, calls=call - 1) if call > 1 else None
    step = advance(Launching(900.0, None, before), LaunchUnavailable("503", retry_after_s, spread), NOW, POLICY)
    assert isinstance(step.state, Postponed)
    return step.state.retry_at - NOW


def test_pauses_of_an_outage_double_up_to_two_minutes():
    assert [round(pause_s(call)) for call in (1, 2, 3, 7, 8, 1000)] == [2, 4, 8, 120, 120, 120]


def test_they_are_spread_over_their_second_half_so_that_not_all_return_at_once():
    assert [pause_s(7, spread) for spread in (0.0, 0.5)] == [60.0, 90.0]


def test_a_provider_is_not_asked_before_it_wants_to_be_and_after_an_hour_at_the_latest():
    assert pause_s(1, 0.0, retry_after_s=600.0) == 600.0 and pause_s(7, 0.0, retry_after_s=5.0) == 60.0
    assert pause_s(1, 0.0, retry_after_s=86400.0) == 3600.0


def test_an_attempt_whose_id_is_vacated_may_leave_by_itself_before_its_provider_is_asked_to_end_it():
    """Providers that end a process at once would lose what it has trained of the open round."""
    why = "vacated: 3 replicas are wanted"
    asked = advance(RUNNING, CancelAsked(why), NOW, POLICY)
    assert asked.effects == (WriteCancel(why),)
    assert advance(asked.state, Tick(), NOW + POLICY.vacate_s - 1.0, POLICY).effects == ()
    assert advance(asked.state, Tick(), NOW + POLICY.vacate_s, POLICY).effects == (CallCancel(HANDLE),)
    left = advance(asked.state, ExitSeen(75, "vacated"), NOW + 1.0, POLICY).state
    assert isinstance(left, Ended) and left.outcome is Outcome.VACATED
