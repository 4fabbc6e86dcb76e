"""A coordinator that starts from the bucket's records agrees with the one that lived through them.

A thousand seeded histories of launches, rejections, statuses, heartbeats, exits, cancels, stops, crashes at any write
and restarts, with one coordinator or two, by one provider or two. After every step of a coordinator another one is
started from what is in the bucket, and their views are compared. What the bucket cannot hold is written down in
`disagreement`, and nothing else may differ.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from attempt_histories import ENDS, UNKNOWN, History, Post, Provider, Spectator, Watched, new_bucket
from scripted import STAMP

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Cancel, Exit, Handle, Intent
from diloco_orchestrator.supervision import attempt as attempt_machine
from diloco_orchestrator.supervision.attempt import MOVES, ReplicaView, Step, advance
from diloco_orchestrator.supervision.attempt_types import (
    Alive,
    Cancelling,
    Ended,
    GivenUp,
    Launching,
    Outcome,
    Postponed,
    Reserved,
    Running,
    State,
    Unreachable,
)
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from executors.contract import (
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
)

SEEDS = 1000
OPERATIONS = 24
UNREAD = "something was written that the live coordinator has not read yet"


@dataclass(frozen=True)
class Recorded:
    """What exists of the newest attempt beside its intent, and whether its provider can be asked about it."""

    exit: bool
    handle: bool
    cancel: bool
    blind: bool  # now
    was_blind: bool  # now or earlier


def compare(history: History, post: Post, compared: Counter[str]) -> None:
    """Start another coordinator from what is in the bucket, and compare its views with those of the one that steps."""
    assert post.coordinator is not None
    store = Watched(history.bucket, writes=False)
    spectator: Any = Spectator(post.provider)
    new = Coordinator(RunReader(store), Means(spectator, ManualClock(history.clock.now()), STAMP))
    for live, other in zip(post.coordinator._fleet.views, new._fleet.views, strict=True):
        about = {key for key in store.seen if key.startswith(keys.attempts(live.replica_id))}
        if {key for key in about - post.store.seen if not key.endswith("heartbeat.json")}:
            compared[UNREAD] += 1
            continue
        wrong = disagreement(live, other, recorded(history, live, post.provider))
        if wrong:
            raise AssertionError(f"seed {history.seed}: {wrong}\n  live {live}\n  new  {other}")
        compared[type(live.state).__name__] += 1


def recorded(history: History, view: ReplicaView, provider: Provider) -> Recorded:
    there = {info.key for info in history.bucket.list(keys.attempts(view.replica_id))}
    return Recorded(
        exit=keys.exit_record(*view.who) in there,
        handle=keys.handle(*view.who) in there,
        cancel=keys.cancel(*view.who) in there,
        blind=view.who in provider.blind or provider.denied is not None,
        was_blind=view.who in provider.was_blind,
    )


def disagreement(live: ReplicaView, new: ReplicaView, recorded: Recorded) -> str:
    """What a coordinator that has just started sees otherwise, and must not. It cannot know

    - any time;
    - whose call launches an attempt that has no handle: Launching and Postponed are Reserved to it;
    - an end without exit record and without a later intent (a launch that failed, a process that vanished, a cancel
      whose end nobody saw, a claim that was lost): it asks the provider, and until that reports the end the attempt
      has not ended to it, so it launches no later one;
    - what a provider that could not be asked would have said of an exit with an error;
    - that a replica was given up, until it decides the same at its first step.
    """
    if live.attempt != new.attempt:
        return "another attempt"
    if isinstance(live.state, GivenUp) and isinstance(new.state, GivenUp):
        ends = Counter(live.endings), Counter(new.endings)  # the newest attempt's included, which may differ
        same = (ends[0] - ends[1]).total() <= 1 and (ends[1] - ends[0]).total() <= 1
    elif isinstance(live.state, GivenUp):
        same = sum(live.endings.values()) - 1 == sum(of_earlier_attempts(new).values())
    else:
        same = of_earlier_attempts(live) == of_earlier_attempts(new)
    if not same:
        return "other endings of earlier attempts"
    if live.fault and not recorded.was_blind and not isinstance(new.state, Alive) and new.fault != live.fault:
        return "another error"
    if isinstance(live.state, Ended | GivenUp):
        return differing_end(live.state, new.state, recorded)
    if isinstance(live.state, Unreachable) and live.state.why == "claim lost" and recorded.blind:
        return "" if isinstance(new.state, Alive) else "not alive"
    if type(new.state) is not (Reserved if isinstance(live.state, Launching | Postponed) else type(live.state)):
        return "another state"
    return "" if details(live.state) == details(new.state) else "other details"


def differing_end(live: Ended | GivenUp, new: State, recorded: Recorded) -> str:
    if isinstance(new, Alive):
        return "not ended, though its exit is recorded" if recorded.exit else ""
    if isinstance(new, GivenUp):
        return "" if isinstance(live, GivenUp) and live.reason == new.reason else "given up only here"
    if not isinstance(new, Ended):
        return "another state"
    asked_in_vain = recorded.was_blind or recorded.blind
    certain = (recorded.exit or (recorded.handle and not recorded.cancel)) and not asked_in_vain
    return "another outcome" if certain and isinstance(live, Ended) and details(live) != details(new) else ""


def of_earlier_attempts(view: ReplicaView) -> Counter[Outcome]:
    endings = Counter(view.endings)
    if isinstance(view.state, Ended) and view.state.outcome is not Outcome.SUPERSEDED:
        endings[view.state.outcome] -= 1
    return +endings


def details(state: State) -> Any:
    """What of a state is in the bucket."""
    match state:
        case Ended(outcome, _, reason):
            return outcome, reason
        case Running(handle=handle):
            return handle
        case Cancelling(why=why, handle=handle):
            return why, handle
        case Unreachable(why=why):
            return why
    return None


@pytest.mark.slow
def test_a_new_coordinator_agrees_with_the_one_that_saw_it_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: Counter[tuple[type, type]] = Counter()

    def watched(state: Any, event: Any, now: float, policy: Any) -> Step:
        step = advance(state, event, now, policy)
        moved[type(state), type(event)] += 1
        assert type(step.state) in MOVES[type(state), type(event)].to, f"{state} + {event} led to {step.state}"
        return step

    monkeypatch.setattr(attempt_machine, "advance", watched)
    compared: Counter[str] = Counter()
    for seed in range(SEEDS):
        History(seed, lambda history, post: compare(history, post, compared)).play(OPERATIONS)
    skipped = compared.pop(UNREAD)
    assert sum(compared.values()) > 15_000 and skipped < 0.1 * sum(compared.values()), compared
    assert len(compared) == 9 and min(compared.values()) > 50, compared
    assert len(set(MOVES) - set(moved)) < 10, set(MOVES) - set(moved)


# -- intents that do not name the end before them ---------------------------------------------------------------------


def attempts_of_an_older_version(**records: Any) -> ReplicaView:
    """Attempt 1 as it was left, attempt 2 launched by version 0.1.0, seen by a coordinator that starts now."""
    bucket, provider = new_bucket(0), Provider("scripted", random.Random(0))
    for attempt, why in ((1, "start of the leg"), (2, "attempt 1: as 0.1.0 said it")):
        intent = Intent(**STAMP(), replica_id=0, attempt=attempt, leg=1, executor="scripted", why=why)
        bucket.create(keys.intent(0, attempt), intent.to_bytes())
    native = ReplicaHandle(records.get("executor", "scripted"), "run-1", 0, 1, "native").to_json()
    handle = Handle(**STAMP(), replica_id=0, attempt=1, handle=native)
    bucket.create(keys.handle(0, 1), handle.to_bytes())
    if "code" in records:
        ended = Exit(**STAMP(), replica_id=0, attempt=1, code=records["code"], reason="told", round=1)
        bucket.create(keys.exit_record(0, 1), ended.to_bytes())
    if "cancel" in records:
        cancel = Cancel(**STAMP(), replica_id=0, attempt=1, reason=records["cancel"])
        bucket.create(keys.cancel(0, 1), cancel.to_bytes())
    provider.states[0, 1] = records.get("status", ReplicaStatus(ReplicaState.RUNNING))
    coordinator = Coordinator(RunReader(Watched(bucket, writes=False)), Means(provider, ManualClock(), STAMP))
    assert provider.cancelled == []  # what was replaced is not called any more
    return coordinator._fleet.views[0]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ({"code": 75}, {Outcome.PREEMPTED: 1}),
        ({"code": 75, "cancel": "hung"}, {Outcome.ERROR: 1}),
        ({"code": 76}, {}),
        ({"code": 1}, {Outcome.ERROR: 1}),
        ({"code": 1, "status": ENDS[1]}, {Outcome.PREEMPTED: 1}),
        ({"status": ENDS[2]}, {Outcome.TIMED_OUT: 1}),
        ({"status": ENDS[5]}, {}),
        ({"status": UNKNOWN}, {Outcome.ERROR: 1}),
        ({"cancel": "hung"}, {Outcome.ERROR: 1}),
        ({"executor": "another"}, {Outcome.ERROR: 1}),
        ({"executor": "another", "cancel": "hung", "code": 0}, {Outcome.DONE: 1}),
        ({}, {Outcome.ERROR: 1}),
    ],
)
def test_where_no_intent_names_the_end_it_is_read_from_the_records_and_the_provider(records, expected):
    view = attempts_of_an_older_version(**records)
    assert (view.attempt, type(view.state)) == (2, Reserved) and dict(+Counter(view.endings)) == expected
