"""`UploadLimits`: how long a request that writes may take before it counts as lost.

HTTP clients take one limit for a whole request, from its first byte to the answer. A short one ends every large upload
over a slow network; with a long one a lost answer is waited for minutes over a fast network. So the limit follows from
the number of bytes and from the speed of the latest writes. Where the server takes no bytes at all, the connection ends
after `LEAST_S` whatever the limit is.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from diloco_orchestrator.clock import Clock, SystemClock

LEAST_S = 30.0
SLOWEST = 75_000.0  # bytes a second of one request; .6 Mb/s. A line is found to be thinner by uploads that are lost
OVER = "Its time was over: the line or the server is slow, or the answer was lost."
_SLOWER = 10  # times the latest speed, at which a request counts as lost
_LARGE = 2**20  # bytes; smaller writes wait for the server rather than for the line


class UploadLimits:
    """Time limits of one process's writes to one store. Thread-safe: a race costs one observation of the speed."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._slowest = SLOWEST  # bytes a second, for which every write gets time
        self._rate = SLOWEST  # bytes a second of the latest large writes

    def limit_s(self, size: int) -> float:
        """Seconds for a write of `size` bytes: `LEAST_S` times a power of two, as each limit needs a client of its own.

        Ten times what the latest large writes would have taken, but never more than at the slowest rate.
        """
        wanted_s = max(LEAST_S, min(_SLOWER * size / self._rate, size / self._slowest))
        return LEAST_S * 2.0 ** math.ceil(math.log2(wanted_s / LEAST_S))

    @contextmanager
    def timed(self, size: int) -> Iterator[float]:
        """Context around a write of `size` bytes: yields its limit in seconds, and measures the speed of the write.

        After a write that failed at its limit, later ones get the time that they take at the slowest rate: `SLOWEST`,
        halved each time that a write fails with the time of that rate. So a network that turns slow costs one write.
        """
        limit_s, slowest, began = self.limit_s(size), self._slowest, self._clock.now()
        try:
            yield limit_s
        except Exception:  # clients' kinds share no base
            if self._clock.now() - began >= limit_s:
                if limit_s >= size / slowest > LEAST_S:
                    self._slowest = slowest / 2  # of writes that fail together each sets the same
                self._rate = self._slowest
            raise
        if size >= _LARGE:
            seen = size / max(self._clock.now() - began, 1e-3)
            self._rate = max(self._slowest, min(seen, (self._rate + seen) / 2))
