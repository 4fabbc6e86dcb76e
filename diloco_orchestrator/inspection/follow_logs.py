"""Follows the output of all replicas of a run at once, attempt after attempt, until the run stops.

Each attempt's output comes from its executor while the attempt runs, in a thread of its own, and from the bucket once
it has ended. Which lines are shown, and in which colour, is left to `cli`.
"""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diloco_orchestrator.clock import Background, Clock
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.executors.contract import ExecutorError, ServerlessExecutor
from diloco_orchestrator.inspection.logs import log_lines
from diloco_orchestrator.inspection.status import RunReader

_POLL_S = 2.0  # between two searches for new attempts
_WAIT_S = 0.2


@dataclass(frozen=True)
class LogLine:
    """One line of output."""

    replica_id: int
    attempt: int
    text: str


class LogFollower:
    """Yields the lines of all attempts of a run as they come. `tail`: how many of each attempt's first are shown.

    Args:
        replicas: ids of the replicas to follow.
        background: reads the output of each attempt.
        executor: by default the one made again from run.json.
        trust_bucket: as of `log_lines`.
    """

    def __init__(
        self,
        reader: RunReader,
        replicas: Sequence[int],
        clock: Clock,
        background: Background,
        tail: int | None = None,
        executor: ServerlessExecutor | None = None,
        trust_bucket: bool = False,
    ) -> None:
        self._reader = reader
        self._replicas = replicas
        self._clock = clock
        self._background = background
        self._tail = tail
        self._executor = executor
        self._trust_bucket = trust_bucket
        self._lines: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
        self._followed: set[tuple[int, int]] = set()  # attempts whose output was opened
        self._open: set[tuple[int, int]] = set()  # those that are still read

    def lines(self) -> Iterator[LogLine]:
        """All lines; ends once the newest leg has stopped and every attempt's output is read."""
        next_at = self._clock.now()
        while True:
            if self._clock.now() >= next_at:
                stopped = self._has_stopped()  # before the search, so that no attempt until then is missed
                self._open_new()
                next_at = self._clock.now() + _POLL_S
            yield from self._read()
            if stopped and not self._open and self._lines.empty():
                return
            self._clock.sleep(_WAIT_S)

    def _read(self) -> Iterator[LogLine]:
        while not self._lines.empty():
            yield self._lines.get()

    def _has_stopped(self) -> bool:
        """Whether the newest leg has stopped, by its commits or, without a commit, by its result."""
        log, leg = self._reader.log, self._reader.log.begins()[-1]
        newest = log.newest(leg)
        stopped = newest is not None and newest.commit.leg == leg.leg and newest.commit.stop != "none"
        return stopped or log.result(leg.leg) is not None

    def _open_new(self) -> None:
        """Follow attempts that have begun since the last call: of each replica the newest, later every one."""
        for replica_id, attempts in self._reader.attempts.all_numbers().items():
            seen = any(who[0] == replica_id for who in self._followed)
            for attempt in attempts if seen else attempts[-1:]:
                who = replica_id, attempt
                if replica_id in self._replicas and who not in self._followed and self._has_output(who):
                    self._followed.add(who)
                    self._open.add(who)
                    self._background.start(lambda who=who: self._follow(who))  # type: ignore[misc]

    def _has_output(self, who: tuple[int, int]) -> bool:
        return self._reader.attempts.handle(*who) is not None or self._reader.attempts.log_text(*who) is not None

    def _follow(self, who: tuple[int, int]) -> None:
        """Put the lines of one attempt into the queue, or why they cannot be read."""
        reader = RunReader(self._reader.store, self._reader.log)  # records are kept by attempt, for one thread
        try:
            lines = log_lines(reader, *who, self._tail, self._executor, follow=True, trust_bucket=self._trust_bucket)
            for text in lines:
                self._lines.put(LogLine(*who, text))
        except (DilocoError, ExecutorError) as error:
            self._lines.put(LogLine(*who, f"(its output cannot be read: {error})"))
        finally:
            self._open.discard(who)
