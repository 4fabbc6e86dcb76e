"""The coordinator: observes a run's replicas, decides with `supervision`, acts, records.

Can die at any moment: replicas go on without it, and a new one finds everything it needs in the bucket. Two at once do
no harm: the intent of an attempt is created once, and an executor adopts what was launched already. Training needs a
coordinator for one thing, relaunching.
"""

import logging
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from diloco_orchestrator.clock import Background, Clock, NoBackground
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError, DilocoError
from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    hourly_usd,
    launched_by,
)
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.process import EXIT_DONE, EXIT_PERMANENT, EXIT_PREEMPTED, EXIT_SUPERSEDED
from diloco_orchestrator.protocol.records import Cancel as CancelRecord
from diloco_orchestrator.protocol.records import Handle, Intent, Stamp
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.supervision import fleet_policy as supervision
from diloco_orchestrator.supervision.budgets import limit_reached
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.fleet_policy import Condition
from diloco_orchestrator.supervision.launch_request import Launching
from diloco_orchestrator.supervision.retention import RetentionSweeper

log = logging.getLogger(__name__)

_LAUNCH_POLL_S = 0.02
_COSTS_S = 5.0  # between two looks at what was spent
_STUCK_S = 120.0  # without a first heartbeat; a halt does not wait for such a replica
_REFUSED_S = 600.0  # that refused credentials are borne: tokens are renewed, and the others want to be supervised
_TRY_AGAIN_S = 30.0
_ADOPT_AFTER_S = 5.0  # without a handle, an attempt that another coordinator meant to launch is launched here


@dataclass
class _Attempt:
    """The newest attempt of a replica, as this coordinator has seen it."""

    replica_id: int
    number: int = 0
    handle: ReplicaHandle | None = None
    condition: Condition = Condition.NONE
    ended_at: float = 0.0
    reason: str = ""
    endings: Counter[Condition] = field(default_factory=Counter)  # of this leg
    cancelled: str = ""  # why it was asked to end
    cancelled_at: float = 0.0
    beat: int | None = None  # the heartbeat counter seen last
    beat_at: float = 0.0  # or `since`
    since: float = 0.0  # when this coordinator first knew of the attempt
    running_since: float | None = None  # by its vendor's word
    unknown_since: float | None = None  # the vendor cannot tell how it is
    denied_since: float | None = None  # the vendor refuses to launch it
    refusal: ExecutorDenied | None = None
    launch_at: float = 0.0  # without a handle: when to launch what somebody else meant to
    given_up: bool = False  # it is not launched again
    launching: "Future[tuple[LaunchRequest, ReplicaHandle]] | None" = None  # the vendor may take minutes
    double: bool = False  # our process lost its claim to another one, whose handle we do not have
    foreign: bool = False  # it runs at another vendor, about which only the bucket can be asked


class Coordinator:
    """Supervises the newest leg of one run. Call `step` again and again until it returns True."""

    def __init__(
        self,
        store: Store,
        executor: ServerlessExecutor,
        clock: Clock,
        stamp: Stamp,
        storage_options: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        background: Background | None = None,
    ) -> None:
        self.reader = RunReader(store)
        self._launching = Launching(self.reader.run, store.url, storage_options or {}, secrets or {})
        self._background = background or NoBackground()
        begin = self.reader.log.newest_begin()
        self._begin = begin.record
        self._store = store
        self._executor = executor
        self._clock = clock
        self._stamp = stamp
        self._end = EndOfLeg(self.reader.log, begin, stamp)
        self._stopped_at: float | None = None
        self._looked_at_hearts = clock.now()
        self._look_at_costs = clock.now()
        self._limit_reached = False
        self._refusal: tuple[float, ExecutorDenied] | None = None  # since when the vendor refuses our credentials
        self._collector = RetentionSweeper(self.reader.log)
        self._me = f"coordinator on {platform.node()}"
        self._attempts = {replica_id: self._recover(replica_id) for replica_id in range(self._config.replicas)}

    def check_means(self) -> None:
        """Raise `ConfigError` if this coordinator could not launch anything, while the leg goes on."""
        if not self._end.reached():
            self._launching.check(self._executor)

    @property
    def leg(self) -> int:
        return self._begin.leg

    @property
    def _config(self) -> RunConfig:
        return self.reader.run.config

    def step(self) -> bool:
        """Observe, decide, act once. True when the leg has stopped and nothing of it runs any more."""
        self._observe()
        replicas = [self._view(replica_id) for replica_id in sorted(self._attempts)]
        view = supervision.FleetView(replicas, self._stopped_at, self._halt_reason())
        quorum = self._config.contributions_needed
        for action in supervision.decide(view, self._clock.now(), self._config.retry, quorum):
            self._perform(action)
        self._collect()
        self._mind_limits()
        return self._over()

    def _mind_limits(self) -> None:
        """Halt the leg once its hours or its money are used up; resuming begins a leg with fresh ones."""
        config, now = self._config, self._clock.now()
        unlimited = config.max_hours is None and config.max_cost_usd is None
        if unlimited or self._limit_reached or now < self._look_at_costs:
            return
        self._look_at_costs = now + _COSTS_S
        reason = limit_reached(config, self.reader.spent(self._begin, self._clock.wall_time()))
        if reason and self._stopped_at is None:
            log.warning("halting the run: %s", reason)
            self._limit_reached = True
            with suppress(ConfigError):  # it has just ended
                request_halt(self.reader.log, self._me, reason, self._stamp)

    def _collect(self) -> None:
        """Retention, while the leg goes on: after its stop the next leg may start from any snapshot."""
        if self._stopped_at is None:
            try:
                self._collector.step()
            except DilocoError as error:  # never worth a run
                log.warning("nothing was collected this time: %s", error)

    def alive(self) -> list[int]:
        """Replicas that are not known to have ended."""
        return [i for i, attempt in self._attempts.items() if attempt.condition is Condition.ALIVE]

    # -- what an earlier coordinator left ------------------------------------------------------------------------

    def _recover(self, replica_id: int) -> _Attempt:
        """The state of a replica from its records: nothing a coordinator knows is in memory only."""
        now = self._clock.now()
        found = _Attempt(replica_id, beat_at=now, since=now, launch_at=now + _ADOPT_AFTER_S)
        numbers = self.reader.attempts.numbers(replica_id)
        for number in numbers:
            found.number = number
            intent = self.reader.attempts.intent(replica_id, number)
            if intent is None or intent.leg != self.leg:
                continue  # of an earlier leg, whose budgets are its own
            cancel = self.reader.attempts.cancel(replica_id, number)
            handle = self.reader.attempts.handle(replica_id, number)
            found.cancelled = cancel.reason if cancel else ""
            found.condition, found.handle, found.double, found.foreign = Condition.ALIVE, None, False, False
            if handle is not None:
                self._take_handle(found, ReplicaHandle.from_json(handle.handle))
            self._look_at(found)
            alone = found.number == number  # else it gave way, and is not what is looked at any more
            if found.condition is Condition.ALIVE and alone and number < numbers[-1]:  # replaced: it was seen to end
                self._note_end(found, ReplicaStatus(ReplicaState.FAILED, message="gone without a word"))
        if found.cancelled and found.condition is Condition.ALIVE:
            found.cancelled_at = now
            if found.foreign:
                found.cancelled = ""  # to be decided anew: its end cannot be seen here
            elif found.handle is not None:
                try:
                    self._executor.cancel(found.handle)  # its coordinator may have died before it could
                except ExecutorError:
                    found.cancelled = ""  # to be decided anew
        return found

    def _take_handle(self, attempt: _Attempt, handle: ReplicaHandle) -> None:
        """Of what another coordinator launched; not if by another vendor, about which only the bucket can be asked."""
        if launched_by(self._executor, handle):
            attempt.handle = handle
            return
        attempt.foreign = True
        log.info(
            "replica %d, attempt %d runs on %s: followed by its records, and replaced here when it has ended",
            *(attempt.replica_id, attempt.number, handle.executor),
        )

    def _look_at(self, attempt: _Attempt) -> None:
        """Note whether an attempt has ended: by its own record, else by its vendor's word."""
        unknown = ReplicaStatus(ReplicaState.UNKNOWN)
        ended = self.reader.attempts.exit(attempt.replica_id, attempt.number) is not None
        status = unknown if attempt.handle is None or ended else self._ask([attempt.handle])[0]
        if status.state.ended or ended:
            self._note_end(attempt, status)

    def _ask(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The vendor's word. Refused credentials are borne for a while: replicas go on, and tokens are renewed."""
        try:
            statuses = self._executor.poll_many(handles)
        except ExecutorDenied as error:
            self._bear(error)
            return [ReplicaStatus(ReplicaState.UNKNOWN, message=str(error)) for _ in handles]
        if handles:
            self._refusal = None
        return statuses

    def _bear(self, error: ExecutorDenied) -> None:
        """Raises it when it has lasted too long."""
        now = self._clock.now()
        if self._refusal is None:
            log.warning("supervision goes on without a view of the vendor: %s", error)
            self._refusal = (now, error)
        elif now - self._refusal[0] > _REFUSED_S:
            raise ExecutorDenied(
                f"{error} This lasts for {_REFUSED_S / 60:.0f} minutes. Replicas that run go on by themselves; attach "
                f"to {self._store.url} again with other credentials."
            ) from error

    # -- observing -----------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        self.reader.commits()
        if self._stopped_at is None and self._end.reached():
            self._stopped_at = self._clock.now()
        alive = [attempt for attempt in self._attempts.values() if attempt.condition is Condition.ALIVE]
        for attempt in alive:
            if attempt.launching is not None:
                self._note_launch(attempt)
            elif attempt.handle is None:
                self._find_handle(attempt)
        watched = [attempt for attempt in alive if attempt.handle is not None]
        statuses = self._ask([a.handle for a in watched if a.handle is not None])
        for attempt, status in zip(watched, statuses, strict=True):
            if status.state is not ReplicaState.UNKNOWN:
                attempt.unknown_since = None
            elif attempt.unknown_since is None:
                attempt.unknown_since = self._clock.now()
            if status.state is ReplicaState.UNKNOWN:
                self._look_at(attempt)
            elif status.state.ended:
                self._note_end(attempt, status)
            elif status.state is ReplicaState.RUNNING and attempt.running_since is None:
                attempt.running_since = self._clock.now()
        self._look_at_hearts()
        self._let_go_of_what_does_not_end()

    def _let_go_of_what_does_not_end(self) -> None:
        """A machine that was lost may never be seen to end. Should it live, its successor's claim makes it leave."""
        for attempt in self._attempts.values():
            waited = self._clock.now() - attempt.cancelled_at
            if attempt.condition is Condition.ALIVE and attempt.cancelled and waited > supervision.LEFTOVER_S:
                attempt.launching = None
                self._note_end(attempt, ReplicaStatus(ReplicaState.FAILED, message=attempt.cancelled))

    def _find_handle(self, attempt: _Attempt) -> None:
        """Of an attempt that another coordinator meant to launch: it may be at it, or have died."""
        record = self.reader.attempts.handle(attempt.replica_id, attempt.number)
        if record is not None and not attempt.double and not attempt.foreign:
            self._take_handle(attempt, ReplicaHandle.from_json(record.handle))
        elif self.reader.attempts.exit(attempt.replica_id, attempt.number) is not None:
            self._note_end(attempt, ReplicaStatus(ReplicaState.UNKNOWN))
        elif not attempt.double and not attempt.foreign and self._clock.now() >= attempt.launch_at:
            if attempt.cancelled or self._stopped_at is not None:
                self._find_or_let_go(attempt)
            else:
                self._launch_or_note(attempt)

    def _find_or_let_go(self, attempt: _Attempt) -> None:
        """Nobody needs it any more, but its coordinator may have launched it before it died."""
        try:
            found = self._executor.find(self.reader.run.run_id)
        except ExecutorError as error:
            if isinstance(error, ExecutorDenied):
                self._bear(error)
            log.warning("cannot look for what an earlier coordinator launched: %s", error)
            attempt.launch_at = self._clock.now() + _TRY_AGAIN_S
            return
        who = (attempt.replica_id, attempt.number)
        attempt.handle = next((each for each in found if (each.replica_id, each.attempt) == who), None)
        if attempt.handle is None:
            self._note_end(attempt, ReplicaStatus(ReplicaState.CANCELLED, message="it was never launched"))
        else:
            attempt.cancelled = ""  # to be decided anew, now that it can be done

    def _look_at_hearts(self) -> None:
        """Note which heartbeats moved; no oftener than they are written, because each look is a GET."""
        now = self._clock.now()
        if now - self._looked_at_hearts < self._config.timing.heartbeat_s:
            return
        self._looked_at_hearts = now
        for replica_id, attempt in self._attempts.items():
            if attempt.condition is not Condition.ALIVE:
                continue
            beat = self.reader.attempts.heartbeat(replica_id, attempt.number)
            if beat is not None and beat.counter != attempt.beat:
                attempt.beat, attempt.beat_at = beat.counter, now

    def _note_end(self, attempt: _Attempt, status: ReplicaStatus) -> None:
        """Join the vendor's word with the attempt's own exit record, which knows more."""
        record = self.reader.attempts.exit(attempt.replica_id, attempt.number)
        if (record.code if record else status.exit_code) == EXIT_SUPERSEDED:
            self._follow_successor(attempt)
            return
        attempt.ended_at = self._clock.now()
        attempt.reason = (
            f"{record.reason} (exit code {record.code})" if record else status.message or status.reason or status.state
        )
        attempt.condition = _condition(status, record.code if record else status.exit_code)
        if attempt.cancelled and attempt.condition is not Condition.DONE:
            attempt.condition, attempt.reason = Condition.ERROR, attempt.cancelled
        attempt.endings[attempt.condition] += 1
        log.info("replica %d, attempt %d ended: %s", attempt.replica_id, attempt.number, attempt.reason)

    def _follow_successor(self, attempt: _Attempt) -> None:
        """Our process gave way to another one of the same replica, which another coordinator launched."""
        newest, now = self.reader.attempts.numbers(attempt.replica_id)[-1], self._clock.now()
        successor = _Attempt(
            attempt.replica_id,
            newest,
            condition=Condition.ALIVE,
            endings=attempt.endings,
            beat_at=now,
            since=now,
            launch_at=now + _ADOPT_AFTER_S,
            double=newest == attempt.number,
        )
        vars(attempt).update(vars(successor))  # in place: whoever looks at it now sees the successor
        log.info("replica %d: another coordinator's attempt %d goes on", attempt.replica_id, newest)

    def _view(self, replica_id: int) -> supervision.ReplicaView:
        attempt = self._attempts[replica_id]
        return supervision.ReplicaView(
            replica_id=replica_id,
            attempt=attempt.number,
            condition=attempt.condition,
            ended_at=attempt.ended_at,
            endings=attempt.endings,
            silent_s=self._silence_s(attempt),
            cancelled=bool(attempt.cancelled),
            stuck=attempt.beat is None and self._clock.now() - attempt.since > _STUCK_S,
            reason=attempt.reason,
        )

    def _silence_s(self, attempt: _Attempt) -> float:
        """Since the heart moved last. One that never beat may still be starting, unless nobody can even tell that."""
        waited = self._clock.now() - attempt.beat_at
        if attempt.beat is not None or attempt.double:
            return waited
        # Waiting for a machine is no silence; a machine that runs, or that nobody can see, should have come up.
        since = attempt.unknown_since if attempt.running_since is None else attempt.running_since
        since = attempt.since if attempt.foreign else since
        waited = 0.0 if since is None else self._clock.now() - since
        return waited if waited > self._config.timing.startup_timeout_s else 0.0

    # -- acting --------------------------------------------------------------------------------------------------

    def _perform(self, action: supervision.Action) -> None:
        match action:
            case supervision.Launch(replica_id, number, why):
                self._launch(replica_id, number, why)
            case supervision.Cancel(replica_id, _, why):
                self._cancel(replica_id, why)
            case supervision.GiveUp(replica_id, _, why):
                self._give_up(replica_id, why)
            case supervision.Fail(why):
                self.stop("failed", why)
            case supervision.Halt(why):
                self.stop("halted", why)

    def _give_up(self, replica_id: int, why: str) -> None:
        attempt = self._attempts[replica_id]
        if not attempt.given_up:
            attempt.given_up = True
            log.warning("the run goes on without a replica: %s", why)

    def _launch(self, replica_id: int, number: int, why: str) -> None:
        """Intent, launch, handle: dying in between leaves what the next coordinator can find."""
        self._launching.check_code(self._executor)
        intent = Intent(
            **self._stamp(),
            replica_id=replica_id,
            attempt=number,
            leg=self.leg,
            executor=self._executor.name,
            why=why,
        )
        now, old = self._clock.now(), self._attempts[replica_id]
        attempt = _Attempt(replica_id, number, condition=Condition.ALIVE, endings=old.endings, beat_at=now, since=now)
        self._attempts[replica_id] = attempt
        if not self._store.create(keys.intent(replica_id, number), intent.to_bytes()):
            attempt.launch_at = now + _ADOPT_AFTER_S
            return
        if number > 1:
            log.info("replica %d: launching attempt %d (%s)", replica_id, number, why)
        self._launch_or_note(attempt)

    def _launch_or_note(self, attempt: _Attempt) -> None:
        """Executors adopt what runs already, so that two coordinators, or one after another, get the same process.

        In the background: a vendor may look for a machine for minutes, and the others want to be watched meanwhile.
        """
        request = self._launching.request(attempt.replica_id, attempt.number, self._executor.shares_machine)
        attempt.launching = self._background.start(lambda: (request, self._executor.launch(request)))
        self._note_launch(attempt)

    def _note_launch(self, attempt: _Attempt) -> None:
        """Refused credentials are tried again after a while, as the same attempt."""
        if attempt.launching is None or not attempt.launching.done():
            return
        launching, attempt.launching = attempt.launching, None
        try:
            request, attempt.handle = launching.result()
        except ExecutorDenied as error:
            self._note_refusal(attempt, error)
            return
        except ValueError as error:
            words = f"the executor cannot launch it: {error}"
            self._note_end(attempt, ReplicaStatus(ReplicaState.FAILED, "permanent", EXIT_PERMANENT, message=words))
            return
        except NoCapacity as error:
            words = f"no machine: {error}"
            self._note_end(attempt, ReplicaStatus(ReplicaState.FAILED, "no_capacity", message=words))
            return
        except (ExecutorError, OSError) as error:
            words = f"it could not be launched: {error}"
            self._note_end(attempt, ReplicaStatus(ReplicaState.FAILED, message=words))
            return
        attempt.denied_since = attempt.refusal = None
        record = Handle(
            **self._stamp(),
            replica_id=attempt.replica_id,
            attempt=attempt.number,
            handle=attempt.handle.to_json(),
            hourly_usd=hourly_usd(self._executor, request),
        )
        self._store.create(keys.handle(attempt.replica_id, attempt.number), record.to_bytes())
        if attempt.cancelled:  # it was given up while it waited for a machine
            try:
                self._executor.cancel(attempt.handle)
            except ExecutorError as error:
                log.warning("%s", error)
                attempt.cancelled = ""  # to be decided anew

    def _note_refusal(self, attempt: _Attempt, error: ExecutorDenied) -> None:
        """It is tried again for a while, as the same attempt; then nobody can have this replica."""
        now = self._clock.now()
        if attempt.denied_since is None:
            attempt.denied_since = now
            log.warning("replica %d, attempt %d is not launched: %s", attempt.replica_id, attempt.number, error)
        attempt.launch_at = now + _TRY_AGAIN_S
        attempt.refusal = error
        if now - attempt.denied_since > _REFUSED_S:
            words = f"its vendor refuses to launch it: {error}"
            self._note_end(attempt, ReplicaStatus(ReplicaState.FAILED, "permanent", EXIT_PERMANENT, message=words))

    def settle_launches(self, patience_s: float) -> None:
        """Wait until the vendor has answered for what is being launched, at most so long.

        Raises `ExecutorDenied` if it refused one of them; the others are launched.
        """
        deadline = self._clock.now() + patience_s
        while any(attempt.launching is not None for attempt in self._attempts.values()):
            for attempt in self._attempts.values():
                self._note_launch(attempt)
            if self._clock.now() > deadline:
                break
            self._clock.sleep(_LAUNCH_POLL_S)
        for attempt in self._attempts.values():
            if attempt.refusal is not None:
                raise ExecutorDenied(f"{attempt.refusal} The run exists: attach to {self._store.url} to go on.")

    def _cancel(self, replica_id: int, why: str) -> None:
        attempt = self._attempts[replica_id]
        if attempt.cancelled or attempt.condition is not Condition.ALIVE:
            return
        log.warning("replica %d, attempt %d: cancelling it (%s)", replica_id, attempt.number, why)
        record = CancelRecord(**self._stamp(), replica_id=replica_id, attempt=attempt.number, reason=why)
        self._store.create(keys.cancel(replica_id, attempt.number), record.to_bytes())
        try:
            if attempt.handle is not None:
                self._executor.cancel(attempt.handle)
        except ExecutorError as error:
            log.warning("replica %d, attempt %d could not be cancelled: %s", replica_id, attempt.number, error)
            if attempt.unknown_since is None:
                return  # the next look tries again
        attempt.cancelled, attempt.cancelled_at = why, self._clock.now()
        if (attempt.handle is None and attempt.launching is None) or attempt.unknown_since is not None:
            # Nobody here can end it or see it end. Should it still live, its successor's claim makes it leave.
            self._note_end(attempt, ReplicaStatus(ReplicaState.FAILED, message=why))

    def cancel_all(self, why: str) -> None:
        """Ask every replica that is still there to leave."""
        for replica_id in self._attempts:
            self._cancel(replica_id, why)

    def stop(self, stop: rounds.Stop, why: str) -> None:
        """End the leg from here. Replicas that wait see the commit; the others are asked to leave."""
        self._end.commit_stop(stop, why)
        log.warning("the run is stopped (%s): %s", stop, why)
        self._stopped_at = self._clock.now()
        self.cancel_all(why)

    def _halt_reason(self) -> str:
        views = [self._view(replica_id) for replica_id in self._attempts]
        if all(view.condition is Condition.ALIVE and not view.stuck for view in views):
            return ""  # they see to it
        halt = self.reader.log.halt(self.leg)
        return halt.reason if halt else ""

    # -- the end -------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if self._stopped_at is None or self.alive():
            return False
        self._end.finalize()
        return True

    def last_base(self) -> int:
        """The round that made the leg's newest base."""
        return self._end.last_base()


def _condition(status: ReplicaStatus, code: int | None) -> Condition:
    if code == EXIT_DONE:
        return Condition.DONE
    if code == EXIT_PERMANENT:
        return Condition.PERMANENT
    if code == EXIT_PREEMPTED or status.state is ReplicaState.PREEMPTED:
        return Condition.PREEMPTED
    if status.state is ReplicaState.TIMED_OUT:
        return Condition.TIMED_OUT
    if status.reason == "no_capacity":
        return Condition.NO_CAPACITY
    return Condition.DONE if status.state is ReplicaState.SUCCEEDED else Condition.ERROR
