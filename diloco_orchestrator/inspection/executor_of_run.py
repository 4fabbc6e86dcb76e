"""Makes the executor of a run again: from run.json or a local handle, for who may trust them."""

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.contract import ReplicaHandle, ServerlessExecutor
from diloco_orchestrator.executors.registry import recreate
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.run_log.launched_here import check_launched_here


def executor_of_run(reader: RunReader, need: str, trust_bucket: bool) -> ServerlessExecutor:
    """The executor that launched the run, with this process's credentials.

    Raises `ConfigError` if it is a class of the user's, and for a run that this user did not launch on this machine,
    unless `trust_bucket` is set. `need`: what the executor is for, opens the message.
    """
    if not trust_bucket:
        check_launched_here(reader.log, need)
    spec = reader.run.executor
    if spec is not None and spec.get("name") != "local":
        return recreate(spec)
    from diloco_orchestrator.executors.local_process import LocalProcessExecutor

    for replica_id in range(reader.run.config.replicas):
        for attempt in reversed(reader.attempts.numbers(replica_id)):
            intent, handle = reader.attempts.intent(replica_id, attempt), reader.attempts.handle(replica_id, attempt)
            if intent is not None and intent.executor != LocalProcessExecutor.name:
                raise ConfigError(f"the run was launched with executor {intent.executor!r}: attach(url, executor=…).")
            if handle is not None:
                return LocalProcessExecutor.of(ReplicaHandle.from_json(handle.handle))
    return LocalProcessExecutor()
