"""The coordinator of a run: observes replicas, advances their attempts, decides what to do, and does it.

Holds no rule: `attempt` defines the effect of each event, `fleet_policy` decides about the replicas. Training needs a
coordinator for one thing, relaunching: it can die at any moment, replicas go on without it, and a new one finds
everything in the bucket. Two at once do no harm: an attempt's intent is created once, and executors adopt a process
that exists.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from diloco_orchestrator.clock import Background, Clock, NoBackground
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.executors.contract import ExecutorDenied, ServerlessExecutor
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.supervision import fleet_policy
from diloco_orchestrator.supervision.attempt_types import AttemptPolicy, Postponed
from diloco_orchestrator.supervision.budgets import LegBudget
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg, coordinator_name
from diloco_orchestrator.supervision.fleet import Fleet
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from diloco_orchestrator.supervision.retention import RetentionSweeper
from diloco_orchestrator.supervision.vendor import Vendor

log = logging.getLogger(__name__)

_LAUNCH_POLL_S = 0.02  # between two checks whether a launch call has returned; a check costs nothing


class Coordinator:
    """Supervises the newest leg of one run. The caller repeats `step` until it returns True."""

    def __init__(
        self,
        store: Store,
        executor: ServerlessExecutor,
        clock: Clock,
        stamp: Stamp,
        storage_options: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        background: Background | None = None,
        run_log: RunLog | None = None,
        sending: Background | None = None,
    ) -> None:
        """
        Args:
            background: runs launch calls, which may take minutes.
            run_log: the run's, if the caller has one, in a `SeenStore` where requests cost money.
            sending: runs requests to the store that do not wait for one another.
        """
        sending = sending or NoBackground()
        self._seen = SeenStore.of(store if run_log is None else run_log.store, clock)
        self.reader = RunReader(self._seen, run_log)
        run_log = self.reader.log
        attempts = sending.start(self.reader.attempts.all_numbers)
        begin, numbers = run_log.newest_begin(), attempts.result()
        self.leg = begin.record.leg
        self._executor = executor
        self._clock = clock
        self._config = run_log.run.config
        self._policy = AttemptPolicy.of(self._config)
        self._requests = LaunchRequests(
            run_log.run, run_log.launched(begin.record), store.url, storage_options or {}, secrets or {}
        )
        self._vendor = Vendor(executor, self._requests, background or NoBackground(), clock, self._policy)
        self._fleet = Fleet(
            run_log,
            self._seen,
            self.reader.attempts,
            numbers,
            self.leg,
            self._vendor,
            clock,
            self._policy,
            stamp,
            sending,
        )
        self._end = EndOfLeg(run_log, begin, stamp)
        self._budget = LegBudget(self.reader, begin.record, coordinator_name(), stamp)
        self._sweeper = RetentionSweeper(run_log)
        self._stopped_at: float | None = None
        self._observed_at, self._watched_since = clock.now(), -math.inf
        self._fleet.tick(stopped=False)  # an earlier coordinator may have died between a record and its call

    def check_means(self) -> None:
        """Raise `ConfigError` if options, secrets or code for a launch are missing here, while the leg goes on."""
        if not self._end.reached():
            self._requests.check(self._executor)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Observe, decide and act once. True when the leg has stopped and no attempt of it is known to run."""
        self._observe()
        actions = self._decide()
        self._fleet.launch([action for action in actions if isinstance(action, fleet_policy.Launch)])
        for action in actions:
            self._perform(action)
        if self._stopped_at is None:
            self._keep_house()
        return self._finish()

    def _observe(self) -> None:
        """Advance every attempt by what bucket, provider and clock report.

        After a break that is long for heartbeats, such as an outage of the store, their silence counts anew.
        """
        if self._stopped_at is None:
            self._seen.follow(self.reader.log)
            self._stopped_at = self._clock.now() if self._end.reached() else None
        self._fleet.observe(stopped=self._stopped_at is not None)
        self._fleet.tick(stopped=self._stopped_at is not None)
        now = self._clock.now()
        if now - self._observed_at > 0.5 * self._policy.hung_after_s:
            self._watched_since = now
        self._observed_at = now

    def _decide(self) -> list[fleet_policy.Action]:
        now = self._clock.now()
        halt = self._halt_reason(now)
        view = fleet_policy.FleetView(self._fleet.views, self._stopped_at, halt, self._watched_since)
        return fleet_policy.decide(view, now, self._policy, self._config.retry, self._config.contributions_needed)

    def _halt_reason(self, now: float) -> str:
        """The reason of a halt request; empty if none is known.

        Costs a request only if a replica cannot take part: otherwise replicas obey the halt by themselves.
        """
        if all(fleet_policy.can_take_part(view.state, now, self._policy) for view in self._fleet.views):
            return ""
        halt = self.reader.log.halt(self.leg)
        return halt.reason if halt else ""

    def _perform(self, action: fleet_policy.Action) -> None:
        """Perform an action other than a launch: launches are performed together."""
        match action:
            case fleet_policy.Cancel(replica_id, attempt, why):
                self._fleet.cancel((replica_id, attempt), why)
            case fleet_policy.GiveUp(replica_id, attempt, why):
                self._fleet.give_up((replica_id, attempt), why)
            case fleet_policy.Stop(status, why):
                self.stop(status, why)

    def _keep_house(self) -> None:
        """Enforce limits and retention while the leg goes on; after its stop the next leg may need any snapshot."""
        self._budget.enforce(self._clock.now(), self._clock.wall_time())
        try:
            self._sweeper.step()
        except DilocoError as error:  # a failed deletion must not end the run
            log.warning("retention deleted nothing this time: %s", error)

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
        """Wait until every launch call has returned, at most `patience_s` seconds.

        Raises `ExecutorDenied` if the provider rejected a launch; the others are launched.
        """
        deadline = self._clock.now() + patience_s
        self._fleet.take_launch_answers()
        while self._vendor.is_launching() and self._clock.now() <= deadline:
            self._clock.sleep(_LAUNCH_POLL_S)
            self._fleet.take_launch_answers()
        for view in self._fleet.views:
            if isinstance(view.state, Postponed) and view.state.refusal.denied:
                raise ExecutorDenied(
                    f"{view.state.refusal.error} The run exists: attach to {self.reader.store.url} to go on."
                )

    def cancel_all(self, why: str) -> None:
        """Cancel every attempt that is not known to have ended. Returns before their ends."""
        self._fleet.cancel_all(why)

    def stop(self, stop: rounds.Stop, why: str) -> None:
        """Stop the leg without the replicas: commit a stop and cancel all attempts. `why` goes into the commit."""
        self._seen.forget()
        self._end.commit_stop(stop, why)
        log.warning("the run is stopped (%s): %s", stop, why)
        self._stopped_at = self._clock.now()
        self.cancel_all(why)
