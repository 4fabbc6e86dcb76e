"""Many processes in one: threads that run one at a time, on a virtual clock that jumps to the next one to wake.

The same program gives the same order of events, whatever the machine does meanwhile.
"""

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


class Killed(BaseException):
    """Raised where a killed process sleeps: no handler of the program under test outlives it."""


@dataclass
class Process:
    """One thread of a process. `owner`: the process whose thread it is, where it is not its first."""

    name: str
    call: Callable[["VirtualClock"], None]
    owner: "Process | None" = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    killed: bool = False
    stopped_until: float = 0.0
    ended: bool = False
    error: BaseException | None = None  # what it ended with, if it was not killed

    @property
    def root(self) -> "Process":
        return self.owner or self


class VirtualTime:
    """Runs processes until all have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Process]] = []
        self._count = 0
        self._idle = threading.Semaphore(0)

    def spawn(
        self,
        name: str,
        call: Callable[["VirtualClock"], None],
        at: float | None = None,
        owner: Process | None = None,
    ) -> Process:
        """Start a process at a time, by default now. `call` gets its clock."""
        process = Process(name, call, owner)
        threading.Thread(target=self._body, args=(process,), daemon=True).start()
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

    def run(self, limit_s: float = 1e6) -> None:
        """Until all processes have ended; the first error of one of them is raised."""
        failed: BaseException | None = None
        while self._queue:
            time, _, process = heapq.heappop(self._queue)
            if process.root.stopped_until > time and not process.root.killed:
                self._wake(process, process.root.stopped_until)
                continue
            if time >= limit_s:
                failed = failed or AssertionError(f"{process.name} still runs after {limit_s:g} s of virtual time")
            if failed is not None:
                process.root.killed = process.killed = True
            self.now = max(self.now, min(time, limit_s))
            process.turn.release()
            self._idle.acquire()
            if process.ended and process.error is not None:
                failed = failed or process.error
        if failed is not None:
            raise failed

    def _body(self, process: Process) -> None:
        process.turn.acquire()
        try:
            if not process.root.killed:
                process.call(VirtualClock(self, process))
        except Killed:
            pass
        except BaseException as error:
            process.error = error
        process.ended = True
        self._idle.release()

    def _wake(self, process: Process, time: float) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, process))

    def sleep(self, process: Process, seconds: float) -> None:
        """Let the others run until this process's time has come."""
        if process.root.killed:
            raise Killed(process.name)  # whatever a dying process still tries
        self._wake(process, self.now + max(0.0, seconds))
        self._idle.release()
        process.turn.acquire()
        if process.root.killed:
            raise Killed(process.name)


class VirtualClock:
    """A process's clock."""

    def __init__(self, world: VirtualTime, process: Process) -> None:
        self.world = world
        self.process = process

    def now(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.sleep(self.process, seconds)

    def wall_time(self) -> float:
        return self.world.now
