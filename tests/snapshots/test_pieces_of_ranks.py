"""Frozen tensors that no rank of a replica has whole, read by one rank part by part."""

import queue
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.replica.training.exchange import Split, exchange_plan, held_ranges
from diloco_orchestrator.snapshots.pieces_of_ranks import PiecesOfRanks
from diloco_orchestrator.snapshots.tensor_file import memory_of

RANKS = 3


class Threads(Owners):
    """One of several ranks, which are threads. `most`: the largest message so far, in bytes."""

    ranks, most = RANKS, 0

    def __init__(self, rank: int, lines: dict[tuple[int, int], "queue.Queue[torch.Tensor]"]) -> None:
        self.rank, self._lines = rank, lines

    def send(self, data: torch.Tensor, to: int) -> None:
        Threads.most = max(Threads.most, len(data))
        self._lines[self.rank, to].put(data.clone())

    def receive(self, data: torch.Tensor, source: int) -> None:
        data.copy_(self._lines[source, self.rank].get())


def _pieces(whole: torch.Tensor, dim: int) -> list[PiecesOfRanks]:
    """The pieces of one tensor, cut along a dimension, in each rank."""
    held = [{"w": held_ranges(whole.shape, [Split(dim, RANKS, rank)])} for rank in range(RANKS)]
    moves = exchange_plan(held, {"w": [(0, whole.numel(), 0)]}).gathered
    ranges = {"w": sorted((move.start, move.stop, move.holder, move.at) for move in moves)}
    lines = {(a, b): queue.Queue[torch.Tensor]() for a in range(RANKS) for b in range(RANKS)}
    parts = [*whole.chunk(RANKS, dim), *[whole.new_empty(0)] * RANKS][:RANKS]
    return [PiecesOfRanks(Threads(rank, lines), ranges, {"w": parts[rank]}) for rank in range(RANKS)]


def _all(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list(parts)


@pytest.mark.parametrize("reader", [0, 2])
@pytest.mark.parametrize(("shape", "dim"), [((7, 200_001), 0), ((5, 300_001), 1), ((1, 5), 0), ((0, 4), 0)])
def test_a_rank_reads_the_numbers_in_order_and_never_more_than_a_part(shape, dim, reader):
    whole = (torch.arange(shape[0] * shape[1]) % 1999).to(torch.float16).view(shape)  # no number is rounded
    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(lambda each: _all(each.parts("w", reader)), _pieces(whole, dim)))
    assert [len(each) > 0 for each in found] == [rank == reader and whole.numel() > 0 for rank in range(RANKS)]
    read = torch.cat([*found[reader], whole.new_empty(0)])
    assert torch.equal(read.view(shape), whole)
    assert all(len(part) <= 2**20 for part in found[reader]) and Threads.most <= 2 * 2**20
    assert bulk_digest(memory_of(read)) == bulk_digest(memory_of(whole))
