"""The coordinator of a run: observes replicas, advances their attempts, decides what to do, and does it.

`attempt` and `fleet_policy` have the rules. Training needs a coordinator only to relaunch dead replicas: it can die at
any moment, replicas go on without it, and a new one finds everything in the bucket. Two at once do no harm: an
attempt's intent is created once, and executors adopt an existing process instead of launching it twice.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import Background, Clock, NoBackground
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.executors.contract import ExecutorDenied, LaunchRequest, ServerlessExecutor
from diloco_orchestrator.executors.places import Places
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import operator_of_run
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.supervision import fleet_policy
from diloco_orchestrator.supervision.attempt_types import Alive, AttemptPolicy, Postponed
from diloco_orchestrator.supervision.budgets import LegBudget
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg, coordinator_name
from diloco_orchestrator.supervision.fleet import Fleet
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from diloco_orchestrator.supervision.place_book import PlaceBook
from diloco_orchestrator.supervision.retention import RetentionSweeper
from diloco_orchestrator.supervision.rotation import halt_for_void_commits
from diloco_orchestrator.supervision.vendor import Vendor

log = logging.getLogger(__name__)

_LAUNCH_POLL_S = 0.02  # between two checks whether a launch call has returned; a check costs nothing
_STALLED_S = 60.0  # without a commit after which the disk of the run's folder is checked


@dataclass(frozen=True)
class Means:
    """The means by which a process supervises a run: executor, clock, storage options and secrets of replicas."""

    executor: ServerlessExecutor
    clock: Clock
    stamp: Stamp
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def requests(self, run_log: RunLog, launched: Launched, leg: RunConfig | None = None) -> LaunchRequests:
        """The builder of launch requests for the run of `run_log`, whose configuration `launched` pins.

        `leg`: the configuration of the leg (start or resume to stop); None for that in run.json. Raises `ConfigError`
        for a signed run whose key this process has not.
        """
        run, store = run_log.run, run_log.store
        operator = operator_of_run(run, store, "launching its replicas")
        return LaunchRequests(run, launched, store.url, self.storage_options, self.secrets, leg=leg, operator=operator)


class Coordinator:
    """Supervises the newest leg (start or resume to stop) of one run. The caller repeats `step` until it returns True.

    `background` runs launch calls, which may take minutes; `sending` runs requests to the store that do not wait for
    one another.
    """

    def __init__(
        self,
        reader: RunReader,
        means: Means,
        background: Background | None = None,
        sending: Background | None = None,
    ) -> None:
        sending = sending or NoBackground()
        self._seen = SeenStore.of(reader.store, means.clock)
        if reader.store is not self._seen:
            reader = RunReader(self._seen)
        self.reader, run_log = reader, reader.log
        attempts = sending.start(reader.attempts.all_numbers)
        begin, numbers = run_log.newest_begin(), attempts.result()
        self.leg, self._begin = begin.record.leg, begin.record
        self._executor, clock, stamp = means.executor, means.clock, means.stamp
        self._stamp = stamp
        self._clock = clock
        self._config = run_log.configs.of(self.leg)
        self._policy = AttemptPolicy.of(self._config)
        self._scales = self._config.max_replicas is not None
        ids = range(self._config.most_replicas) if self._scales and not isinstance(means.executor, Places) else ()
        parts = {each: means.executor.part(LaunchRequest(run_log.run.run_id, each, 1, [])) for each in ids}
        self._offered = [each for each, part in parts.items() if part.free_until_taken]
        self._requests = means.requests(run_log, run_log.launched(begin.record), self._config)
        self._vendor = Vendor(self._executor, self._requests, background or NoBackground(), clock, self._policy)
        self._fleet = Fleet(
            run_log,
            self._seen,
            reader.attempts,
            numbers,
            self.leg,
            self._vendor,
            clock,
            self._policy,
            stamp,
            sending,
        )
        self._end = EndOfLeg(run_log, begin, stamp)
        self._budget = LegBudget(reader, begin.record, coordinator_name(), stamp, clock.wall_time())
        self._book: PlaceBook | None = None
        if isinstance(means.executor, Places):
            newest = run_log.newest(begin.record)
            since = newest.commit.round if newest else 0
            self._book = PlaceBook(means.executor, self._config, reader.attempts.place, since)
        self._rows = reader.new_rows()
        self._sweeper = RetentionSweeper(run_log)
        self._stopped_at: float | None = None
        self._waited: set[int] = set()  # rounds for which commits were judged, as a replica waited in one
        self._judged_void = False  # whether a replica wrote so many void commits that a halt was asked for
        self._disk_at, self._no_room = clock.now(), ""  # when the disk of the run's folder was checked
        self._observed_at, self._watched_since = clock.now(), -math.inf
        self._fleet.tick(stopped=False)  # an earlier coordinator may have died between a record and its call

    def check_means(self) -> None:
        """Raise `ConfigError` if options, secrets or code for a relaunch are missing here and the run goes on."""
        if not self._end.reached():
            self._requests.check(self._executor)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Read all states, decide and act, once. True when the run has stopped and no attempt of it is known to run."""
        self._observe()
        actions = self._decide()
        self._fleet.launch([action for action in actions if isinstance(action, fleet_policy.Launch)])
        for action in actions:
            self._perform(action)
        if self._stopped_at is None:
            self._keep_house()
            self._warn_of_no_room()
        return self._finish()

    def _observe(self) -> None:
        """Advance every attempt by what bucket, provider and clock report; an outage of the store is no silence."""
        if self._stopped_at is None:
            self._seen.follow(self.reader.log)
            self._stopped_at = self._clock.now() if self._end.reached() else None
            self._judge_commits()
        self._fleet.observe(stopped=self._stopped_at is not None)
        self._fleet.tick(stopped=self._stopped_at is not None)
        now = self._clock.now()
        if now - self._observed_at > 0.5 * self._policy.hung_after_s:
            self._watched_since = now
        self._observed_at = now

    def _judge_commits(self) -> None:
        """Judge the newest commits, as one may name what is not there, if a replica waits in a round that has ended."""
        newest = self.reader.log.newest(self._begin)
        if newest is None or self._stopped_at is not None:
            return
        round_, seen_at = newest.commit.round, self._seen.newest_at
        # A heartbeat from before the newest commit was seen says nothing about that one.
        waited = {each for each, at in self._fleet.waited_for if each < round_ or (each == round_ and at > seen_at)}
        if waited - self._waited:
            self._end.unfounded.judge()
            self._waited |= waited

    def _decide(self) -> list[fleet_policy.Action]:
        now = self._clock.now()
        halt = self._halt_reason(now)
        asked = self.reader.log.scaled_to(self.leg)[1] if self._scales else None
        elsewhere = self._book.observe(self._fleet.views, now, self._budget.left_usd) if self._book else ()
        view = fleet_policy.FleetView(
            self._fleet.views,
            self._stopped_at,
            halt,
            self._watched_since,
            wanted=None if self._book else asked or self._config.replicas,
            elsewhere=elsewhere,
            opens=self._book is None or self._book.opens(self._fleet.views),
            offered=self._offered if asked is None else (),
        )
        needed = self._config.contributions_needed
        actions = fleet_policy.decide(view, now, self._policy, self._config.retry, needed)
        if self._book is None or halt or self._stopped_at is not None:
            return actions
        self._book.read(commit for commit, _ in self._rows.with_commits())
        return self._book.place(actions, self._fleet.views, now, asked, self._budget.left_usd)

    def _halt_reason(self, now: float) -> str:
        """The reason in a request to halt the run. Empty without a request, and if every replica can obey it itself.

        In the latter case nothing is read.
        """
        states = [view.state for view in self._fleet.views if not fleet_policy.is_vacant(view.state)]
        if states and all(fleet_policy.can_take_part(state, now, self._policy) for state in states):
            return ""
        halt = self.reader.log.halt(self.leg)
        return halt.reason if halt else ""

    def _perform(self, action: fleet_policy.Action) -> None:
        match action:
            case fleet_policy.Cancel(replica_id, attempt, why, keeps_output):
                if keeps_output:
                    self._fleet.keep_output((replica_id, attempt))
                self._fleet.cancel((replica_id, attempt), why)
            case fleet_policy.GiveUp(replica_id, attempt, why):
                self._fleet.give_up((replica_id, attempt), why)
            case fleet_policy.Stop(status, why):
                self.stop(status, why)

    def _keep_house(self) -> None:
        """Enforce cost limits and delete old objects until the run stops; later a resume may need any object."""
        if spent := self._budget.enforce(self._clock.now(), self._clock.wall_time()):
            self.stop("halted", f"halt requested: {spent}")
            return
        self._judged_void = self._judged_void or halt_for_void_commits(
            self.reader.log, self._begin, coordinator_name(), self._stamp
        )
        try:
            self._sweeper.step()
        except DilocoError as error:  # a failed deletion must not end the run
            log.warning("retention deleted nothing this time: %s", error)

    def _warn_of_no_room(self) -> None:
        """Log why the disk of the run's folder takes no objects, once for each reason, if no round ends for a minute.

        A program that waits for the run shows nothing else: replicas keep their own warnings in their output.
        """
        now = self._clock.now()
        if now - max(self._disk_at, self._seen.newest_at) < _STALLED_S or not Path(self.reader.store.url).is_dir():
            return
        self._disk_at, before, self._no_room = now, self._no_room, self.reader.status().no_room
        if self._no_room and self._no_room != before:
            log.warning("nobody can write: %s. The run goes on by itself then.", self._no_room)

    def _finish(self) -> bool:
        if self._stopped_at is None or self.alive():
            return False
        self._seen.forget()
        self._end.finalize()
        return True

    # -- what its user asks for ----------------------------------------------------------------------------------

    def alive(self) -> list[int]:
        """Replicas whose newest attempt is not known to have ended."""
        return self._fleet.alive()

    def wait_for_launches(self, patience_s: float) -> None:
        """Wait `patience_s` for all launch calls. Raises `ExecutorDenied` if the provider rejected one of them."""
        deadline = self._clock.now() + patience_s
        self._fleet.take_launch_answers()
        while self._vendor.is_launching() and self._clock.now() <= deadline:
            self._clock.sleep(_LAUNCH_POLL_S)
            self._fleet.take_launch_answers()
        alive = [view.state for view in self._fleet.views if isinstance(view.state, Alive)]
        denied = [state.refusal.error for state in alive if isinstance(state, Postponed) and state.refusal.denied]
        if denied and (self._book is None or len(denied) == len(alive)):  # otherwise another place launches
            raise ExecutorDenied(f"{denied[0]} The run exists: attach to {self.reader.store.url} to go on.")

    def cancel_all(self, why: str) -> None:
        """Cancel every attempt that is not known to have ended. Returns before their ends."""
        self._fleet.cancel_all(why)

    def stop(self, stop: rounds.Stop, why: str) -> None:
        """Stop the run without the replicas: commit a stop and cancel all attempts. `why` goes into the commit."""
        self._seen.forget()
        self._end.commit_stop(stop, why)
        log.warning("the run is stopped (%s): %s", stop, self._fleet.as_told(why))
        self._stopped_at = self._clock.now()
        self.cancel_all(why)
