"""The clock that executors use, passed as a value so that tests control it."""

import time
from typing import Protocol


class ExecutorClock(Protocol):
    """A monotonic clock, in seconds from an arbitrary start."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemExecutorClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
