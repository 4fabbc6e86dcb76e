"""`Rig`: the service around an executor under test; makes executors as other processes would, and faults on request.

Each executor has its own rig. Tests that need a fault which the rig cannot cause are skipped with that reason.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from diloco_orchestrator.executors.contract import LaunchRequest, ReplicaHandle, ReplicaState, ServerlessExecutor

PATIENCE_S = 600.0  # seconds; ends a test that hangs, so long that no slow machine fails
RUN_ID = "contract-run"
SECRET = "s3cr3t-of-the-user-91827364"
# A program that runs until SIGTERM and then exits as a replica does.
STAY = (
    "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
    "print('here', flush=True); signal.sigwait([signal.SIGTERM]); "
    "print('DILOCO_EXIT {\"code\": 75}', flush=True); sys.exit(75)"
)


class Rig:
    """The service around one executor. Override the methods that the service supports; other tests are skipped."""

    construct: str = ""
    """Python source that binds `executor`, for another process with `environ`; it imports what it needs."""
    environ: Mapping[str, str] = {}
    """Variables added to the environment of that process."""
    credentials: tuple[str, ...] = ()
    """The provider's own secrets in use, which no text may show."""

    def executor(self) -> ServerlessExecutor:
        """A new executor object, as another process would make it."""
        raise NotImplementedError

    def denied(self) -> ServerlessExecutor:
        """An executor whose credentials the service refuses."""
        _cannot("refuse credentials")

    def preempt(self, handle: ReplicaHandle) -> None:
        """Make the provider preempt the attempt's machine."""
        _cannot("preempt")

    def hold(self, on: bool) -> None:
        """While `on`, a launched attempt waits for a machine."""
        _cannot("keep a launch waiting")

    def no_capacity(self, on: bool) -> None:
        """While `on`, the service has no machine."""
        _cannot("run out of machines")

    def failing(self, on: bool) -> None:
        """While `on`, every call fails with a transient error, such as HTTP 500."""
        _cannot("fail for a while")

    def forget(self, handle: ReplicaHandle) -> None:
        """Make the provider forget the attempt; a running one is ended."""
        _cannot("forget")

    def refuse(self, replica_id: int) -> None:
        """Make the provider refuse all later launches of this replica."""
        _cannot("refuse one launch")

    def machines(self, run_id: str) -> int:
        """Number of processes that the service has started for the run since the test began."""
        _cannot("count machines")


def _cannot(what: str) -> NoReturn:
    pytest.skip(f"this rig cannot {what}")


def request_of(code: str, **changes: Any) -> LaunchRequest:
    """A request to run Python `code` as attempt 1 of replica 0 of the run `RUN_ID`. `changes`: other fields."""
    request = LaunchRequest(RUN_ID, 0, 1, ["python", "-u", "-c", code])
    return replace(request, **changes)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds. Fails after `PATIENCE_S`, naming `what`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened in {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.05)


def ended_state(executor: ServerlessExecutor, handle: ReplicaHandle) -> ReplicaState:
    """Wait until the attempt has ended, and return its state."""
    wait_until(lambda: executor.poll(handle).state.ended, "the attempt's end")
    return executor.poll(handle).state
