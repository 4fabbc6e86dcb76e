"""Whose word the digests of container images in run.json are, before a supervisor has replicas launched with them."""

from dataclasses import replace

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.contract import LaunchRequest, ServerlessExecutor
from diloco_orchestrator.run_log.launched_here import why_not_launched_here
from diloco_orchestrator.run_log.run_log import RunLog


def check_images(run_log: RunLog, executor: ServerlessExecutor) -> None:
    """Raise `ConfigError` if the executor would use a digest of run.json that is not this user's own word.

    It is this user's if this user launched the run on this machine, with run.json as it is now.
    """
    run = run_log.run
    if not run.images or not (why := why_not_launched_here(run_log)):
        return
    requests = [LaunchRequest(run.run_id, each, 1, [], images=run.images) for each in range(run.config.replicas)]
    try:
        used = any(executor.plan(request) != executor.plan(replace(request, images={})) for request in requests)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if used:
        raise ConfigError(
            f"{run_log.store.url} gives digests for the images {', '.join(sorted(run.images))}, and {why}: whoever may "
            "write to the bucket chose what replicas would run in. Name the image by digest yourself "
            "(image='NAME@sha256:…', --image), or pass trust_bucket=True (--trust-bucket) if you trust all who may "
            "write there."
        )
