"""Turns the records of attempts in the bucket into events of the attempt state machine.

A new coordinator replays all of them (`read_attempts`, `recovered`), a running one reads only new ones
(`RecordEvents`). `attempt` has the transitions.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.executors.contract import ExecutorError, ReplicaHandle, ReplicaStatus
from diloco_orchestrator.protocol import keys, pace
from diloco_orchestrator.protocol.attempt_records import Cancel, Exit, Handle, fault_in, reason_of
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.supervision.attempt import ReplicaView, follow
from diloco_orchestrator.supervision.attempt_outcome import is_conclusive, named_in
from diloco_orchestrator.supervision.attempt_types import (
    AttemptPolicy,
    BeatSeen,
    Cancelling,
    CancelSeen,
    Event,
    ExitSeen,
    HandleSeen,
    IntentTaken,
    Launching,
    Outcome,
    Postponed,
    Replaced,
    Reserved,
    Running,
    Unreachable,
    VendorBlind,
    VendorSaid,
)

log = logging.getLogger(__name__)

_LONGEST_START_S = 60.0  # the longest pause before an attempt's first heartbeat is looked for again

Who = tuple[int, int]  # replica and attempt
Addressed = tuple[Who, Event]
IsOurs = Callable[[ReplicaHandle], bool]  # whether this coordinator's executor can poll the attempt of a handle


# -- a new coordinator ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedAttempt:
    """The records of one attempt that determine its state."""

    number: int
    replaced: Replaced | None  # None: it is the newest one
    place: str = ""  # as its intent names it
    handle: HandleSeen | None = None
    cancel: Cancel | None = None
    exit: Exit | None = None

    @property
    def handle_to_poll(self) -> ReplicaHandle | None:
        """The attempt's handle if this coordinator's executor can poll it; None without a handle or with another's."""
        return self.handle.handle if self.handle and self.handle.ours else None

    def events(self, status: Event | None) -> Iterator[Event]:
        """The events that follow from this attempt's records, in the order in which a running coordinator would have
        seen them.

        `status`: the event with the provider's status of the attempt; None if it was not polled.
        """
        said = status.status if isinstance(status, VendorSaid) and status.status.state.ended else None
        yield IntentTaken()
        if self.handle is not None and self.exit is None:
            yield self.handle
        if self.cancel is not None:
            yield CancelSeen(self.cancel.reason)
        if self.exit is not None:
            yield ExitSeen(self.exit.code, reason_of(self.exit), said, fault_in(self.exit))
        elif status is not None:
            yield status
        if self.replaced is not None:
            yield self.replaced


def read_attempts(
    records: AttemptRecords, replica_id: int, numbers: Sequence[int], leg: int, is_ours: IsOurs
) -> list[RecordedAttempt]:
    """A replica's attempts in one leg (start or resume to stop), oldest first; each leg has budgets of its own.

    `numbers`: all attempts of the replica in the bucket, oldest first.
    """
    found = []
    for index, number in enumerate(numbers):
        intent = records.intent(replica_id, number)
        if intent is None or intent.leg != leg:
            continue
        replaced = None
        if number < numbers[-1]:
            successor = records.intent(replica_id, numbers[index + 1])
            replaced = Replaced() if successor is None else named_in(successor.why, number)
            if replaced.outcome is not None:  # all that counts of an attempt with a successor, beside its fault
                if replaced.outcome is Outcome.ERROR and number == numbers[-2]:
                    failed = records.exit(replica_id, number)
                    replaced = replace(replaced, fault=fault_in(failed) if failed else "")
                found.append(RecordedAttempt(number, replaced, intent.executor))
                continue
        ended = records.exit(replica_id, number)
        handle = None if ended and is_conclusive(ended.code) else records.handle(replica_id, number)
        seen = _handle_in(handle)
        found.append(
            RecordedAttempt(
                number,
                replaced,
                intent.executor,
                handle=HandleSeen(seen, is_ours(seen)) if seen else None,
                cancel=records.cancel(replica_id, number),
                exit=ended,
            )
        )
    return found


def _handle_in(record: Handle | None) -> ReplicaHandle | None:
    """The handle in a record of an attempt; None for a record that no executor wrote, which is ignored."""
    if record is None:
        return None
    try:
        found = ReplicaHandle.from_json(record.handle)
        if (found.replica_id, found.attempt) != (record.replica_id, record.attempt):
            raise ExecutorError(f"it is of replica {found.replica_id}, attempt {found.attempt}")
    except ExecutorError as error:
        log.warning("the handle of replica %d, attempt %d is passed over: %s", record.replica_id, record.attempt, error)
        return None
    return found


def recovered(
    replica_id: int,
    numbers: Sequence[int],
    attempts: Iterable[RecordedAttempt],
    statuses: Mapping[Who, Event],
    now: float,
    policy: AttemptPolicy,
) -> ReplicaView:
    """A replica's view at the start of a coordinator, from replaying the records of its attempts.

    Args:
        numbers: all attempts of the replica in the bucket.
        attempts: their records since the run's start or last resume, oldest first.
        statuses: the provider's statuses of the handles to poll, as events.
    """
    view = ReplicaView(replica_id)
    for attempt in attempts:
        status = statuses.get((replica_id, attempt.number))
        view = _follow_all(view.next_attempt(attempt.number, attempt.place), attempt.events(status), now, policy)
    newest = max(numbers, default=0)
    return view if view.attempt == newest else view.next_attempt(newest, "")


# -- a running coordinator --------------------------------------------------------------------------------------------


class RecordEvents:
    """Reads new records of the tracked attempts; only those that may have changed are requested."""

    def __init__(
        self, records: AttemptRecords, seen: SeenStore, is_ours: IsOurs, config: RunConfig, now: float
    ) -> None:
        """`seen`: the store that `records` reads from. `now`, in every method: seconds on the coordinator's clock."""
        self._records = records
        self._seen = seen
        self._is_ours = is_ours
        self._config = config
        self._began_at = now
        self._read_at = -math.inf  # records of attempts without a status
        self._beat_due: dict[Who, float] = {}
        # The round whose end an attempt waited for, as its newest heartbeat says, and when that was read.
        self.waited_for: dict[Who, tuple[int, float] | None] = {}

    def without_status(self, views: Iterable[ReplicaView], now: float) -> Iterator[Addressed]:
        """Events for new records (handle, exit) of attempts whose status cannot be polled here, read at intervals."""
        if now - self._read_at < max(pace.records_read_s(self._seen.round_s), self._seen.apart_s):
            return
        self._read_at = now
        for view in views:
            self._seen.forget(keys.handle(*view.who))
            match view.state:
                case Cancelling(handle=None, search_at=at) if at is not None:
                    handle = self._records.handle(*view.who)
                case Reserved() | Postponed():
                    handle = self._records.handle(*view.who)
                case Unreachable():
                    handle = None  # the handle is known, and cannot be polled here
                case _:
                    continue
            if (found := _handle_in(handle)) is not None:
                yield view.who, HandleSeen(found, self._is_ours(found))
            elif (ended := self._exit(view.who, None)) is not None:
                yield view.who, ended

    def with_exits(self, statuses: Iterable[Addressed]) -> Iterator[Addressed]:
        """The events `statuses`; an end or unknown status is replaced by the attempt's exit record if there is one."""
        for who, event in statuses:
            said = event.status if isinstance(event, VendorSaid) and event.status.state.ended else None
            ended = self._exit(who, said) if said or isinstance(event, VendorBlind) else None
            yield who, ended or event

    def heartbeats(self, views: Iterable[ReplicaView], now: float) -> Iterator[Addressed]:
        """New heartbeats as events. Each read is a GET, repeated after a pause if the counter has increased."""
        again_s, apart_s = pace.heartbeats_read_again_s(self._config, self._seen.apart_s), self._seen.apart_s
        for view in views:
            state, who = view.state, view.who
            if not isinstance(state, Reserved | Launching | Postponed | Running | Unreachable):
                continue
            if now < self._beat_due.get(who, self._began_at + self._config.timing.heartbeat_s):
                continue
            self._seen.forget(keys.heartbeat(*who))
            beat = self._records.heartbeat(*who)
            if beat is None:  # its machine may be waited for, for hours
                pause_s = max(again_s, min((now - state.since) / 5, _LONGEST_START_S))
            elif state.beat is not None and state.beat.counter >= beat.counter:
                pause_s = again_s
            else:
                pause_s = pace.heartbeats_read_s(self._config, self._seen.round_s, apart_s)
            self._beat_due[who] = now + pause_s
            if beat is not None:
                self.waited_for[who] = (beat.round, now) if beat.phase == "waiting" else None
                yield who, BeatSeen(beat.counter)

    def _exit(self, who: Who, status: ReplicaStatus | None) -> ExitSeen | None:
        # With an attempt the leg may have ended: then everything is read anew.
        self._seen.forget("" if status is not None else keys.exit_record(*who))
        ended = self._records.exit(*who)
        return None if ended is None else ExitSeen(ended.code, reason_of(ended), status, fault_in(ended))


def _follow_all(view: ReplicaView, events: Iterable[Event], now: float, policy: AttemptPolicy) -> ReplicaView:
    """Advance a replica's view by past events, like `follow`, without the effects, which were performed then."""
    for event in events:
        view, _ = follow(view, event, now, policy)
    return view
