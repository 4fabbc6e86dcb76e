"""Time, chance and background work as values that are handed in.

This file and the process entries are the only places that read a clock, draw from the system's randomness or start a
thread. Everything else takes a `Clock` and a `Background`, so that one process can play a whole run on a clock moved
by hand.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """A local monotonic clock. Readings of two machines are never compared."""

    def now(self) -> float:
        """Seconds on a monotonic clock of this process."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait; returns at once for zero or less."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970, for people to read in records. Never compared, never waited for."""
        ...


class Periodic(Protocol):
    """Handle of a repeated background call."""

    def stop(self) -> None:
        """End the repetition; a call under way is waited for. Safe to call twice."""
        ...


class Background(Protocol):
    """Runs work beside the training loop."""

    def start(self, call: Callable[[], T]) -> "Future[T]":
        """Call `call` once; the future holds what it returns or raises."""
        ...

    def every(self, interval_s: float, call: Callable[[], None]) -> Periodic:
        """Call `call` now and then every `interval_s` seconds until stopped. `call` must handle its own errors."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    def wall_time(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when someone sleeps on it or calls `advance`: waiting costs no time in tests."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def wall_time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


@dataclass(frozen=True)
class Backoff:
    """Pauses of a loop that polls or retries: `first_s`, then `factor` times as long each time, up to `longest_s`."""

    first_s: float
    longest_s: float
    factor: float = 2.0

    def pauses(self) -> Iterator[float]:
        """The pauses in seconds, without end. A new iterator begins with `first_s` again."""
        pause = self.first_s
        while True:
            pause = min(pause, self.longest_s)
            yield pause
            pause *= self.factor


class _ThreadPeriodic:
    def __init__(self, interval_s: float, call: Callable[[], None]) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, args=(interval_s, call), daemon=True)
        self._thread.start()

    def _loop(self, interval_s: float, call: Callable[[], None]) -> None:
        call()
        while not self._stopped.wait(interval_s):
            call()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _settle(future: "Future[T]", call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class ThreadBackground:
    """One daemon thread per call, so that an interpreter that ends waits for none."""

    def start(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        threading.Thread(target=_settle, args=(future, call), daemon=True).start()
        return future

    def every(self, interval_s: float, call: Callable[[], None]) -> Periodic:
        return _ThreadPeriodic(interval_s, call)


class _NotRunning:
    def stop(self) -> None:
        pass


class NoBackground:
    """Runs a call at its start, a repeated one never again: for tests and tools without threads."""

    def start(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        _settle(future, call)
        return future

    def every(self, interval_s: float, call: Callable[[], None]) -> Periodic:
        call()
        return _NotRunning()


def random_token() -> str:
    """16 hex digits that no other process has: tells two writers of the same key apart."""
    return secrets.token_hex(8)
