"""Many processes in one: threads that run one at a time, on a virtual clock that jumps to the next one to wake.

The same program gives the same order of events, whatever the machine does meanwhile.
"""

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class Killed(BaseException):
    """Raised where a killed process sleeps: no handler of the program under test outlives it."""


def _locked() -> threading.Lock:
    """A lock that whoever waits for takes once another thread has released it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass
class Process:
    """One thread of a process. `owner`: the process whose thread it is, where it is not its first."""

    name: str
    call: Callable[["VirtualClock"], None]
    owner: "Process | None" = None
    turn: threading.Lock = field(default_factory=_locked)
    killed: bool = False
    stopped_until: float = 0.0
    ended: bool = False
    error: BaseException | None = None  # what it ended with, if it was not killed
    waiting: list["Process"] = field(default_factory=list)  # for its end

    @property
    def root(self) -> "Process":
        return self.owner or self

    @property
    def dead(self) -> bool:
        """Whether this thread must end: its process was killed, or has ended without waiting for it."""
        return self.root.killed or (self.owner is not None and self.owner.ended)


class VirtualTime:
    """Runs processes until all have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.current = Process("nobody", lambda _: None)  # the one that runs
        self._queue: list[tuple[float, int, Process]] = []
        self._count = 0
        self._idle = _locked()
        self._failed: BaseException | None = None

    def spawn(
        self,
        name: str,
        call: Callable[["VirtualClock"], None],
        at: float | None = None,
        owner: Process | None = None,
    ) -> Process:
        """Start a process at a time, by default now. `call` gets its clock. Threads are named as their starter."""
        process = Process(name, call, owner)
        thread_name = threading.current_thread().name if owner else None
        threading.Thread(target=self._body, args=(process,), daemon=True, name=thread_name).start()
        self._wake(process, self.now if at is None else at)
        return process

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call something at a time, such as a kill."""
        self.spawn("event", lambda _: call(), at=time)

    def kill(self, process: Process) -> None:
        """As kill -9: it ends at the line where it sleeps."""
        process.killed = True

    def stop(self, process: Process, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after a while."""
        process.stopped_until = self.now + seconds

    def fail(self, error: BaseException) -> None:
        """Let `run` end every process and raise this error, unless it does so for an earlier one."""
        self._failed = self._failed or error

    def run(self, limit_s: float = 1e6) -> None:
        """Until all processes have ended; the first error of one of them is raised."""
        while self._queue:
            time, _, process = heapq.heappop(self._queue)
            if process.root.stopped_until > time and not process.root.killed:
                self._wake(process, process.root.stopped_until)
                continue
            if time >= limit_s:
                self.fail(AssertionError(f"{process.name} still runs after {limit_s:g} s of virtual time"))
            if self._failed is not None:
                process.root.killed = process.killed = True
            self.now = max(self.now, min(time, limit_s))
            self.current = process
            process.turn.release()
            self._idle.acquire()
            if process.ended and process.error is not None:
                self.fail(process.error)
        if self._failed is not None:
            raise self._failed

    def _body(self, process: Process) -> None:
        process.turn.acquire()
        try:
            if not process.dead:
                process.call(VirtualClock(self, process))
        except Killed:
            pass
        except BaseException as error:
            process.error = error
        process.ended = True
        for waiting in process.waiting:
            self._wake(waiting, self.now)
        self._idle.release()

    def _wake(self, process: Process, time: float) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, process))

    def sleep(self, seconds: float) -> None:
        """Let the others run until the time of the process that runs has come."""
        process = self.current
        if process.dead:
            raise Killed(process.name)  # whatever a dying process still tries
        self._wake(process, self.now + max(0.0, seconds))
        self._pause(process)

    def join(self, other: Process) -> None:
        """Let the others run until one of them has ended."""
        if not other.ended:
            other.waiting.append(self.current)
            self._pause(self.current)

    def _pause(self, process: Process) -> None:
        self._idle.release()
        process.turn.acquire()
        if process.dead:
            raise Killed(process.name)


class VirtualClock:
    """A process's clock, for all of its threads. `process`: its first thread."""

    def __init__(self, world: VirtualTime, process: Process) -> None:
        self.world = world
        self.process = process

    def now(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.sleep(seconds)

    def wall_time(self) -> float:
        return self.world.now


class _VirtualFuture(Future[T]):
    """Waits for its result on virtual time."""

    def __init__(self, world: VirtualTime) -> None:
        super().__init__()
        self.world = world
        self.process: Process | None = None

    def result(self, timeout: float | None = None) -> T:
        assert self.process is not None and timeout is None
        self.world.join(self.process)
        return super().result(0)


class VirtualBackground:
    """A process's background: every call is a thread of it. A `clock.Background`."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._threads = 0

    def start(self, call: Callable[[], T]) -> "Future[T]":
        world, future = self._clock.world, _VirtualFuture[T](self._clock.world)

        def run(_: VirtualClock) -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._threads += 1
        root = self._clock.process
        future.process = world.spawn(f"{root.name} thread {self._threads}", run, owner=root)
        return future

    def every(self, interval_s: float, call: Callable[[], None]) -> "_VirtualPeriodic":
        return _VirtualPeriodic(self, self._clock, interval_s, call)


class _VirtualPeriodic:
    def __init__(
        self, background: VirtualBackground, clock: VirtualClock, interval_s: float, call: Callable[[], None]
    ) -> None:
        self._stopped = False
        self._under_way: Future[Any] = background.start(call)

        def repeat() -> None:
            while True:
                self._under_way.result()
                clock.sleep(interval_s)
                if self._stopped:
                    return
                self._under_way = background.start(call)

        background.start(repeat)

    def stop(self) -> None:
        self._stopped = True
        self._under_way.result()
