"""Data types of the attempt state machine: its states, events, effects, outcomes and timeouts.

`attempt` has the transitions. Times are seconds on one coordinator's own monotonic clock; none is stored in the bucket,
so a new coordinator starts every timeout anew.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.executors.contract import ReplicaHandle, ReplicaStatus


class Outcome(StrEnum):
    """The outcome of an attempt. Each outcome but SUPERSEDED and VACATED has a budget of its own."""

    DONE = "done"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed out"  # the provider's time limit, which is no error
    NO_CAPACITY = "no capacity"  # the provider has no machine now
    ERROR = "error"
    PERMANENT = "permanent"  # a relaunch would end the same way
    SUPERSEDED = "superseded"  # another process has its replica
    VACATED = "vacated"  # the run was scaled down: its replica is launched again when the run is scaled up


# The outcomes that cost a replica its budget, or its place in the run at once.
COSTLY = frozenset({Outcome.PREEMPTED, Outcome.TIMED_OUT, Outcome.NO_CAPACITY, Outcome.ERROR, Outcome.PERMANENT})


# -- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """The newest heartbeat of an attempt that this coordinator has read, and when its counter last increased."""

    counter: int
    at: float


@dataclass(frozen=True)
class Refusal:
    """The provider's refusals to launch an attempt: since when, the newest error, and the number of calls.

    `denied`: True if the provider rejects our credentials, False if it is down or overloaded.
    """

    since: float
    error: str
    denied: bool
    calls: int = 1


@dataclass(frozen=True)
class Unlaunched:
    """State: nothing announces the attempt yet: it has no intent record."""


@dataclass(frozen=True)
class Alive:
    """Common fields of the states in which an attempt is not known to have ended; not a state itself."""

    since: float  # when this coordinator first knew of the attempt
    beat: Beat | None  # None: it has sent no heartbeat yet


@dataclass(frozen=True)
class Reserved(Alive):
    """State: the attempt is announced (intent) but has no handle: another coordinator launches it, or has died."""

    launch_at: float  # when to launch it here; once it is not wanted, when to search for its process
    wanted: bool = True  # False: the leg has stopped


@dataclass(frozen=True)
class Launching(Alive):
    """State: this coordinator's launch call to the provider has not returned; it may take minutes."""

    refusal: Refusal | None = None  # of an earlier call for the same attempt


@dataclass(frozen=True)
class Postponed(Alive):
    """State: the provider refused the launch, which is tried again at `retry_at` under the same attempt number."""

    refusal: Refusal
    retry_at: float


@dataclass(frozen=True)
class Running(Alive):
    """State: launched, with the handle by which the provider knows it, which may still be waiting for a machine."""

    handle: ReplicaHandle
    running_since: float | None = None  # when the provider first reported that it has a machine
    blind_since: float | None = None  # since when the provider cannot report its status; None: it can
    pending: bool = False  # the provider's last report: it waits for a machine
    waits_for: str = ""  # why it has no machine yet, in the provider's last words; empty once it has one


@dataclass(frozen=True)
class Unreachable(Alive):
    """State: this coordinator cannot poll or cancel the process; it reads its heartbeat and exit record instead."""

    why: Literal["other executor", "claim lost"]  # claim lost: our process exited, another one has its number


@dataclass(frozen=True)
class Cancelling(Alive):
    """State: the cancel record exists. With a handle, the cancel is sent to the provider until it is accepted."""

    why: str
    cancelled_at: float  # when the provider accepted the cancel; until then when the cancel was wanted
    handle: ReplicaHandle | None
    search_at: float | None = None  # when to search for its process; None: it has a handle, or our launch is under way
    call_at: float = -math.inf  # when to send the cancel to the provider
    accepted: bool = False  # by the provider
    blind: bool = False  # the provider cannot report its status


@dataclass(frozen=True)
class Ended:
    """State: the attempt is over; another one may follow.

    An attempt with outcome SUPERSEDED is in this state until the later attempt that superseded it is read.
    """

    outcome: Outcome
    at: float  # when this coordinator learned of it
    reason: str
    took_part: bool = False  # a commit averaged its contribution, so that its replica's budgets are full again
    fault: str = ""  # type and line of the error in its exit record, by `fault_in`; empty where there is none

    @property
    def cause(self) -> str:
        """The fault; without one the outcome. Equal for two attempts that ended alike, whatever their reasons say."""
        return self.fault or str(self.outcome)


@dataclass(frozen=True)
class GivenUp:
    """State: no further attempt of this replica is launched until the run is resumed."""

    reason: str
    cause: str = ""  # `Ended.cause` of its last attempt


State = Unlaunched | Reserved | Launching | Postponed | Running | Unreachable | Cancelling | Ended | GivenUp


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IntentWritten:
    """Event: this coordinator created the intent, which announces the attempt, so it launches it."""


@dataclass(frozen=True)
class IntentTaken:
    """Event: another coordinator created the intent, the record that announces the attempt."""


@dataclass(frozen=True)
class LaunchReturned:
    """Event, the reply to `CallLaunch`: the attempt was launched. `hourly_usd`: price of its machine or None."""

    handle: ReplicaHandle
    hourly_usd: float | None = None


@dataclass(frozen=True)
class LaunchDenied:
    """Event, the reply to `CallLaunch`: the provider rejects our credentials or this request."""

    error: str


@dataclass(frozen=True)
class LaunchUnavailable:
    """Event, the reply to `CallLaunch`: the provider is down or overloaded; the same call may succeed later.

    `retry_after_s`: pause that the provider asks for, or None. `spread`: random, in [0, 1), to vary the pause.
    """

    error: str
    retry_after_s: float | None
    spread: float


@dataclass(frozen=True)
class LaunchFailed:
    """Event, the reply to `CallLaunch`: nothing was launched, for the reason that `outcome` names."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class HandleSeen:
    """Event: a handle record exists. `ours`: this coordinator's executor launched it, so it can be polled here."""

    handle: ReplicaHandle
    ours: bool


@dataclass(frozen=True)
class ClaimLost:
    """Event, the reply to `FindSuccessor`: no later attempt exists, so another process has claimed this one."""


@dataclass(frozen=True)
class VendorSaid:
    """Event: the provider reported a status of the attempt other than UNKNOWN."""

    status: ReplicaStatus


@dataclass(frozen=True)
class VendorBlind:
    """Event: the provider could not report the attempt's status."""


@dataclass(frozen=True)
class BeatSeen:
    """Event: a heartbeat was read; its counter may be unchanged."""

    counter: int


@dataclass(frozen=True)
class ExitSeen:
    """Event: the attempt's exit record exists. `status`: the provider's report, if there is one too."""

    code: int
    reason: str
    status: ReplicaStatus | None = None
    fault: str = ""  # as in `Ended`


@dataclass(frozen=True)
class CancelAsked:
    """Event: `fleet_policy` or the user decided to cancel the attempt."""

    why: str


@dataclass(frozen=True)
class CancelSeen:
    """Event: a cancel record of an earlier or another coordinator exists."""

    why: str


@dataclass(frozen=True)
class CancelAccepted:
    """Event, the reply to `CallCancel`: the provider accepted the cancel and will end the attempt."""


@dataclass(frozen=True)
class CancelFailed:
    """Event, the reply to `CallCancel`: the provider did not accept the cancel."""

    error: str


@dataclass(frozen=True)
class SearchDone:
    """Event, the reply to `CallFind`: the handle of the attempt's process; None if the provider has no such process."""

    handle: ReplicaHandle | None


@dataclass(frozen=True)
class SearchFailed:
    """Event, the reply to `CallFind`: the provider could not be searched."""

    error: str


@dataclass(frozen=True)
class LegStopped:
    """Event: the run has stopped (ended its leg), so nothing is launched any more. Sent at every step after that."""


@dataclass(frozen=True)
class Replaced:
    """Event: a later attempt of the replica exists. The record that announces it may name how this one ended."""

    outcome: Outcome | None = None
    reason: str = ""
    took_part: bool = False
    fault: str = ""  # as in `Ended`


@dataclass(frozen=True)
class TookPart:
    """Event: a commit averaged a contribution of this attempt."""


@dataclass(frozen=True)
class GaveUp:
    """Event: `fleet_policy` decided that the replica gets no further attempt."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Event: time has passed. Sent at the end of every step."""


Event = (
    IntentWritten | IntentTaken | LaunchReturned | LaunchDenied | LaunchUnavailable | LaunchFailed | HandleSeen
    | ClaimLost | VendorSaid | VendorBlind | BeatSeen | ExitSeen | CancelAsked | CancelSeen | CancelAccepted
    | CancelFailed | SearchDone | SearchFailed | LegStopped | Replaced | TookPart | GaveUp | Tick
)  # fmt: skip


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallLaunch:
    """Effect: launch the attempt in the background; the reply is a Launch… event."""


@dataclass(frozen=True)
class AbandonLaunch:
    """Effect: ignore the result of the current launch call; a process that it still starts is cancelled."""


@dataclass(frozen=True)
class WriteHandle:
    """Effect: create the record of the handle by which the provider knows the attempt's process (`handle.json`)."""

    handle: ReplicaHandle
    hourly_usd: float | None


@dataclass(frozen=True)
class WriteWaiting:
    """Effect: overwrite `waiting.json` with the provider's reason why the attempt has not started."""

    why: str


@dataclass(frozen=True)
class WriteCancel:
    """Effect: create the record that the attempt is cancelled, and why (`cancel.json`)."""

    why: str


@dataclass(frozen=True)
class WriteOut:
    """Effect: create the record that the replica is launched no more before the next resume."""

    why: str


@dataclass(frozen=True)
class CallCancel:
    """Effect: send a cancel to the provider; the reply is a Cancel… event."""

    handle: ReplicaHandle


@dataclass(frozen=True)
class CallFind:
    """Effect: search the provider for the attempt's process; the reply is a Search… event."""


@dataclass(frozen=True)
class FindSuccessor:
    """Effect: read the replica's newest attempt; the reply is `ClaimLost` if that is still this one."""


Effect = (
    CallLaunch | AbandonLaunch | WriteHandle | WriteWaiting | WriteCancel | WriteOut | CallCancel | CallFind
    | FindSuccessor
)  # fmt: skip


# -- waiting times ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttemptPolicy:
    """All timeouts of the attempt state machine and of the rules about attempts, in seconds."""

    startup_timeout_s: float
    """How long a running attempt may take to its first heartbeat before it counts as hung, such as to load a model."""
    hung_after_s: float
    """How long an attempt that has sent a heartbeat may send no further one before it counts as hung."""
    poll_provider_s: float = 15.0
    """The pause between two polls of a provider of other machines, until the leg has stopped: all runs of an account
    share its rate limit.
    """
    adopt_after_s: float = 5.0
    """How long an intent may have no handle before this coordinator launches the attempt. Most launch calls return
    sooner; if one takes longer, the executor adopts the process, so that launching it twice starts it once.
    """
    denied_for_s: float = 600.0
    """How long the provider may reject our credentials before they count as rejected for good. Tokens are renewed
    within minutes, and the running replicas need supervision meanwhile.
    """
    retry_denied_s: float = 30.0
    """The pause between two tries of a rejected call: soon after a renewal of tokens, far from any rate limit."""
    unavailable_for_s: float = 21600.0
    """How long the provider may be down or overloaded before the launch of an attempt counts as failed. Outages last
    for hours; the other replicas go on meanwhile.
    """
    launch_call_s: float = 1800.0
    """How long a launch call may take before it is repeated: an image may be built in it, and a connection may hang."""
    retry_unavailable_s: tuple[float, float] = (2.0, 120.0)
    """The first and the longest pause between two calls while the provider is unavailable: doubled with every call, and
    spread over its second half, so that many coordinators do not return at the same time.
    """
    no_first_beat_s: float = 120.0
    """How long a halt waits for an attempt without a first heartbeat. Its image may not exist."""
    leftover_s: float = 120.0
    """How long after the stop attempts may still run before they are cancelled. The last snapshot has to be written."""
    vacate_s: float = 180.0
    """How long an attempt whose id is vacated has to leave by itself before its provider is asked to end it: it reads
    the cancel record beside its next heartbeat, at most a third of `hung_after_s` later, and publishes what it has.
    """
    retry_cancel_s: float = 10.0
    """The pause between two tries of a cancel that the provider refused or did not answer: a machine costs money until
    one succeeds, and a provider that limits requests is not asked every second.
    """
    cancelled_for_s: float = 120.0
    """How long after a cancel an attempt counts as alive if no end is reported. A lost machine never reports one. Also
    how long a cancel is repeated while the provider reports no status either.
    """

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls(
            startup_timeout_s=config.timing.startup_timeout_s,
            hung_after_s=config.retry.hung_after_s,
            vacate_s=config.retry.hung_after_s,
            unavailable_for_s=config.retry.unavailable_for_s,
            poll_provider_s=1.5 * config.timing.heartbeat_s,
        )
