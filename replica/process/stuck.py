"""Detection of a training thread that is stuck: half an hour in the same functions, in a process that does nothing."""

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import psutil

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.attempt.heartbeat import Pulse
from diloco_orchestrator.replica.process.work import Work, WorkMeter
from diloco_orchestrator.run_log.attempts import AttemptRecords

STUCK = "TrainingStuck"  # the error's name in exit record and traceback

_TIMES_HUNG = 10  # of `retry.hung_after_s`: half an hour by default, for a wait without CPU time may be meant
_MOST_BEFORE = 3  # attempts that ended so before, each of which doubles that time: four hours by default
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

    A training function may be sound and wait for longer in each step, as for rollouts on other machines, and a server
    of data may be down for hours. So the limit of an attempt that has taken no step yet doubles with each attempt that
    ended so directly before it (`stuck_before`), and after a step that took long it is at least twice as long as that.
    """

    def __init__(
        self,
        pulse: Pulse,
        config: RunConfig,
        clock: Clock,
        thread: int,
        work: Callable[[], Work] | None = None,
        phases: Sequence[str] = _PHASES,
        stuck_before: Callable[[], int] = lambda: 0,
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
        self._stuck_before = stuck_before
        self._before: int | None = None  # what it returned
        self._stepped = False  # whether this attempt has taken a step
        self._progress = (0, 0)  # round and inner step at the last sample
        self._longest_s = 0.0  # of the waits that a step ended
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
        self._stepped = self._stepped or pulse.inner_step > 0
        doing = (pulse.phase, pulse.round, pulse.inner_step, [each.f_code for each, _ in traceback.walk_stack(frame)])
        self._still_s += passed_s
        if self._progress != (pulse.round, pulse.inner_step):
            self._progress = (pulse.round, pulse.inner_step)
            self._longest_s = max(self._longest_s, self._still_s)
        # The CPU time of a child that has ended is missing in the sum, which is then less than it was.
        busy = not 0 <= work.cpu_s - self._began.cpu_s <= _BUSY_SHARE * self._still_s
        # So are the bytes that it has moved.
        if doing != self._seen or busy or abs(work.moved - self._began.moved) > _BUSY_BYTES:
            self._seen, self._began, self._still_s = doing, work, 0.0
        if self._still_s < max(self._limit_s, 2 * self._longest_s):
            return None
        if not self._stepped and self._still_s < self._limit_s * 2 ** self._attempts_before():
            return None
        return "".join(
            [
                "Traceback (most recent call last):\n",
                *traceback.format_stack(frame),
                f"{STUCK}: no step for {self._still_s:.0f} s, all of it in these functions, and the process neither "
                "computed nor moved data: it waits for a lock, a data loader or a server. A wait that is meant needs a "
                "longer retry.hung_after_s, of which this is ten times or more.\n",
            ]
        )

    def _attempts_before(self) -> int:
        """Number of attempts directly before this one that ended as stuck; as many as count if it cannot be read."""
        if self._before is None:
            try:
                self._before = self._stuck_before()
            except DilocoError:
                return _MOST_BEFORE
        return self._before


def stuck_before(attempt: Attempt) -> int:
    """Number of attempts of its replica, directly before this one, that ended as stuck; at most three. One GET each."""
    records = AttemptRecords(attempt.store)
    for count in range(_MOST_BEFORE):
        number = attempt.number - 1 - count
        ended = records.exit(attempt.replica_id, number) if number > 0 else None
        if ended is None or not ended.reason.endswith(STUCK):
            return count
    return _MOST_BEFORE


def _is_ours(frame: FrameType) -> bool:
    """Whether the thread waits in this package's code, in what it called of Python's own library, or in its store,
    through whatever library that is.
    """
    names = [str(each.f_globals.get("__name__")).split(".") for each, _ in traceback.walk_stack(frame)]
    innermost = next((first for first, *_ in names if first not in sys.stdlib_module_names), "")
    return innermost == _PACKAGE or any(name[:2] == [_PACKAGE, "store"] for name in names)
