"""`Vendor`: calls the executor, and turns results and failures into events of the attempt state machine.

A launch may take minutes, so it runs in the background. `attempt` decides which call is made when.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from diloco_orchestrator.clock import Background, Clock
from diloco_orchestrator.executors.answers import failure_here
from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    ExecutorError,
    MissingSdk,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    Unavailable,
    hourly_usd,
)
from diloco_orchestrator.executors.process_contract import parse_exit_line
from diloco_orchestrator.supervision.attempt import ReplicaView
from diloco_orchestrator.supervision.attempt_types import (
    AttemptPolicy,
    CancelAccepted,
    CancelFailed,
    Cancelling,
    LaunchDenied,
    LaunchFailed,
    LaunchReturned,
    LaunchUnavailable,
    Outcome,
    Running,
    SearchDone,
    SearchFailed,
    VendorBlind,
    VendorSaid,
)
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from diloco_orchestrator.supervision.record_events import Addressed, Who

log = logging.getLogger(__name__)

_TAIL_LINES = 5  # of an attempt's output, where its exit line is
_KEPT_LINES, _KEPT_CHARACTERS = 1000, 65_536  # of a hung attempt's output; stacks of many threads are long


class Vendor:
    """The executor of one coordinator, wrapped so that provider errors become events."""

    def __init__(
        self,
        executor: ServerlessExecutor,
        requests: LaunchRequests,
        background: Background,
        clock: Clock,
        policy: AttemptPolicy,
    ) -> None:
        self._executor = executor
        self._requests = requests
        self._background = background
        self._clock = clock
        self._policy = policy
        self._launches: dict[Who, Future[LaunchReturned]] = {}
        self._launched_at: dict[Who, float] = {}  # when each of these calls began
        self._abandoned: dict[Future[LaunchReturned], float] = {}  # when what it has started is cancelled
        self._poll_at = clock.now()  # when statuses are asked for again
        self._denied_since: float | None = None  # since when polls are rejected
        self._handles: dict[Who, ReplicaHandle] = {}  # of the attempts whose statuses were asked for last
        self._random = random.Random(clock.wall_time())

    @property
    def name(self) -> str:
        return self._executor.name

    def is_launching(self, who: Who | None = None) -> bool:
        """Whether a launch call has not returned yet: of attempt `who`, or any if None."""
        return bool(self._launches) if who is None else who in self._launches

    def is_ours(self, handle: ReplicaHandle) -> bool:
        """Whether this executor launched the attempt with this handle, so that it can be polled here."""
        return self._executor.has(handle)

    # -- launching -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `ConfigError` if no attempt can be launched: a secret or the run's code archive is missing."""
        self._requests.check_secrets()
        self._requests.check_code(self._executor)

    def launch(self, who: Who, place: str) -> None:
        """Begin to launch an attempt in the background; `answered_launches` returns the result.

        `place`: of an executor that has several. Raises `ConfigError` if a secret or the run's code archive is missing.
        """
        executor, request = self._executor, self._requests.request(*who, self._executor.shares_machine)
        request = replace(request, place=place)
        price = hourly_usd(executor, request)
        self._launched_at[who] = self._clock.now()
        self._launches[who] = self._background.start(lambda: LaunchReturned(executor.launch(request), price))

    def abandon_launch(self, who: Who) -> None:
        """Ignore the result of the attempt's launch call. A process that the call still starts is cancelled."""
        if (launch := self._launches.pop(who, None)) is not None:
            self._abandoned[launch] = self._clock.now()

    def answered_launches(self, only: Who | None = None) -> list[Addressed]:
        """The results of launch calls that returned since the last call, as events; with `only` of that attempt alone.

        A call that exceeds `launch_call_s`, such as over a half-open connection, counts as the provider being
        unavailable; the next call for that attempt adopts a process that it may still start.
        """
        self._cancel_abandoned()
        done = [who for who, launch in self._launches.items() if launch.done() and only in (None, who)]
        hide = self._requests.without_secrets
        found: list[Addressed] = [(who, _answer(self._launches.pop(who), self._random.random(), hide)) for who in done]
        hanging = [who for who in self._launches if only in (None, who) and self._hangs(who)]
        for who in hanging:
            del self._launches[who]
            minutes = self._policy.launch_call_s / 60
            error = f"{self._executor.name} has not answered the launch call for {minutes:g} minutes."
            found.append((who, LaunchUnavailable(error, None, self._random.random())))
        return found

    def _cancel_abandoned(self) -> None:
        """Cancel the processes of abandoned launch calls that have returned; a refused cancel is tried again."""
        now = self._clock.now()
        for launch in [launch for launch, due in self._abandoned.items() if launch.done() and now >= due]:
            del self._abandoned[launch]
            if launch.exception() is None and isinstance(self.cancel(launch.result().handle), CancelFailed):
                self._abandoned[launch] = now + self._policy.retry_cancel_s

    def _hangs(self, who: Who) -> bool:
        return self._clock.now() - self._launched_at[who] > self._policy.launch_call_s

    # -- polling and ending --------------------------------------------------------------------------------------

    def statuses(self, views: Iterable[ReplicaView], *, at_once: bool) -> list[Addressed]:
        """The status of every attempt that has a handle and is not known to have ended, as events.

        Empty within `poll_provider_s` of the last call, unless `at_once` or if attempts run on this machine.
        """
        now = self._clock.now()
        if not at_once and not self._executor.shares_machine and now < self._poll_at:
            return []
        self._poll_at = now + self._policy.poll_provider_s
        handles = [v.state.handle for v in views if isinstance(v.state, Running | Cancelling) and v.state.handle]
        self._handles = {(handle.replica_id, handle.attempt): handle for handle in handles}
        return self.poll(handles)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[Addressed]:
        """A `VendorSaid` or `VendorBlind` event for each handle: a failed call does not end supervision.

        Raises `ExecutorDenied` once credentials have been rejected for `denied_for_s` (replicas go on meanwhile, and
        tokens are renewed), and `MissingSdk`, which no waiting corrects.
        """
        whose = [(handle.replica_id, handle.attempt) for handle in handles]
        if not handles:
            return []
        try:
            statuses = self._executor.poll_many(handles)
        except ExecutorDenied as error:
            self._tolerate_denied(error)
            return [(who, VendorBlind()) for who in whose]
        except MissingSdk:
            raise
        except (ExecutorError, OSError) as error:
            log.warning("the provider reported no status this time: %s", error)
            return [(who, VendorBlind()) for who in whose]
        self._denied_since = None
        return list(zip(whose, map(self._said, statuses), strict=True))

    def _said(self, status: ReplicaStatus) -> VendorSaid | VendorBlind:
        """Event for a provider's status: `VendorBlind` if UNKNOWN, else `VendorSaid` with our credentials redacted."""
        if status.state is ReplicaState.UNKNOWN:
            return VendorBlind()
        message = self._requests.without_secrets(status.message) if status.message else ""
        return VendorSaid(replace(status, message=message))

    def with_printed_errors(self, events: Iterable[Addressed]) -> Iterator[Addressed]:
        """`events`, where a failure without an exit record gets the error from the exit line that the process printed.

        Such a process could not write to the bucket: it was refused there, or its code could not be fetched.
        """
        for who, event in events:
            failed = isinstance(event, VendorSaid) and event.status.state is ReplicaState.FAILED
            if isinstance(event, VendorSaid) and failed and who in self._handles:
                words = self._last_words(self._handles[who])
                event = VendorSaid(replace(event.status, message=words)) if words else event
            yield who, event

    def _last_words(self, handle: ReplicaHandle) -> str:
        """The error in the exit line of an attempt's output; empty if it printed none or its output cannot be read."""
        try:
            fields = parse_exit_line(self._executor.logs(handle, tail=_TAIL_LINES)) or {}
        except (ExecutorError, OSError):
            return ""
        error = fields.get("error")
        return self._requests.without_secrets(error.strip()) if isinstance(error, str) else ""

    def output(self, handle: ReplicaHandle) -> str:
        """The last 65,536 characters of an attempt's output, credentials redacted; empty if it cannot be read."""
        try:
            text = "\n".join(self._executor.logs(handle, tail=_KEPT_LINES))
        except (ExecutorError, OSError) as error:
            log.warning("the output of replica %d could not be kept: %s", handle.replica_id, error)
            return ""
        return self._requests.without_secrets(text)[-_KEPT_CHARACTERS:]

    def cancel(self, handle: ReplicaHandle) -> CancelAccepted | CancelFailed:
        """Send a cancel to the provider. An error becomes the event `CancelFailed`."""
        try:
            self._executor.cancel(handle)
        except (ExecutorError, OSError) as error:
            return CancelFailed(self._requests.without_secrets(str(error)))
        return CancelAccepted()

    def find(self, run_id: str, who: Who) -> SearchDone | SearchFailed:
        """Search the provider for the process of an attempt, which a dead coordinator may have launched."""
        try:
            known = self._executor.find(run_id)
        except (ExecutorError, OSError) as error:
            return SearchFailed(self._requests.without_secrets(str(error)))
        return SearchDone(next((each for each in known if (each.replica_id, each.attempt) == who), None))

    def _tolerate_denied(self, error: ExecutorDenied) -> None:
        now = self._clock.now()
        if self._denied_since is None:
            log.warning("supervision goes on without the provider's statuses: %s", error)
            self._denied_since = now
        elif now - self._denied_since > self._policy.denied_for_s:
            raise ExecutorDenied(
                f"{error} This lasts for {self._policy.denied_for_s / 60:.0f} minutes. Replicas that run go on by "
                f"themselves; attach to {self._requests.url} again with other credentials."
            ) from error


def _answer(
    launch: "Future[LaunchReturned]", spread: float, hide: Callable[[str], str]
) -> LaunchReturned | LaunchDenied | LaunchUnavailable | LaunchFailed:
    try:
        return launch.result()
    except ExecutorDenied as error:
        return LaunchDenied(hide(str(error)))
    except Unavailable as error:
        return LaunchUnavailable(hide(str(error)), error.retry_after_s, spread)
    except ValueError as error:
        return LaunchFailed(Outcome.PERMANENT, hide(f"the executor cannot launch it: {error}"))
    except NoCapacity as error:
        return LaunchFailed(Outcome.NO_CAPACITY, hide(f"no machine: {error}"))
    except OSError as error:
        failure = failure_here("launching it", error)
        if isinstance(failure, Unavailable):  # what the call has started is adopted by the next one
            return LaunchUnavailable(hide(str(failure)), None, spread)
        return LaunchFailed(Outcome.ERROR, hide(f"it could not be launched: {error}"))
    except ExecutorError as error:
        return LaunchFailed(Outcome.ERROR, hide(f"it could not be launched: {error}"))
