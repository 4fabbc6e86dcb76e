"""A task in which three ranks, real processes over gloo, move tensors in turn, and one of them is missing."""

import os
import signal
import threading
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from patience import PATIENCE_S

from diloco_orchestrator.replica.training.ranks import Ranks

RANKS, TIMEOUT_S = 3, 2.0


def error_in_rank_0(folder: Path, what: str, who: int) -> str:
    """The error, as words, that rank 0 gets from a task in which rank `who` does `what`, instead of sending.

    `what`: "raise", "sleep", or the name of a signal that the rank sends itself.
    """
    context = get_context("spawn")
    ranks = [context.Process(target=_rank, args=(str(folder), rank, what, who)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    ranks[0].join(PATIENCE_S)
    for each in ranks:
        each.kill()
        each.join()
    return (folder / "error").read_text()


def _rank(folder: str, rank: int, what: str, who: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/meeting", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    ranks = Ranks.joined(rank, "127.0.0.1", TIMEOUT_S)
    if rank == 0:
        try:
            ranks.owners.each(_in_turn, ranks.owners, what, who)
        except Exception as error:
            Path(folder, "error").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)
    threading.Event().wait()


def _in_turn(owners: Any, what: str, who: int) -> None:
    """Each rank receives from the next, once that has received itself; the last one only sends."""
    if owners.rank == who:
        if what == "raise":
            raise MemoryError("planted")
        if what == "sleep":
            threading.Event().wait()
        os.kill(os.getpid(), signal.Signals[what])
    data = torch.zeros(8, dtype=torch.uint8)
    if owners.rank < owners.ranks - 1:
        owners.receive(data, owners.rank + 1)
    if owners.rank:
        owners.send(data, owners.rank - 1)
