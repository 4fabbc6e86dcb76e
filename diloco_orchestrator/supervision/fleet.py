"""`Fleet`: all replicas as one coordinator knows them: passes events to their attempts and performs the effects.

`attempt` has the transitions; `fleet_policy` decides which attempt is launched, cancelled or given up.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from diloco_orchestrator.clock import Background, Clock, in_parallel
from diloco_orchestrator.errors import StoreError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Cancel, Handle, Intent, Waiting
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Out
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.supervision.attempt import ReplicaView, follow
from diloco_orchestrator.supervision.attempt_types import (
    COSTLY,
    AbandonLaunch,
    Alive,
    AttemptPolicy,
    CallCancel,
    CallFind,
    CallLaunch,
    CancelAsked,
    Cancelling,
    ClaimLost,
    Effect,
    Ended,
    Event,
    FindSuccessor,
    GaveUp,
    GivenUp,
    IntentWritten,
    Launching,
    LegStopped,
    Outcome,
    Postponed,
    Running,
    State,
    Tick,
    TookPart,
    WriteCancel,
    WriteHandle,
    WriteOut,
    WriteWaiting,
)
from diloco_orchestrator.supervision.end_of_leg import coordinator_name
from diloco_orchestrator.supervision.fleet_policy import Launch
from diloco_orchestrator.supervision.record_events import Addressed, RecordEvents, Who, read_attempts, recovered
from diloco_orchestrator.supervision.vendor import Vendor

log = logging.getLogger(__name__)

_LAST_ROUNDS = 50  # an attempt that was averaged in none of these before its end has not got on
_SHORT = 24  # characters of a cause that is repeated rather than referred to


class Fleet:
    """The newest attempt of every replica in one leg (start or resume to stop).

    The views are built from the bucket alone (`_recover`), so a new coordinator has those of the old one; `numbers`:
    all attempts in the bucket by replica id, oldest first. `seen`: the store that `records` reads from. `background`:
    sends requests in parallel. Every method raises the store's errors; what was observed until then is kept, and the
    next call goes on from there.
    """

    def __init__(
        self,
        run_log: RunLog,
        seen: SeenStore,
        records: AttemptRecords,
        numbers: Mapping[int, Sequence[int]],
        leg: int,
        vendor: Vendor,
        clock: Clock,
        policy: AttemptPolicy,
        stamp: Stamp,
        background: Background,
    ) -> None:
        config = run_log.run.config
        self._log = run_log
        self._run_id = run_log.run.run_id
        self._writer = Writer(run_log.store, Role.COORDINATOR)
        self._leg = leg
        self._vendor = vendor
        self._clock = clock
        self._policy = policy
        self._stamp = stamp
        self._records = records
        self._seen = seen
        self._events = RecordEvents(records, seen, vendor.is_ours, config, clock.now())
        self._views: dict[int, ReplicaView] = {}
        self._told: dict[str, Who] = {}  # why attempts ended, and which one ended for it first
        self._background = background
        self._recover({replica_id: numbers.get(replica_id, ()) for replica_id in range(config.most_replicas)})

    @property
    def views(self) -> Sequence[ReplicaView]:
        """Views of the replicas, in the order of their ids."""
        return tuple(self._views.values())

    @property
    def waited_for(self) -> set[tuple[int, float]]:
        """The rounds whose end replicas waited for, as heartbeats say, and when these were read, on the own clock."""
        return {each for each in self._events.waited_for.values() if each is not None}

    def alive(self) -> list[int]:
        """Replicas whose newest attempt is not known to have ended."""
        return [view.replica_id for view in self.views if isinstance(view.state, Alive)]

    # -- events --------------------------------------------------------------------------------------------------

    def observe(self, stopped: bool) -> None:
        """Advance every attempt by what the bucket and the provider report. `stopped`: whether the run has stopped."""
        self.take_launch_answers()
        for view in self.views:
            # The launch call itself raised in an earlier step: repeat it.
            if isinstance(view.state, Launching) and not self._vendor.is_launching(view.who):
                self._advance_all((view.who, answer) for answer in self._perform(view.who, CallLaunch()))
        self._advance_all(self._events.without_status(self.views, self._clock.now()))
        statuses = self._events.with_exits(self._vendor.statuses(self.views, at_once=stopped))
        self._advance_all(self._vendor.with_printed_errors(statuses))
        self._advance_all(self._events.heartbeats(self.views, self._clock.now()))
        self._advance_all((view.who, TookPart()) for view in self.views if self._has_taken_part(view))

    def tick(self, stopped: bool) -> None:
        """Advance every attempt by the time that has passed, for timeouts. `stopped`: the run has stopped."""
        if stopped:
            self._advance_all((view.who, LegStopped()) for view in self.views)
        self._advance_all((view.who, Tick()) for view in self.views)

    def take_launch_answers(self) -> None:
        """Advance the attempts whose launch call to the provider has returned since the last call."""
        self._advance_all(self._vendor.answered_launches())

    def launch(self, launches: Sequence[Launch]) -> None:
        """Create the intents, which announce attempts, in parallel, and launch the attempts.

        If another coordinator has created an intent, its attempt is only tracked. A crash in between leaves intents or
        handles, from which the next coordinator continues. Raises the first error once the other attempts are launched.
        """
        if launches:
            self._vendor.check()
        # Made here, because a stamp belongs to one thread.
        intents = [self._intent(each) for each in launches]
        written = in_parallel(self._background, [partial(self._created, each) for each in intents])
        errors: list[Exception] = []
        for each, ours in zip(launches, written, strict=True):
            try:
                self._launch(each, ours)
            except Exception as error:  # raised below: no other intent may be left without its launch
                errors.append(error)
        if errors:
            raise errors[0]

    def _intent(self, launch: Launch) -> Intent:
        return Intent(
            **self._about((launch.replica_id, launch.attempt)),
            leg=self._leg,
            executor=launch.place or self._vendor.name,
            why=launch.why,
            placed=launch.placed or None,
            claim_token=self._stamp.unforeseen(),
        )

    def _created(self, intent: Intent) -> bool | StoreError:
        """Create the intent, the record that announces an attempt: True if created, False if one exists already.

        A `StoreError` is returned, not raised.
        """
        try:
            return self._writer.create(intent) is not None
        except StoreError as error:
            return error

    def _launch(self, launch: Launch, ours: bool | StoreError) -> None:
        """Launch an attempt. `ours`: result of `_created` for the intent that announces it; an error is raised."""
        replica_id, number = launch.replica_id, launch.attempt
        if isinstance(ours, StoreError):
            raise ours
        if not ours:
            numbers = {number, *self._records.numbers(replica_id)}  # a listing may lag
            self._recover({replica_id: sorted(numbers)})  # another coordinator launches it: follow what it wrote
            return
        if number > 1:
            before = self._views[replica_id].state
            why = self._once(launch.why, (replica_id, number - 1), before, repeated=True)
            log.info("replica %d: launching attempt %d (%s)", replica_id, number, why)
        if launch.place:
            log.info("replica %d: at %s", replica_id, launch.placed)
        place = launch.place or self._vendor.name
        self._views[replica_id] = self._views[replica_id].next_attempt(number, place)
        self._advance((replica_id, number), IntentWritten())

    def cancel(self, who: Who, why: str) -> None:
        """Cancel one attempt. `why` goes into the cancel record."""
        self._advance(who, CancelAsked(why))

    def keep_output(self, who: Who) -> None:
        """Write the end of an attempt's output, as its provider has it, to the attempt's log.txt unless that exists.

        Writes nothing for an attempt without a handle of this coordinator's executor, or without any output.
        """
        state = self._views[who[0]].state
        if isinstance(state, Running) and (text := self._vendor.output(state.handle)):
            self._log.store.create(keys.log_text(*who), text.encode(errors="backslashreplace"))

    def cancel_all(self, why: str) -> None:
        """Cancel every attempt that is not known to have ended. `why` goes into the cancel records."""
        self._advance_all((view.who, CancelAsked(why)) for view in self.views if isinstance(view.state, Alive))

    def give_up(self, who: Who, why: str) -> None:
        """Record that the replica of `who` gets no further attempt before a resume. `why`: reason, for the record."""
        self._advance(who, GaveUp(why))

    def _advance_all(self, events: Iterable[Addressed]) -> None:
        for who, event in events:
            self._advance(who, event)

    def _advance(self, who: Who, event: Event) -> None:
        """Advance one attempt by an event, perform the effects, and advance it by their reply events."""
        replica_id, number = who
        events = [event]
        while events and self._views[replica_id].attempt == number:  # an effect may have found a newer attempt
            view, step = follow(self._views[replica_id], events.pop(0), self._clock.now(), self._policy)
            self._views[replica_id] = view
            if step.reason:
                level = logging.WARNING if isinstance(view.state, Cancelling | Postponed | GivenUp) else logging.INFO
                if isinstance(view.state, Ended) and view.state.outcome is Outcome.DONE:
                    level = logging.DEBUG  # the run is over, which its summary says after the last rounds
                log.log(
                    level, "replica %d, attempt %d: %s", replica_id, number, self._once(step.reason, who, view.state)
                )
            for effect in step.effects:
                events += self._perform(who, effect)

    def _once(self, words: str, who: Who, state: State, *, repeated: bool = False) -> str:
        """`words` for the log; a cause that was logged already is replaced by the name of the attempt that it ended.

        `who`: the attempt that has come to `state`. `repeated`: the words are not of that moment, but repeat its cause.
        """
        if not isinstance(state, Ended | GivenUp) or len(state.reason) < _SHORT:
            return words
        told = next((cause for cause in self._told if cause in state.reason), None)
        if told is None:
            if isinstance(state, Ended) and not repeated:
                self._told[state.reason.removeprefix(f"{Outcome.PERMANENT}: ")] = who
            return words
        replica_id, attempt = self._told[told]
        if (replica_id, attempt) != who:
            return words.replace(told, f"for the same reason as replica {replica_id}, attempt {attempt}")
        return words if isinstance(state, Ended) and not repeated else words.replace(told, "as said above")

    def as_told(self, words: str) -> str:
        """`words` for the log, without the causes that were logged as attempts ended for them."""
        for cause in sorted(self._told, key=len, reverse=True):  # a cause may be part of another
            if len(cause) >= _SHORT:
                words = words.replace(cause, "as said above")
        return words

    def _has_taken_part(self, view: ReplicaView) -> bool:
        """Whether a commit has averaged a contribution of an ended attempt.

        False without reading commits for an attempt that has not ended, or whose outcome costs its replica nothing.
        """
        ended = isinstance(view.state, Ended) and not view.state.took_part and view.state.outcome in COSTLY
        return ended and took_part(self._log, self._leg, *view.who)

    # -- effects -------------------------------------------------------------------------------------------------

    def _perform(self, who: Who, effect: Effect) -> Sequence[Event]:
        """Perform an effect of an attempt's transition; returns its immediate reply events. A launch replies later."""
        replica_id, number = who
        match effect:
            case CallLaunch():
                self._vendor.launch(who, self._views[replica_id].place)
                return [answer for whose, answer in self._vendor.answered_launches(who)]
            case AbandonLaunch():
                self._vendor.abandon_launch(who)
            case WriteHandle(handle, hourly_usd):
                self._writer.create(Handle(**self._about(who), handle=handle.to_json(), hourly_usd=hourly_usd))
            case WriteWaiting(why):
                self._writer.overwrite(Waiting(**self._about(who), reason=why))
            case WriteCancel(why):
                self._writer.create(Cancel(**self._about(who), reason=why))
            case WriteOut(why):
                self._writer.create(Out(**self._about(who), leg=self._leg, by=coordinator_name(), reason=why))
            case CallCancel(handle):
                return [self._vendor.cancel(handle)]
            case CallFind():
                return [self._vendor.find(self._run_id, who)]
            case FindSuccessor():
                numbers = self._records.numbers(replica_id)
                if max(numbers, default=number) <= number:
                    return [ClaimLost()]
                self._recover({replica_id: numbers})
        return []

    def _about(self, who: Who) -> dict[str, Any]:
        """The fields that every record about an attempt has, with a new stamp."""
        return {**self._stamp(), "replica_id": who[0], "attempt": who[1]}

    # -- recovery ------------------------------------------------------------------------------------------------

    def _recover(self, numbers: Mapping[int, Sequence[int]]) -> None:
        """Build the replicas' views from their records, as a new coordinator does."""
        self._seen.forget()
        found = {
            replica_id: read_attempts(self._records, replica_id, known, self._leg, self._vendor.is_ours)
            for replica_id, known in numbers.items()
        }
        handles = [attempt.handle_to_poll for attempts in found.values() for attempt in attempts]
        statuses = dict(self._vendor.poll([handle for handle in handles if handle is not None]))
        now, out = self._clock.now(), self._log.known_out(self._leg)
        for replica_id, attempts in found.items():
            view = recovered(replica_id, numbers[replica_id], attempts, statuses, now, self._policy)
            if isinstance(view.state, Ended) and (gone := out.get(replica_id)) and gone.attempt == view.attempt:
                if took_part(self._log, self._leg, *view.who):
                    view, _ = follow(view, TookPart(), now, self._policy)
                view, _ = follow(view, GaveUp(gone.reason), now, self._policy)  # no coordinator launches it again
            self._views[replica_id] = view
            if view.attempt:
                log.debug("replica %d, attempt %d: recovered as %s", replica_id, view.attempt, view.state)


def took_part(run_log: RunLog, leg: int, replica_id: int, attempt: int) -> bool:
    """Whether one of the last 50 commits since the start or resume averages a contribution of an attempt.

    Costs a GET for each of these commits that was not read before, and one for the open round.
    """
    begin = run_log.begin(leg)
    newest = run_log.newest(begin.record) if begin is not None else None
    if begin is None or newest is None:
        return False
    last = newest.commit.round
    for round_ in range(last, max(begin.record.after_round, last - _LAST_ROUNDS), -1):
        entry = run_log.commit(round_)
        answers = entry.commit.answers if entry is not None else ()
        if any(a.averaged and (a.replica_id, a.attempt) == (replica_id, attempt) for a in answers):
            return True
    return False
