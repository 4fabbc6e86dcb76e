"""`launch_replicas` and `collect` for every executor: call a function in n processes, collect the returned values.

No coordinator and no bucket: arguments travel in the environment, the returned value comes back in the exit line. The
program in each process is `process_bootstrap`.
"""

import base64
import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from diloco_orchestrator.executors import process_bootstrap
from diloco_orchestrator.executors.clock import ExecutorClock
from diloco_orchestrator.executors.contract import (
    CollectTimeout,
    ExecutorError,
    LaunchError,
    LaunchRequest,
    ReplicaFailed,
    ReplicaHandle,
    ReplicaResult,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)
from diloco_orchestrator.executors.names import check_entrypoint, hint
from diloco_orchestrator.executors.process_bootstrap import ENV_ARGS, ENV_CODE, ENV_ENTRYPOINT
from diloco_orchestrator.executors.process_contract import ENV_RANK, ENV_WORLD_SIZE, parse_exit_line
from diloco_orchestrator.executors.program_text import program_text

_CODE_BYTES = 96 * 1024  # Linux takes 128 KiB in one environment variable
_LAUNCH_THREADS = 32
_TAIL_LINES = 30
_POLL_S = (0.02, 1.0)  # first and longest pause while collecting


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown option of `launch_replicas`, naming the nearest known one."""
    known = list(known)
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r} of launch_replicas: {hint(name, known)}")


def function_requests(
    run_id: str,
    n_replicas: int,
    entrypoint: str,
    entrypoint_args: Mapping[str, Any],
    env: Mapping[str, str],
    code: str | None = None,
) -> list[LaunchRequest]:
    """The requests that call `entrypoint(**entrypoint_args)` in `n_replicas` processes, as replicas 0 to n-1, attempt
    1.

    The arguments travel as JSON in the environment, as do the Python files of the small folder `code`. Raises
    ValueError for an entrypoint of another form, arguments that JSON cannot hold, or a folder that is too large.
    """
    if n_replicas < 1:
        raise ValueError(f"n_replicas={n_replicas}: launch at least one.")
    check_entrypoint(entrypoint)
    try:
        args = json.dumps(dict(entrypoint_args))
    except (TypeError, ValueError) as error:
        raise ValueError(f"entrypoint_args are not JSON: {error}. Pass what JSON can hold.") from None
    shared = {**env, ENV_ENTRYPOINT: entrypoint, ENV_ARGS: args, ENV_WORLD_SIZE: str(n_replicas)}
    if code is not None:
        shared[ENV_CODE] = packed_folder(Path(code))
    program = program_text(process_bootstrap)  # as text, because the image may not have this package
    return [
        LaunchRequest(
            run_id=run_id,
            replica_id=rank,
            attempt=1,
            command=["python", "-P", "-u", "-c", program],
            env={**shared, ENV_RANK: str(rank)},
        )
        for rank in range(n_replicas)
    ]


def packed_folder(folder: Path) -> str:
    """The Python files of a folder as a zip in base64. Raises ValueError if it does not fit into the environment."""
    if not folder.is_dir():
        raise ValueError(f"code={str(folder)!r} is not a folder. Name the one that holds the entrypoint's package.")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.py")):
            archive.writestr(path.relative_to(folder).as_posix(), path.read_bytes())
    text = base64.b64encode(packed.getvalue()).decode()
    if len(text) > _CODE_BYTES:
        raise ValueError(
            f"the Python files of {folder} are {len(text)} bytes packed; {_CODE_BYTES} fit into an environment. "
            "Name a smaller folder, or put the code into the image."
        )
    return text


def launch_all(executor: ServerlessExecutor, requests: Sequence[LaunchRequest]) -> list[ReplicaHandle]:
    """Launch all requests concurrently, because a provider may take minutes for each.

    Raises `LaunchError` if some could not be launched, after every launch call has returned.
    """
    launched, failed = [], {}
    with ThreadPoolExecutor(max_workers=min(len(requests), _LAUNCH_THREADS)) as threads:
        futures = [threads.submit(executor.launch, request) for request in requests]
    for request, future in zip(requests, futures, strict=True):
        error = future.exception()
        if error is None:
            launched.append(future.result())
        elif isinstance(error, (ExecutorError, OSError)):
            failed[request.replica_id] = str(error)
        else:
            raise error
    if failed:
        words = "; ".join(f"replica {replica_id}: {reason}" for replica_id, reason in failed.items())
        raise LaunchError(f"{len(failed)} of {len(requests)} replicas were not launched: {words}", launched, failed)
    return launched


def collect_by_polling(
    executor: ServerlessExecutor,
    handles: Sequence[ReplicaHandle],
    timeout: float | None,
    check: bool,
    clock: ExecutorClock,
) -> list[ReplicaResult]:
    """`ServerlessExecutor.collect` for any executor, by `poll_many` and `logs` alone.

    `timeout`: seconds; None: no limit. `check`: raise `ReplicaFailed` if a replica did not succeed.
    """
    deadline = None if timeout is None else clock.now() + timeout
    pause = _POLL_S[0]
    while True:
        statuses = executor.poll_many(handles)
        running = [h.replica_id for h, s in zip(handles, statuses, strict=True) if not s.state.ended]
        if not running:
            break
        if deadline is not None and clock.now() >= deadline:
            raise CollectTimeout(f"replicas {running} still run after {timeout:g} s; nothing was cancelled.", running)
        clock.sleep(pause)
        pause = min(1.5 * pause, _POLL_S[1])
    results = [_result(executor, handle, status) for handle, status in zip(handles, statuses, strict=True)]
    failed = [r for r in results if r.status.state is not ReplicaState.SUCCEEDED]
    if check and failed:
        raise ReplicaFailed("\n\n".join(_failure_text(result) for result in failed), results)
    return results


def _result(executor: ServerlessExecutor, handle: ReplicaHandle, status: ReplicaStatus) -> ReplicaResult:
    lines = list(executor.logs(handle, tail=_TAIL_LINES))
    exit_fields = parse_exit_line(lines) or {}
    if status.state is ReplicaState.SUCCEEDED:
        return ReplicaResult(handle, status, value=exit_fields.get("value"))
    error = exit_fields.get("traceback") or exit_fields.get("error") or "\n".join(lines)
    return ReplicaResult(handle, status, error=str(error))


def _failure_text(result: ReplicaResult) -> str:
    status = result.status
    how = f"{status.state}" + (f" ({status.message})" if status.message else "")
    return f"replica {result.handle.replica_id}, attempt {result.handle.attempt}: {how}\n{result.error}".rstrip()
