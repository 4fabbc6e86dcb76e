"""Modal's SDK: loaded at first use, its errors translated, calls of its private methods, pieces of output as lines.

The order of calls is in `modal_sandboxes`.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco_orchestrator.executors.answers import unreadable
from diloco_orchestrator.executors.contract import ExecutorDenied, ExecutorError, MissingSdk, NoCapacity, Unavailable
from diloco_orchestrator.executors.modal_objects import RUNNING
from diloco_orchestrator.executors.process_contract import EXIT_DONE

if TYPE_CHECKING:
    from modal import Sandbox

# Names in `modal.exception`. ServiceError is gRPC's CANCELLED, UNKNOWN, DEADLINE_EXCEEDED and UNAVAILABLE,
# InternalError its INTERNAL, ConflictError its ABORTED. RESOURCE_EXHAUSTED (ResourceExhaustedError) is `NoCapacity`.
_TRANSIENT = (
    "ServiceError",
    "InternalError",
    "InternalFailure",
    "ConnectionError",
    "TimeoutError",
    "ConflictError",
    "ExecutionError",  # of the SDK itself: the service answered something that it does not expect
)
_LOG_ENTRIES = 20_000  # the most that Modal returns at once
_LOG_OVERLAP = timedelta(seconds=5)  # entries may arrive out of order


class Entry(NamedTuple):
    """A piece of a Sandbox's output: a line, or a part of one."""

    timestamp: datetime
    source: str  # stdout or stderr
    text: str


def sdk() -> ModuleType:
    """Modal's SDK. Raises `MissingSdk` if it is not installed."""
    try:
        import modal
    except ImportError:
        raise MissingSdk("Modal's SDK is not installed: pip install 'diloco-orchestrator[modal]'") from None
    return modal


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Context that translates errors of Modal's SDK into `ExecutorError`s. `what`: the action, for messages.

    A ConflictError, which means that its object's state has changed meanwhile, passes as an outage does.
    """
    errors = sdk().exception
    import grpclib.exceptions  # a dependency of the SDK, as protobuf is
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    passing = tuple(getattr(errors, name) for name in _TRANSIENT if hasattr(errors, name))
    try:
        yield
    except (errors.AuthError, errors.PermissionDeniedError) as error:
        raise ExecutorDenied(
            f"{what}: Modal refuses ({error}). Check the credentials with `modal token info`, and what they may do."
        ) from None
    except errors.ResourceExhaustedError as error:
        raise NoCapacity(f"{what}: Modal has no room now ({error}). Try later, another GPU or any region.") from None
    except (*passing, grpclib.exceptions.StreamTerminatedError, OSError) as error:
        words = f"{type(error).__name__}: {error}"
        raise Unavailable(f"{what}: {words}. Try again; https://status.modal.com says if Modal is down.") from None
    except DecodeError as error:
        raise unreadable(what, error) from None
    except (errors.InvalidError, errors.NotFoundError) as error:
        raise ExecutorDenied(
            f"{what}: Modal does not take the request ({error}). Correct environment, Secrets, GPU or image."
        ) from None
    except errors.Error as error:
        raise ExecutorError(f"{what}: {type(error).__name__}: {error}. Try again.") from None


def log_in_again() -> bool:
    """Read Modal's configuration file again, and forget the client of the process: the next call logs in anew.

    The SDK reads the file once, as it is imported. Returns False with an SDK whose private names are others.
    """
    sdk()
    import modal.config
    from modal.client import _Client

    config: Any = modal.config
    try:
        config._user_config = config._read_user_config()
        config._profile = os.environ.get("MODAL_PROFILE") or config._config_active_profile()
        _Client._set_env_client(None)
    except AttributeError:
        return False
    return True


def end_of(sandbox: "Sandbox") -> tuple[str, str]:
    """How a Sandbox ended, as `GenericResult.GenericStatus` without its prefix, and Modal's words about it.

    `RUNNING` if it has not ended. The SDK's public methods return only an exit code, and that of an image that did not
    start is 0. A private method returns the status; with an SDK version that lacks the method, the exit code decides.
    """
    try:
        result = sandbox._get_metadata().result
    except AttributeError:
        by_code = {None: RUNNING, EXIT_DONE: "SUCCESS", 124: "TIMEOUT", 137: "TERMINATED"}
        return by_code.get(sandbox.returncode, "FAILURE"), ""
    from modal_proto import api_pb2

    names = {number: name for name, number in api_pb2.GenericResult.GenericStatus.items()}
    return str(names.get(result.status, result.status)).removeprefix("GENERIC_STATUS_"), str(result.exception)


def has_machine(sandbox: "Sandbox") -> bool:
    """Whether a Sandbox that has not ended has a machine. True with an SDK that lacks the private call."""
    try:
        sandbox._resolve_task_id_for_logs()
    except sdk().exception.ExecutionError:
        return False
    except AttributeError:
        return True
    return True


def entries_of(sandbox: "Sandbox", newest: datetime | None, tail: int | None) -> Sequence[Entry]:
    """Output entries that Modal has kept, without Modal's own: the last ones, or those after `newest` and 5 s before
    it.

    `tail`: number of lines wanted, if `newest` is None.
    """
    errors = sdk().exception
    try:
        if newest is None:
            wanted = _LOG_ENTRIES if tail is None else min(_LOG_ENTRIES, 4 * tail + 100)
            found = sandbox.logs.tail(wanted)
        else:
            found = sandbox.logs.fetch(since=newest - _LOG_OVERLAP)
        return [Entry(each.timestamp, each.source, each.message) for each in found if each.source != "system"]
    except (errors.NotFoundError, errors.ExecutionError):  # Modal no longer has it, or it has no machine yet
        return []


class OutputLines:
    """Joins output entries of successive fetches to lines. A fetch may repeat entries of the fetch before it."""

    def __init__(self) -> None:
        self._shown: Counter[Entry] = Counter()
        self._rest: dict[str, str] = {}  # incomplete last line, by source: stdout and stderr have their own
        self.newest: datetime | None = None  # time of the newest entry so far

    def add(self, entries: Sequence[Entry]) -> list[str]:
        """The lines that these entries complete, without entries that were added before."""
        complete: list[str] = []
        for entry in self._without_shown(entries):
            *lines, self._rest[entry.source] = (self._rest.get(entry.source, "") + entry.text).split("\n")
            complete += lines
        if entries:
            self._shown, self.newest = Counter(entries), max(entry.timestamp for entry in entries)
        return complete

    def rest(self) -> list[str]:
        """The incomplete last lines of stdout and stderr, at the end of the output."""
        rest, self._rest = self._rest, {}
        return [line for line in rest.values() if line]

    def _without_shown(self, entries: Sequence[Entry]) -> list[Entry]:
        left, fresh = Counter(self._shown), []
        for entry in entries:
            if left[entry] > 0:
                left[entry] -= 1
            else:
                fresh.append(entry)
        return fresh
