"""The clock that everything uses, passed as a value so that tests control it; and secrets, which are drawn here."""

import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """The clocks of one process: monotonic, of which readings of two machines are never compared, and wall time."""

    def now(self) -> float:
        """Seconds on the monotonic clock, from an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds; return at once for zero or less."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970, for records and providers. The protocol neither compares them nor waits by them."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    def wall_time(self) -> float:
        return time.time()


def new_secret() -> str:
    """A secret of 32 hexadecimal digits that nobody can guess."""
    return secrets.token_hex(16)
