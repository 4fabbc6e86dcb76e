"""What a replica printed: from the bucket once its attempt ended, from its executor as long as it runs."""

from collections.abc import Iterator

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.status import RunReader
from diloco_orchestrator.store.commit_log import read_optional
from executors.base import ReplicaHandle, ServerlessExecutor


def log_lines(
    reader: RunReader,
    replica_id: int,
    attempt: int | None = None,
    tail: int | None = None,
    executor: ServerlessExecutor | None = None,
) -> Iterator[str]:
    """Lines of an attempt, by default the newest. `executor`: by default that of local processes.

    Raises `ConfigError` for an attempt that does not exist, naming those that do.
    """
    known = reader.attempts(replica_id)
    if not known or (attempt is not None and attempt not in known):
        there = f"its attempts are {', '.join(map(str, known))}" if known else "it was never launched"
        raise ConfigError(f"replica {replica_id}, attempt {attempt or 1} has no log: {there}.")
    number = attempt or known[-1]
    kept = read_optional(reader.store, keys.log_text(replica_id, number))
    if kept is not None:
        lines = kept.decode(errors="replace").splitlines()
        return iter(lines if tail is None else lines[max(0, len(lines) - tail) :])
    record = reader.handle(replica_id, number)
    if record is None:
        return iter(())
    handle = ReplicaHandle.from_json(record.handle)
    return (executor or _local(handle)).logs(handle, tail=tail)


def _local(handle: ReplicaHandle) -> ServerlessExecutor:
    from executors.local_process import LocalProcessExecutor

    if handle.executor != LocalProcessExecutor.name:
        raise ConfigError(f"the attempt runs on executor {handle.executor!r}, whose logs this command cannot read yet.")
    return LocalProcessExecutor.of(handle)
