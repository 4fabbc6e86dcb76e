"""Clock, pauses, background work and random tokens, passed as values to everything that needs them.

This file, `executors.clock` and the process entries are the only places that read a clock, draw from the system's
randomness or start a thread. Everything else takes a `Clock` and a `Background`, so that one process can simulate a
whole run on virtual time.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from diloco_orchestrator.executors.clock import Clock as Clock
from diloco_orchestrator.executors.clock import SystemClock as SystemClock

T = TypeVar("T")

# Calls that `in_parallel` runs at the same time: one for each replica of the largest run whose rounds are promised to
# take a fixed number of round trips. More would only divide the same bandwidth.
MOST_PARALLEL = 32


class Background(Protocol):
    """Interface: runs calls in threads beside the training loop, once or periodically."""

    def start(self, call: Callable[[], T]) -> "Future[T]":
        """Call `call` once in the background; the future holds what it returns or raises."""
        ...

    def every(self, interval_s: float, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` in the background, at once and after every `interval_s` seconds.

        Returns a function that stops this once a running call has ended. It may be called twice, and from within
        `call`.
        """
        ...


class ManualClock:
    """A clock for tests that only `sleep` and `advance` move, so that waiting costs no real time."""

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
    """Pauses of a loop that polls or retries: `first_s`, each next one `factor` times as long, up to `longest_s`."""

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


def _complete(future: "Future[T]", call: Callable[[], T]) -> None:
    """Set the result of `future` to what `call` returns, or its exception to what it raises."""
    try:
        future.set_result(call())
    except BaseException as error:  # whoever waits for the future gets it
        future.set_exception(error)


class ThreadBackground:
    """Runs each call in a daemon thread of its own, so that the interpreter can exit while calls run."""

    def start(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        threading.Thread(target=_complete, args=(future, call), daemon=True).start()
        return future

    def every(self, interval_s: float, call: Callable[[], None]) -> Callable[[], None]:
        stopped = threading.Event()

        def repeat() -> None:
            call()
            while not stopped.wait(interval_s):
                call()

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()

        def stop() -> None:
            stopped.set()
            if thread is not threading.current_thread():
                thread.join()

        return stop


class NoBackground:
    """Runs each call synchronously, and a periodic one exactly once: for tests and tools without threads."""

    def start(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        _complete(future, call)
        return future

    def every(self, interval_s: float, call: Callable[[], None]) -> Callable[[], None]:
        call()
        return lambda: None


def in_parallel(background: Background, calls: Sequence[Callable[[], T]], most: int = MOST_PARALLEL) -> list[T]:
    """Results of `calls`, in their order. Up to `most` run at the same time, one of them in this thread.

    After an error, or an interrupt of this thread, no further call begins. Once all running calls have ended, the first
    error in the order of `calls` is raised, which is independent of timing.
    """
    waiting = deque(enumerate(calls))
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}

    def work() -> None:
        with suppress(IndexError):  # from `popleft`: no call is left
            while not errors:
                index, call = waiting.popleft()
                try:
                    results[index] = call()
                except Exception as error:  # raised below, when all calls have ended
                    errors[index] = error

    helpers = [background.start(work) for _ in range(min(most, len(calls)) - 1)]
    try:
        work()
    except BaseException:  # an interrupt
        waiting.clear()
        raise
    for helper in helpers:
        helper.result()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(calls))]


def random_token() -> str:
    """16 random hex digits, so that two writers of the same key differ."""
    return secrets.token_hex(8)
