"""Many processes in one: threads that run one at a time, on a virtual clock that jumps to the next one to wake.

The same program gives the same order of events, whatever the machine does meanwhile.
"""

import heapq
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from diloco_orchestrator.allreduce.threads import _openmp

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
    """One thread of a process. `owner`: the process whose thread it is, where it is not its first.

    `parent`: another process, with which it is killed.
    """

    name: str
    call: Callable[["VirtualClock"], None]
    owner: "Process | None" = None
    parent: "Process | None" = None
    thread_name: str = ""
    pauses: bool = True  # whether `call` may sleep or join; else it needs no thread of its own
    worker: "_Worker | None" = None  # None before its start
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
        if self.root.parent is not None and self.root.parent.killed:
            self.root.killed = True
        return self.root.killed or (self.owner is not None and self.owner.ended)


class _Worker:
    """A real thread that runs one virtual thread after the other: starting one takes longer than most of them do.

    Torch has one thread in it. How many calls run beside each other follows from that number, and so does the order in
    which faults are drawn: a run is the same on every machine, after whatever has run before.
    """

    idle: ClassVar[list["_Worker"]] = []

    def __init__(self) -> None:
        self.turn = _locked()
        self.work: tuple[VirtualTime, Process] | None = None
        threading.Thread(target=self._loop, daemon=True).start()

    @classmethod
    def resume(cls, world: "VirtualTime", process: Process) -> None:
        """Let a process run: in an idle worker if it has not begun."""
        if process.worker is None:
            process.worker = cls.idle.pop() if cls.idle else cls()
            process.worker.work = (world, process)
        process.worker.turn.release()

    def _loop(self) -> None:
        torch.get_num_threads()  # its first call in a thread sets that thread's number
        if (set_threads := _openmp()) is not None:
            set_threads(1)
        while True:
            self.turn.acquire()
            assert self.work is not None
            world, process = self.work
            self.work = None
            threading.current_thread().name = process.thread_name
            world.body(process)
            self.idle.append(self)
            world.hand_over(process)
            del world, process  # else an idle worker keeps a whole run


class VirtualTime:
    """Runs processes until all have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.current = Process("nobody", lambda _: None)  # the one that runs
        self._queue: list[tuple[float, int, Process]] = []
        self._count = 0
        self._idle = _locked()
        self._failed: BaseException | None = None
        self._limit_s = math.inf

    def spawn(
        self,
        name: str,
        call: Callable[["VirtualClock"], None],
        at: float | None = None,
        owner: Process | None = None,
        parent: Process | None = None,
    ) -> Process:
        """Start a process at a time, by default now. `call` gets its clock. Threads are named as their starter."""
        process = Process(name, call, owner, parent, threading.current_thread().name if owner else name)
        self._wake(process, self.now if at is None else at)
        return process

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call something at a time, such as a kill. It must not sleep."""
        self._wake(Process("event", lambda _: call(), pauses=False), time)

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
        self._limit_s = limit_s
        first = self._next()
        if first is not None:
            _Worker.resume(self, first)
            self._idle.acquire()
        if self._failed is not None:
            raise self._failed

    def _next(self) -> Process | None:
        """The process whose turn it is, None once all have ended."""
        while self._queue:
            time, _, process = heapq.heappop(self._queue)
            root = process.root
            if root.stopped_until > time and not root.killed:
                self._wake(process, root.stopped_until)
                continue
            if time >= self._limit_s:
                self.fail(AssertionError(f"{process.name} still runs after {self._limit_s:g} s of virtual time"))
            if self._failed is not None:
                root.killed = process.killed = True
            self.now = max(self.now, min(time, self._limit_s))
            self.current = process
            if process.worker is not None or (process.pauses and not process.dead):
                return process
            self.body(process)
        return None

    def body(self, process: Process) -> None:
        """Run a process from its start to its end, unless it was killed before that."""
        try:
            if not process.dead:
                process.call(VirtualClock(self, process))
        except Killed:
            pass
        except BaseException as error:
            process.error = error
            self.fail(error)
        process.ended = True
        for waiting in process.waiting:
            self._wake(waiting, self.now)

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
        assert process.worker is not None
        if not self.hand_over(process):
            process.worker.turn.acquire()
        if process.dead:
            raise Killed(process.name)

    def hand_over(self, process: Process) -> bool:
        """Let the next process run; True if that is the one that asks."""
        following = self._next()
        if following is None:
            self._idle.release()
        elif following is not process:
            _Worker.resume(self, following)
        return following is process


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
        self._join(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._join(timeout)
        return super().exception(0)

    def _join(self, timeout: float | None) -> None:
        assert self.process is not None and timeout is None
        self.world.join(self.process)


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

    def every(self, interval_s: float, call: Callable[[], None]) -> Callable[[], None]:
        return _VirtualPeriodic(self, self._clock, interval_s, call).stop


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
