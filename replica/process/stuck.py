"""Detection of a training thread that is stuck: half an hour in the same functions, in a process that does nothing."""

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import psutil

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.replica.attempt.heartbeat import Pulse
from diloco_orchestrator.replica.process.work import Work, WorkMeter

STUCK = "TrainingStuck"  # the error's name in exit record and traceback

_TIMES_HUNG = 10  # of `retry.hung_after_s`: half an hour by default, for a wait without CPU time may be meant
_SAMPLES = 60  # in that time: each asks the system about all processes
_BUSY_SHARE = 0.02  # of a core: more than heartbeats and polling of a store take
_BUSY_BYTES = 16 << 20  # moved: a download over a slow line, or a read of a slow disk, takes hardly any CPU time
_PHASES = ("starting", "training", "scoring")  # in which code of the user's runs
_PACKAGE = __name__.partition(".")[0]
PHASES_OF_RANK_0 = _PHASES[1:]  # in ctx.attach it waits for ranks that still compute


class StuckWatch:
    """Samples of what the training thread does, from which `stack` concludes that it never goes on.

    Heartbeats come from another thread, so they go on where the training thread waits for ever, for a lock, a data
    loader or a server. A long evaluation or compilation takes CPU time, a download moves bytes, and a wait of this
    package's for store or replicas has limits of its own: none of these counts.
    """

    def __init__(
        self,
        pulse: Pulse,
        config: RunConfig,
        clock: Clock,
        thread: int,
        work: Callable[[], Work] | None = None,
        phases: Sequence[str] = _PHASES,
    ) -> None:
        self._pulse = pulse
        self._clock = clock
        self._thread = thread
        self._work = work or WorkMeter()
        self._phases = phases
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
        if frame is None or pulse.phase not in self._phases or _is_ours(frame):
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
        # So are the bytes that it has moved.
        if doing != self._seen or busy or abs(work.moved - self._began.moved) > _BUSY_BYTES:
            self._seen, self._began, self._still_s = doing, work, 0.0
        if self._still_s < self._limit_s:
            return None
        return "".join(
            [
                "Traceback (most recent call last):\n",
                *traceback.format_stack(frame),
                f"{STUCK}: no step for {self._still_s:.0f} s, all of it in these functions, and the process neither "
                "computed nor moved data: it waits for a lock, a data loader or a server. A wait that is meant needs a "
                "longer retry.hung_after_s, of which this is ten times.\n",
            ]
        )


def _is_ours(frame: FrameType) -> bool:
    """Whether the thread waits in this package's code, in what it called of Python's own library, or in its store,
    through whatever library that is.
    """
    names = [str(each.f_globals.get("__name__")).split(".") for each, _ in traceback.walk_stack(frame)]
    innermost = next((first for first, *_ in names if first not in sys.stdlib_module_names), "")
    return innermost == _PACKAGE or any(name[:2] == [_PACKAGE, "store"] for name in names)
