"""Detection of a training thread that is stuck: half an hour in the same functions, in a process that does nothing."""

import math
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import psutil

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.replica.attempt.heartbeat import Pulse

STUCK = "TrainingStuck"  # the error's name in exit record and traceback

_TIMES_HUNG = 10  # of `retry.hung_after_s`: half an hour by default, for a wait without CPU time may be meant
_SAMPLES = 60  # in that time: each asks the system about all processes
_BUSY_SHARE = 0.02  # of a core: more than heartbeats and polling of a store take
_BUSY_BYTES = 16 << 20  # written: a download by threads of a library writes a file, and takes hardly any CPU time
_PHASES = ("starting", "training", "scoring")  # in which code of the user's runs


@dataclass(frozen=True)
class Work:
    """CPU seconds taken, and bytes written, by a process and its living descendants."""

    cpu_s: float = 0.0
    written: int = 0

    @classmethod
    def of_this_process(cls) -> "Work":
        """The sum over this process and its descendants. Bytes are 0 where they are not counted: macOS, gVisor."""
        cpu_s, written = 0.0, 0
        this = psutil.Process()
        for process in [this, *this.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # it has ended
                times = process.cpu_times()
                cpu_s += times.user + times.system
                if sys.platform == "linux" and hasattr(process, "io_counters"):
                    written += process.io_counters().write_chars
        return cls(cpu_s, written)


class StuckWatch:
    """Samples of what the training thread does, from which `stack` concludes that it never goes on.

    Heartbeats come from another thread, so they go on where the training thread waits for ever, for a lock, a data
    loader or a server. A long evaluation, a compilation or a download takes CPU time or writes a file, and a wait of
    this package's for store or replicas has limits of its own: none of these counts.
    """

    def __init__(
        self,
        pulse: Pulse,
        config: RunConfig,
        clock: Clock,
        thread: int,
        work: Callable[[], Work] = Work.of_this_process,
    ) -> None:
        self._pulse = pulse
        self._clock = clock
        self._thread = thread
        self._work = work
        self._limit_s = _TIMES_HUNG * config.retry.hung_after_s
        self._every_s = self._limit_s / _SAMPLES
        # Time in which this process was stopped, or its machine asleep, is no time in which it did nothing.
        self._most_between_s = 3 * max(self._every_s, config.timing.heartbeat_s)
        self._seen: object = None  # what the training thread was doing at the last sample
        self._began = Work()
        self._still_s = 0.0
        self._at = -math.inf  # time of the last sample

    def stack(self) -> str | None:
        """The training thread's stack as a traceback that ends in an error, if it is stuck; else None.

        Call it every `timing.heartbeat_s` seconds. A call soon after the last sample takes none and returns None.
        """
        now = self._clock.now()
        if now - self._at < self._every_s:
            return None
        passed_s, self._at = min(now - self._at, self._most_between_s), now
        frame = sys._current_frames().get(self._thread)
        pulse = self._pulse
        if frame is None or pulse.phase not in _PHASES or _is_ours(frame):
            self._seen = None
            return None
        try:
            work = self._work()
        except (psutil.Error, OSError):  # not readable here: nothing is concluded
            self._seen = None
            return None
        doing = (pulse.phase, pulse.round, pulse.inner_step, [each.f_code for each, _ in traceback.walk_stack(frame)])
        self._still_s += passed_s
        # The CPU time of a child that has ended is missing in the sum, which is then less than it was.
        busy = not 0 <= work.cpu_s - self._began.cpu_s <= _BUSY_SHARE * self._still_s
        if doing != self._seen or busy or not 0 <= work.written - self._began.written <= _BUSY_BYTES:
            self._seen, self._began, self._still_s = doing, work, 0.0
        if self._still_s < self._limit_s:
            return None
        return "".join(
            [
                "Traceback (most recent call last):\n",
                *traceback.format_stack(frame),
                f"{STUCK}: the training thread was in these functions for {self._still_s:.0f} s, took no step, and the "
                "process neither computed nor wrote anything: a lock, a data loader or a server that never answers. "
                "Another attempt follows. If it has to wait that long, raise retry.hung_after_s, of which this is ten "
                "times.\n",
            ]
        )


def _is_ours(frame: FrameType) -> bool:
    """Whether the thread waits in this package's code, or in what it called of Python's own library."""
    names = (str(each.f_globals.get("__name__")).partition(".")[0] for each, _ in traceback.walk_stack(frame))
    return next((name for name in names if name not in sys.stdlib_module_names), "") == __name__.partition(".")[0]
