"""Reads the output of an attempt: from the bucket once the attempt has ended, from its executor while it runs."""

from collections.abc import Iterator

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.contract import ReplicaHandle, ServerlessExecutor
from diloco_orchestrator.inspection.executor_of_run import executor_of_run
from diloco_orchestrator.inspection.status import RunReader


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

    Empty for an attempt without handle. Raises `ConfigError` for an attempt that does not exist, naming those that do,
    and for a running one whose executor cannot be made again from run.json, or may not: see `trust_bucket`.

    Args:
        tail: number of last lines to return; None for all.
        executor: used for an attempt that runs; by default one made again from run.json.
        follow: until the end of an attempt that runs.
        trust_bucket: make the executor that run.json names although this user did not launch the run here.
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
    executor = executor or executor_of_run(reader, "the output of an attempt that runs", trust_bucket)
    return executor.logs(handle, follow=follow, tail=tail)
