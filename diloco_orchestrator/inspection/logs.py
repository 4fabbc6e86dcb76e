"""Reads the output of attempts: from the bucket once an attempt has ended, from its executor while it runs.

Reads one attempt, or all replicas at once until the run stops. `cli` prints the lines.
"""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diloco_orchestrator.clock import Background, Clock
from diloco_orchestrator.errors import ConfigError, DilocoError
from diloco_orchestrator.executors.contract import ExecutorError, ReplicaHandle, ServerlessExecutor
from diloco_orchestrator.executors.registry import recreate
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import pace
from diloco_orchestrator.run_log.launched_here import check_launched_here

_POLL_S = 2.0  # between two searches for new attempts
_WAIT_S = 0.2


def executor_of_run(
    reader: RunReader, need: str, trust_bucket: bool, instead: str = "Name it yourself (executor=…, --executor)"
) -> ServerlessExecutor:
    """The executor that launched the run, with this process's credentials.

    Raises `ConfigError` or `ExecutorError` if run.json does not say how to make it, and `ConfigError` for a run that
    this user did not launch on this machine, unless `trust_bucket` is set. `need`: why the executor is needed, the
    beginning of that message. `instead`: what else its reader can do.
    """
    if reader.is_by_hand():
        raise ConfigError(
            f"the replicas of {reader.store.url} are loops that their users start (ObjectStoreManager.join): nothing "
            "can be launched here, and their output is where they run. Start their programs again, each with its "
            "replica_id."
        )
    if not trust_bucket:
        check_launched_here(reader.log, need, instead)
    spec = reader.run.executor
    if spec is not None and spec.get("name") != "local":
        return recreate(spec)
    from diloco_orchestrator.executors.local_process import LocalProcessExecutor

    for replica_id in range(reader.run.config.most_replicas):
        for attempt in reversed(reader.attempts.numbers(replica_id)):
            intent, handle = reader.attempts.intent(replica_id, attempt), reader.attempts.handle(replica_id, attempt)
            if intent is not None and intent.executor != LocalProcessExecutor.name:
                raise ConfigError(f"the run was launched with executor {intent.executor!r}: attach(url, executor=…).")
            if handle is not None:
                return LocalProcessExecutor.of(ReplicaHandle.from_json(handle.handle))
    return LocalProcessExecutor()


def log_lines(
    reader: RunReader,
    replica_id: int,
    attempt: int | None = None,
    tail: int | None = None,
    executor: ServerlessExecutor | None = None,
    follow: bool = False,
    trust_bucket: bool = False,
) -> Iterator[str]:
    """The output lines of a replica's attempt, by default of its newest.

    Empty for an attempt without handle. Raises `ConfigError` for an attempt that does not exist, naming existing ones,
    and for a running one whose executor cannot, or may not (`trust_bucket`), be recreated from run.json.

    Args:
        tail: number of last lines to return; None for all.
        executor: used for a running attempt; by default one recreated from run.json.
        follow: go on until the end of a running attempt.
        trust_bucket: recreate the executor in run.json although this user did not launch the run here.
    """
    known = reader.attempts.numbers(replica_id)
    if not known or (attempt is not None and attempt not in known):
        last = reader.run.config.most_replicas - 1
        never = "it was never launched" if replica_id <= last else f"the run has replicas 0 to {last}"
        there = f"its attempts are {', '.join(map(str, known))}" if known else never
        raise ConfigError(f"replica {replica_id}, attempt {attempt or 1} has no log: {there}.")
    number = attempt or known[-1]
    kept = reader.attempts.log_text(replica_id, number)
    if kept is not None:
        lines = kept.splitlines()
        return iter(lines if tail is None else lines[max(0, len(lines) - tail) :])
    record = reader.attempts.handle(replica_id, number)
    if record is None:
        return iter(())
    handle = ReplicaHandle.from_json(record.handle)
    executor = executor or _executor_that_reads(reader, trust_bucket)
    return executor.logs(handle, follow=follow, tail=tail)


def _executor_that_reads(reader: RunReader, trust_bucket: bool) -> ServerlessExecutor:
    """The executor for the output of an attempt that runs; raises the errors of `executor_of_run`.

    Machines that join write theirs into the run's folder, and nothing in run.json says how it is read there: so it is
    read of any run.
    """
    if (reader.run.executor or {}).get("name") == "join":
        joined = recreate({"name": "join", "options": {}})
        joined.use_store(reader.store.url, {})
        return joined
    instead = "Read it on the machine that launched the run, or in the bucket once the attempt has ended"
    return executor_of_run(reader, "the output of an attempt that runs", trust_bucket, instead)


@dataclass(frozen=True)
class LogLine:
    """One line of a replica's output, with the attempt that printed it."""

    replica_id: int
    attempt: int
    text: str


class LogFollower:
    """Yields the lines of output of all attempts of a run as they come.

    Args:
        replicas: ids of the replicas to follow.
        background: reads the output of each attempt.
        executor: the run's; by default one recreated from run.json.
        tail: how many earlier lines of each attempt are shown.
        trust_bucket: recreate the executor in run.json although this user did not launch the run here.
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
        self._followed: set[tuple[int, int]] = set()  # attempts whose output was opened, or will never be there
        self._open: set[tuple[int, int]] = set()  # those that are still read

    def lines(self) -> Iterator[LogLine]:
        """All lines of output; ends once the run has stopped and every attempt's output is read."""
        next_at = self._clock.now()
        while True:
            if self._clock.now() >= next_at:
                stopped = self._reader.has_stopped()  # before the search, so that no attempt until then is missed
                self._open_new()
                store = self._reader.store
                apart_s = pace.apart_s(self._reader.run.config, store.requests_allowed)
                next_at = self._clock.now() + max(_POLL_S, apart_s)
            yield from self._read()
            if stopped and not self._open and self._lines.empty():
                return
            self._clock.sleep(_WAIT_S)

    def _read(self) -> Iterator[LogLine]:
        while not self._lines.empty():
            yield self._lines.get()

    def _open_new(self) -> None:
        """Start reading attempts that began since the last call: at first each replica's newest, later all.

        One without output is looked for again only while it is its replica's newest: others never had a process.
        """
        for replica_id, attempts in self._reader.attempts.all_numbers().items():
            seen = any(who[0] == replica_id for who in self._followed)
            for attempt in attempts if seen else attempts[-1:]:
                who = replica_id, attempt
                if replica_id not in self._replicas or who in self._followed:
                    continue
                if has_output := self._has_output(who):
                    self._open.add(who)
                    self._background.start(lambda who=who: self._follow(who))  # type: ignore[misc]
                if has_output or attempt < attempts[-1]:
                    self._followed.add(who)

    def _has_output(self, who: tuple[int, int]) -> bool:
        return self._reader.attempts.handle(*who) is not None or self._reader.attempts.log_text(*who) is not None

    def _follow(self, who: tuple[int, int]) -> None:
        """Read the output of one attempt, and put its lines, or the error of reading them, into the queue."""
        reader = RunReader(self._reader.store, self._reader.log)  # records are kept by attempt, for one thread
        try:
            lines = log_lines(reader, *who, self._tail, self._executor, follow=True, trust_bucket=self._trust_bucket)
            for text in lines:
                self._lines.put(LogLine(*who, text))
        except (DilocoError, ExecutorError) as error:
            self._lines.put(LogLine(*who, f"(its output cannot be read: {error})"))
        finally:
            self._open.discard(who)
