"""What tests do in processes of their own; importable there by name, and light to import."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from executors import LaunchRequest, LocalProcessExecutor
from executors.attempt_folder import AttemptFolder

WAIT_FOR_EVER = "import threading; print('ready', flush=True); threading.Event().wait()"


def in_processes(call: Any, *arguments: Any) -> list[Any]:
    """`call` once per tuple of arguments, all at once, each in a fresh process; a process that dies is an error."""
    with ProcessPoolExecutor(len(arguments), mp_context=get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(call, *each) for each in arguments]]


def create(folder: Path, key: str, body: bytes) -> bool:
    from diloco_orchestrator.store.obstore_engine import open_local

    return open_local(folder).create(key, body)


def reduce_once(uri: str, rank: int, world_size: int) -> bytes:
    import torch

    from diloco_orchestrator import ObjectStoreAllReduce

    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    mean: torch.Tensor = ObjectStoreAllReduce(uri, rank, world_size).allreduce(tensor, 0)
    return mean.numpy().tobytes()


def request(code: str, **fields: Any) -> LaunchRequest:
    return LaunchRequest(
        **{"run_id": "run", "replica_id": 0, "attempt": 1, "command": ["python", "-c", code], **fields}
    )


def launch_and_die(directory: str, marker: str, code: str = WAIT_FOR_EVER) -> None:
    """A launcher that dies between the start of the process and the handle."""
    AttemptFolder.write_handle = lambda *_: os._exit(9)  # type: ignore[method-assign]
    LocalProcessExecutor(directory).launch(request(f"open({marker!r}, 'a').write('x'); {code}"))
