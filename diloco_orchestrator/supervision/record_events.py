"""Turns the records of attempts in the bucket into events of the attempt state machine.

A new coordinator replays all of them (`read_attempts`, `recovered`), a running one reads only new ones
(`RecordEvents`). `attempt` has the transitions.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diloco_orchestrator.executors.contract import ExecutorError, ReplicaHandle, ReplicaStatus
from diloco_orchestrator.protocol.attempt_records import Cancel, Exit, Handle, reason_of
from diloco_orchestrator.run_log.attempts import AttemptRecords
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
    Postponed,
    Replaced,
    Reserved,
    Running,
    Unreachable,
    VendorBlind,
    VendorSaid,
)

log = logging.getLogger(__name__)

Who = tuple[int, int]  # replica and attempt
Addressed = tuple[Who, Event]
IsOurs = Callable[[ReplicaHandle], bool]  # whether this coordinator's executor can poll the attempt of a handle


# -- a new coordinator ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedAttempt:
    """The records of one attempt that determine its state."""

    number: int
    replaced: Replaced | None  # None: it is the newest one
    handle: HandleSeen | None = None
    cancel: Cancel | None = None
    exit: Exit | None = None

    @property
    def handle_to_poll(self) -> ReplicaHandle | None:
        """The handle, if the provider's status is needed to determine the state and can be polled here; else None."""
        return self.handle.handle if self.handle and self.handle.ours else None

    def events(self, status: Event | None) -> Iterator[Event]:
        """The events in the order in which a running coordinator would have seen them. `status`: the provider's."""
        said = status.status if isinstance(status, VendorSaid) and status.status.state.ended else None
        yield IntentTaken()
        if self.handle is not None and self.exit is None:
            yield self.handle
        if self.cancel is not None:
            yield CancelSeen(self.cancel.reason)
        if self.exit is not None:
            yield ExitSeen(self.exit.code, reason_of(self.exit), said)
        elif status is not None:
            yield status
        if self.replaced is not None:
            yield self.replaced


def read_attempts(
    records: AttemptRecords, replica_id: int, numbers: Sequence[int], leg: int, is_ours: IsOurs
) -> list[RecordedAttempt]:
    """The attempts of a replica in leg `leg`, oldest first; earlier legs have budgets of their own.

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
            if replaced.outcome is not None:  # the outcome is all that counts of an attempt with a successor
                found.append(RecordedAttempt(number, replaced))
                continue
        ended = records.exit(replica_id, number)
        handle = None if ended and is_conclusive(ended.code) else records.handle(replica_id, number)
        seen = _handle_in(handle)
        found.append(
            RecordedAttempt(
                number,
                replaced,
                handle=HandleSeen(seen, is_ours(seen)) if seen else None,
                cancel=records.cancel(replica_id, number),
                exit=ended,
            )
        )
    return found


def _handle_in(record: Handle | None) -> ReplicaHandle | None:
    """The handle in a record of an attempt; None, and it is ignored, for one that no executor wrote."""
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
        attempts: their records in this leg, oldest first.
        statuses: the provider's statuses of the handles to poll, as events.
    """
    view = ReplicaView(replica_id)
    for attempt in attempts:
        status = statuses.get((replica_id, attempt.number))
        view = _follow_all(view.next_attempt(attempt.number), attempt.events(status), now, policy)
    newest = max(numbers, default=0)
    return view if view.attempt == newest else view.next_attempt(newest)


# -- a running coordinator --------------------------------------------------------------------------------------------


class RecordEvents:
    """Reads new records of the tracked attempts; only those that may have changed are requested."""

    def __init__(self, records: AttemptRecords, is_ours: IsOurs, heartbeat_s: float, now: float) -> None:
        self._records = records
        self._is_ours = is_ours
        self._heartbeat_s = heartbeat_s
        self._beats_read_at = now

    def without_status(self, views: Iterable[ReplicaView]) -> Iterator[Addressed]:
        """Handles and exit records, as events, of attempts without a handle that can be polled here."""
        for view in views:
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
        """The events of `statuses`; an end or unknown status is replaced by the attempt's exit record if any."""
        for who, event in statuses:
            said = event.status if isinstance(event, VendorSaid) and event.status.state.ended else None
            ended = self._exit(who, said) if said or isinstance(event, VendorBlind) else None
            yield who, ended or event

    def heartbeats(self, views: Iterable[ReplicaView], now: float) -> Iterator[Addressed]:
        """New heartbeats as events. Each read is a GET, so they are read at most every `heartbeat_s`."""
        if now - self._beats_read_at < self._heartbeat_s:
            return
        self._beats_read_at = now
        for view in views:
            if isinstance(view.state, Reserved | Launching | Postponed | Running | Unreachable):
                beat = self._records.heartbeat(*view.who)
                if beat is not None:
                    yield view.who, BeatSeen(beat.counter)

    def _exit(self, who: Who, status: ReplicaStatus | None) -> ExitSeen | None:
        ended = self._records.exit(*who)
        return None if ended is None else ExitSeen(ended.code, reason_of(ended), status)


def _follow_all(view: ReplicaView, events: Iterable[Event], now: float, policy: AttemptPolicy) -> ReplicaView:
    """Advance a view by past events, as `follow` does, without their effects, which were performed then."""
    for event in events:
        view, _ = follow(view, event, now, policy)
    return view
