"""Time as executors need it, handed in so that tests move it by hand."""

import time
from typing import Protocol


class ExecutorClock(Protocol):
    """A clock that never goes back, in seconds from an arbitrary start."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemExecutorClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
