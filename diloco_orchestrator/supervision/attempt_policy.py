"""`AttemptPolicy`: every waiting time of the attempt machine and of the rules about attempts."""

from dataclasses import dataclass
from typing import Self

from diloco_orchestrator.config import RunConfig


@dataclass(frozen=True)
class AttemptPolicy:
    """Every waiting time of the attempt machine and of the rules about attempts, in seconds."""

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
    cancelled_for_s: float = 120.0
    """How long after a cancel an attempt counts as alive if no end is reported. A lost machine never reports one."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls(
            startup_timeout_s=config.timing.startup_timeout_s,
            hung_after_s=config.retry.hung_after_s,
            unavailable_for_s=config.retry.unavailable_for_s,
            poll_provider_s=1.5 * config.timing.heartbeat_s,
        )
