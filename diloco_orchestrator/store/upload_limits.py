"""`UploadLimits`: how long a request that writes may take before it counts as lost.

HTTP clients take one limit for a whole request, from its first byte to the answer. A short one ends every large upload
over a slow line; with a long one a connection that died in mid-upload holds a fast line for minutes. So the limit
follows from the number of bytes and from how fast the latest ones went.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from diloco_orchestrator.clock import Clock, SystemClock

LEAST_S = 30.0
SLOWEST = 75_000.0  # bytes a second of one request; .6 Mb/s
_SLOWER = 10  # times the latest speed, at which a request counts as lost
_LARGE = 2**20  # bytes; smaller writes wait for the server rather than for the line


class UploadLimits:
    """Time limits of one process's writes to one store. Thread-safe: a race costs one observation of the speed."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._rate = SLOWEST  # bytes a second of the latest large writes

    def limit_s(self, size: int) -> float:
        """Seconds for a write of `size` bytes: `LEAST_S` times a power of two, as each limit needs a client of its own.

        Ten times what the latest large writes would have taken, but never more than at `SLOWEST`.
        """
        wanted_s = max(LEAST_S, min(_SLOWER * size / self._rate, size / SLOWEST))
        return LEAST_S * 2.0 ** math.ceil(math.log2(wanted_s / LEAST_S))

    @contextmanager
    def timed(self, size: int) -> Iterator[float]:
        """Context around a write of `size` bytes, whose limit in seconds it gives. It learns how fast the write was.

        After a write that failed at its limit the others get the time of the slowest line: a line that turned slow
        costs one lost write.
        """
        limit_s, began = self.limit_s(size), self._clock.now()
        try:
            yield limit_s
        except Exception:  # clients' kinds share no base
            if self._clock.now() - began >= limit_s:
                self._rate = SLOWEST
            raise
        if size >= _LARGE:
            seen = size / max(self._clock.now() - began, 1e-3)
            self._rate = max(SLOWEST, min(seen, (self._rate + seen) / 2))
