"""Every error type that a caller may want to tell apart, and the nearest known name for a misspelt one.

Executors have a tree of their own (`executors.contract.ExecutorError`), and a guard that fired raises
`CollapseStopError`. A new type exists only where a caller acts differently on it. Messages have three parts: what
happened, to which object, and what the reader can do now.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from diloco_orchestrator.executors.error_sections import Documented as Documented
from diloco_orchestrator.executors.error_sections import error_line as error_line
from diloco_orchestrator.executors.error_sections import more_about as more_about
from diloco_orchestrator.executors.names import nearest as nearest
from diloco_orchestrator.executors.names import unknown_name as unknown_name


class DilocoError(Documented):
    """Base of all errors raised by this project on purpose."""


# -- configuration and input ------------------------------------------------------------------------------------------


class ConfigError(DilocoError, ValueError):
    """An invalid setting, option or argument. Raised before anything is started."""


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Context in which a `ValueError`, as executors raise for an invalid option, is raised as a `ConfigError`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


class RunFolderTaken(DilocoError):
    """The folder of the new run already holds another run, or what replicas of a removed one go on to write."""


class NoSuchRun(DilocoError):
    """The folder holds no run."""


# -- records ----------------------------------------------------------------------------------------------------------


class RecordInvalid(DilocoError):
    """An object in the bucket is not the record that its key names."""


class RecordTooNew(RecordInvalid):
    """A record was written by a newer version of this package."""


class RecordTooOld(RecordInvalid):
    """A record was written by an older version of this package, whose format this one does not read."""


# -- store ------------------------------------------------------------------------------------------------------------


class StoreError(DilocoError):
    """The object store answered with an error."""


class ObjectMissing(StoreError):
    """The store holds no object with this key."""


class StoreUnavailable(StoreError):
    """A transient fault (network, throttling, a server's 5xx). The request may have taken effect all the same.

    `after_s`: seconds for which the store asks for no further request (Retry-After); 0 if it does not say.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class StoreDenied(StoreError):
    """The credentials do not allow this call."""


class StoreFull(StoreError):
    """Nothing can be written now: the disk is full or read-only, or a quota is used up."""


# -- this machine -----------------------------------------------------------------------------------------------------


class SpoolFailed(DilocoError):
    """A temporary file could not be written: the disk is full or not writable. A relaunch may find more space."""


class BudgetTooSmall(SpoolFailed, ConfigError):
    """The memory budget of this process is smaller than one shard of the run, so that files do not help. Permanent."""


class TrackerFailed(DilocoError):
    """An experiment tracker's library or service failed. The same call goes on with the first round that it lacks."""


# -- rounds -----------------------------------------------------------------------------------------------------------


class RoundError(DilocoError):
    """Base of the errors of one round: payloads, quorum, divergence, and attempts that have to leave."""


class PayloadCorrupt(RoundError):
    """Payload bytes do not match the digest, shape, codec or finiteness in their manifest.

    `key`: of the object if its bytes have another digest or it does not exist; else empty.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class RoundReused(RoundError):
    """A rank published other numbers under this round id before."""


class AllReduceTimeout(RoundError, TimeoutError):
    """Some ranks did not publish in time; `missing` holds them."""

    def __init__(self, message: str, missing: Iterable[int]) -> None:
        super().__init__(message)
        self.missing = tuple(sorted(missing))


class QuorumLost(RoundError):
    """A round had no quorum for `round_timeout_s`; `missing` holds the ids of the replicas that did not respond."""

    def __init__(self, message: str, missing: Iterable[int]) -> None:
        super().__init__(message)
        self.missing = tuple(sorted(missing))


class BaseDiverged(RoundError):
    """This machine's arithmetic gives other bits than most replicas'. Permanent: the replica is not relaunched."""


class ModelMismatch(RoundError):
    """The workload's model differs in names, shapes or dtypes from the run's first base. Permanent."""


class FirstBaseOutvoted(RoundError):
    """More than half of the replicas adopted another first base than this one, or its vote on the first base was taken.

    The next attempt adopts theirs, or votes anew.
    """


class HeldoutItemInTraining(RoundError):
    """The training data holds a held-out item; `item` is its id. Permanent: the replica is not relaunched."""

    def __init__(self, message: str, item: str) -> None:
        super().__init__(message)
        self.item = item


class Superseded(RoundError):
    """A later attempt of the same replica is alive, so this process must exit."""


class Preempted(RoundError):
    """The process received SIGTERM, or its time limit is near; its finished work is published."""


class WorkloadEndedEarly(RoundError):
    """The training function returned before the run's end."""


# -- outcome of a run -------------------------------------------------------------------------------------------------


class RunFailed(DilocoError):
    """The run ended before its last round, and the guard did not stop it."""


class RunNotFinished(DilocoError):
    """The run goes on, so that it has no result yet."""
