"""The vocabulary of the attempt machine: its states, events, effects, outcomes and policy.

Holds data only. Which event moves which state where is in `attempt`. Times are seconds on one coordinator's own
monotonic clock; none of them is in the bucket, so a new coordinator counts every one of them anew.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.executors.contract import ReplicaHandle, ReplicaStatus


@dataclass(frozen=True)
class AttemptPolicy:
    """Every waiting time of the attempt machine and of the rules about attempts, in seconds."""

    startup_timeout_s: float
    """Running, without a first heartbeat, until it counts as hung. Loading a model may take minutes."""
    hung_after_s: float
    """Without a new heartbeat, until an attempt that has sent one counts as hung."""
    adopt_after_s: float = 5.0
    """An intent without a handle, until it is launched here. Most launch calls return within this time; where one
    takes longer, the executor adopts the process, so that launching it twice starts it once."""
    denied_for_s: float = 600.0
    """Credentials that the provider rejects, until they count as rejected for good. Tokens are renewed within
    minutes, and the replicas that run need supervision meanwhile."""
    retry_denied_s: float = 30.0
    """Between two tries of a call that the provider rejected: soon after a renewal, far from any rate limit."""
    no_first_beat_s: float = 120.0
    """Without a first heartbeat, until a halt no longer waits for an attempt. Its image may not exist."""
    leftover_s: float = 120.0
    """After the stop, until attempts that still run are cancelled. The last snapshot has to be written."""
    cancelled_for_s: float = 120.0
    """After a cancel, until an attempt counts as ended though nobody saw its end. A lost machine never reports one."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls(startup_timeout_s=config.timing.startup_timeout_s, hung_after_s=config.retry.hung_after_s)


class Outcome(StrEnum):
    """How an attempt ended. Each outcome but SUPERSEDED has a budget of its own."""

    DONE = "done"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed out"  # the provider's time limit: nobody's fault
    NO_CAPACITY = "no capacity"  # the provider has no machine now
    ERROR = "error"
    PERMANENT = "permanent"  # a relaunch would end the same way
    SUPERSEDED = "superseded"  # another process has its replica


# -- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """The newest heartbeat that this coordinator has read, and when its counter had moved."""

    counter: int
    at: float


@dataclass(frozen=True)
class Denial:
    """A launch that the provider rejects: since when, and its newest error."""

    since: float
    error: str


@dataclass(frozen=True)
class Unlaunched:
    """No intent exists yet."""


@dataclass(frozen=True)
class Alive:
    """Not a state of its own: what all states share in which an attempt is not known to have ended."""

    since: float  # when this coordinator first knew of the attempt
    beat: Beat | None  # None: it has sent no heartbeat yet


@dataclass(frozen=True)
class Reserved(Alive):
    """An intent exists and no handle: another coordinator is launching the attempt, or died while it did."""

    launch_at: float  # when to launch it here; once it is not wanted, when to search for its process
    wanted: bool = True  # False: the leg has stopped


@dataclass(frozen=True)
class Launching(Alive):
    """Our call to the provider is under way; it may take minutes."""

    denial: Denial | None = None  # an earlier call for the same attempt was rejected


@dataclass(frozen=True)
class Denied(Alive):
    """The provider rejected our credentials; the same attempt is tried again."""

    denial: Denial
    retry_at: float


@dataclass(frozen=True)
class Running(Alive):
    """Launched. The provider may still be looking for a machine."""

    handle: ReplicaHandle
    running_since: float | None = None  # when the provider first reported RUNNING
    blind_since: float | None = None  # since when the provider cannot report its status; None: it can


@dataclass(frozen=True)
class Unreachable(Alive):
    """This coordinator can neither poll nor cancel the process: it reads its heartbeat and exit record instead."""

    why: Literal["other executor", "claim lost"]  # claim lost: our process exited, another one has its number


@dataclass(frozen=True)
class Cancelling(Alive):
    """Its cancel record is written. With a handle the provider is asked to end it, as often as it takes."""

    why: str
    cancelled_at: float  # when the provider accepted the cancel; until then when the cancel was wanted
    handle: ReplicaHandle | None
    search_at: float | None = None  # when to search for its process; None: it has a handle, or our launch is under way
    accepted: bool = False  # by the provider
    blind: bool = False  # the provider cannot report its status


@dataclass(frozen=True)
class Ended:
    """The attempt is over; another one may follow. SUPERSEDED only until the successor is found."""

    outcome: Outcome
    at: float  # when this coordinator learned of it
    reason: str


@dataclass(frozen=True)
class GivenUp:
    """No further attempt of this replica is launched in this leg."""

    reason: str


State = Unlaunched | Reserved | Launching | Denied | Running | Unreachable | Cancelling | Ended | GivenUp


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IntentWritten:
    """We created the intent: the launch is ours."""


@dataclass(frozen=True)
class IntentTaken:
    """The bucket holds an intent that this coordinator did not create."""


@dataclass(frozen=True)
class LaunchReturned:
    """Answers `CallLaunch`."""

    handle: ReplicaHandle
    hourly_usd: float | None = None


@dataclass(frozen=True)
class LaunchDenied:
    """Answers `CallLaunch`: the provider rejects our credentials or this request."""

    error: str


@dataclass(frozen=True)
class LaunchFailed:
    """Answers `CallLaunch`: nothing was launched."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class HandleSeen:
    """A handle record exists. `ours`: this coordinator's executor launched it, so it can be polled here."""

    handle: ReplicaHandle
    ours: bool


@dataclass(frozen=True)
class ClaimLost:
    """Answers `FindSuccessor`: no later attempt exists, so another process has claimed this one."""


@dataclass(frozen=True)
class VendorSaid:
    """The provider reported a status other than UNKNOWN."""

    status: ReplicaStatus


@dataclass(frozen=True)
class VendorBlind:
    """The provider could not report a status."""


@dataclass(frozen=True)
class BeatSeen:
    """A heartbeat was read, perhaps the same as before."""

    counter: int


@dataclass(frozen=True)
class ExitSeen:
    """The attempt's own exit record exists. `status`: what the provider reported beside it, if anything."""

    code: int
    reason: str
    status: ReplicaStatus | None = None


@dataclass(frozen=True)
class CancelAsked:
    """`fleet_policy` or the user wants the attempt to end."""

    why: str


@dataclass(frozen=True)
class CancelSeen:
    """A cancel record exists that an earlier or another coordinator wrote."""

    why: str


@dataclass(frozen=True)
class CancelAccepted:
    """Answers `CallCancel`: the provider will end the attempt."""


@dataclass(frozen=True)
class CancelFailed:
    """Answers `CallCancel`: the provider did not take it."""

    error: str


@dataclass(frozen=True)
class SearchDone:
    """Answers `CallFind`: what the provider knows of the attempt; None if it knows no such process."""

    handle: ReplicaHandle | None


@dataclass(frozen=True)
class SearchFailed:
    """Answers `CallFind`: the provider did not answer."""

    error: str


@dataclass(frozen=True)
class LegStopped:
    """The leg has stopped: nothing is launched any more. Sent at every step after the stop."""


@dataclass(frozen=True)
class Replaced:
    """A later attempt of this replica exists. `outcome`: how its launcher saw this one end, if its intent names it."""

    outcome: Outcome | None = None
    reason: str = ""


@dataclass(frozen=True)
class GaveUp:
    """`fleet_policy` decided that the replica gets no further attempt."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed. Sent at the end of every step."""


Event = (
    IntentWritten | IntentTaken | LaunchReturned | LaunchDenied | LaunchFailed | HandleSeen | ClaimLost | VendorSaid
    | VendorBlind | BeatSeen | ExitSeen | CancelAsked | CancelSeen | CancelAccepted | CancelFailed | SearchDone
    | SearchFailed | LegStopped | Replaced | GaveUp | Tick
)  # fmt: skip


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallLaunch:
    """Launch the attempt in the background; answered by a Launch… event."""


@dataclass(frozen=True)
class AbandonLaunch:
    """Forget the launch call under way; a process that it still starts is cancelled."""


@dataclass(frozen=True)
class WriteHandle:
    """Create `handle.json`."""

    handle: ReplicaHandle
    hourly_usd: float | None


@dataclass(frozen=True)
class WriteCancel:
    """Create `cancel.json`."""

    why: str


@dataclass(frozen=True)
class CallCancel:
    """Ask the provider to end the process; answered by a Cancel… event."""

    handle: ReplicaHandle


@dataclass(frozen=True)
class CallFind:
    """Search the provider for the process of this attempt; answered by a Search… event."""


@dataclass(frozen=True)
class FindSuccessor:
    """Follow the replica's newest attempt; answered by `ClaimLost` if that is still this one."""


Effect = CallLaunch | AbandonLaunch | WriteHandle | WriteCancel | CallCancel | CallFind | FindSuccessor
