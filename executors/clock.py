"""The clock that executors use, passed as a value so that tests control it; and secrets, which are drawn here."""

import secrets
import time
from typing import Protocol


class ExecutorClock(Protocol):
    """The clock of an executor. Times are in seconds."""

    def now(self) -> float:
        """Seconds of a monotonic clock, from an arbitrary start."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970, for times that other processes or a provider read."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemExecutorClock:
    """The clock of an executor that reads the system's monotonic clock and wall time."""

    def now(self) -> float:
        return time.monotonic()

    def wall_time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def new_secret() -> str:
    """A secret of 32 hexadecimal digits that nobody can guess."""
    return secrets.token_hex(16)
