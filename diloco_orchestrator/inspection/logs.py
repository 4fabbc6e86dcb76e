"""Reads the output of an attempt: from the bucket once the attempt has ended, from its executor while it runs."""

from collections.abc import Iterator

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.contract import ReplicaHandle, ServerlessExecutor
from diloco_orchestrator.executors.registry import recreate
from diloco_orchestrator.inspection.status import RunReader


def log_lines(
    reader: RunReader,
    replica_id: int,
    attempt: int | None = None,
    tail: int | None = None,
    executor: ServerlessExecutor | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """The output lines of a replica's attempt, by default of its newest.

    Empty for an attempt without handle. Raises `ConfigError` for an attempt that does not exist, naming those that do,
    and for a running one whose executor cannot be made again from run.json.

    Args:
        tail: number of last lines to return; None for all.
        executor: used for an attempt that runs; by default one made again from run.json.
        follow: until the end of an attempt that runs.
    """
    known = reader.attempts.numbers(replica_id)
    if not known or (attempt is not None and attempt not in known):
        there = f"its attempts are {', '.join(map(str, known))}" if known else "it was never launched"
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
    return (executor or _executor_of(reader, handle)).logs(handle, follow=follow, tail=tail)


def _executor_of(reader: RunReader, handle: ReplicaHandle) -> ServerlessExecutor:
    """An executor that can use `handle`, made again from the handle or run.json. Raises `ConfigError` if impossible."""
    if handle.executor == "local":
        from diloco_orchestrator.executors.local_process import LocalProcessExecutor

        return LocalProcessExecutor.of(handle)
    if reader.run.executor is None:
        raise ConfigError(
            f"the attempt runs on executor {handle.executor!r}, which only its owner can make: attach(url, executor=…)"
            ".logs(…). Once it has ended, its log is in the bucket."
        )
    return recreate(reader.run.executor)
