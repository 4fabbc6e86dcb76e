"""Flat fp32 vectors spread over several tensors in memory, and the shards in which they are stored.

The tensors are never concatenated: arithmetic goes through views of them, in blocks that fit a core's cache.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from diloco_orchestrator.allreduce.owners import ALONE, Owners
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.spool import held

SHARD_NUMEL = 16 * 2**20  # 64 MiB of fp32
# Elements of one tensor operation in a chain of them: 512 KiB an operand, so that the chain runs in a core's cache.
BLOCK = 128 * 1024


class Vector(Protocol):
    """A flat vector that is read range by range. Its numbers may be computed when they are read."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A new tensor of elements [start, stop), of shape (stop - start,), float32, on the CPU."""
        ...


class FlatTensors:
    """Several contiguous tensors as one flat vector that shares their memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach().view(-1) for tensor in tensors if tensor.numel()]
        self._ends = list(accumulate(tensor.numel() for tensor in self.tensors))

    @property
    def numel(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rest(self, start: int) -> torch.Tensor:
        """A view from element `start` to the end of the tensor that holds it."""
        index = bisect_right(self._ends, start)
        tensor = self.tensors[index]
        return tensor[start - self._ends[index] + tensor.numel() :]

    def read(self, start: int, stop: int) -> torch.Tensor:
        out = empty(stop - start)
        for ours, theirs in aligned(out.numel(), (FlatTensors([out]), 0), (self, start)):
            ours.copy_(theirs)
        return out

    def write(self, start: int, values: torch.Tensor) -> None:
        """Copy `values`, (n,) float32 on the CPU, to elements [start, start + n)."""
        for ours, theirs in aligned(values.numel(), (self, start), (FlatTensors([values]), 0)):
            ours.copy_(theirs)


def aligned(numel: int, *parts: tuple[FlatTensors, int], longest: int = BLOCK) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of `numel` elements of several vectors side by side, each from its start: tuples of `longest` at most."""
    done = 0
    while done < numel:
        views = [vector.rest(start + done) for vector, start in parts]
        size = min(longest, numel - done, *(view.numel() for view in views))
        yield tuple(view[:size] for view in views)
        done += size


def room(numel: int, shard_numel: int, what: str, owners: Owners = ALONE, fragment: int = 0) -> FlatTensors:
    """A vector of `numel` zeros in tensors of `shard_numel` elements, within the memory budget (`allreduce.spool`).

    `what`: names it in errors. `owners`: the ranks that hold its shards, which are of this fragment of the model;
    shards of other ranks have no numbers.
    """
    return FlatTensors(
        [
            held(stop - start, what) if owners.owns(fragment, index) else torch.empty(stop - start, device="meta")
            for index, (start, stop) in enumerate(shard_ranges(numel, shard_numel))
        ]
    )


def copied(vector: Vector, shard_numel: int = SHARD_NUMEL) -> FlatTensors:
    """A copy of a vector, in tensors of `shard_numel` elements within the memory budget (`allreduce.spool`)."""
    copy = room(vector.numel, shard_numel, "a copy of the pseudo-gradient")
    for start, stop in shard_ranges(vector.numel, shard_numel):
        copy.write(start, vector.read(start, stop))
    return copy


def norm_of(vector: Vector, owners: Owners = ALONE, fragment: int = 0, shard_numel: int = SHARD_NUMEL) -> float:
    """The Euclidean norm of all elements of a vector, to about six digits.

    `owners`: the ranks that hold its shards of `shard_numel` elements, which are of this fragment of the model.
    """
    squares = owners.each(_squares, owners, vector, fragment, shard_numel)
    return math.sqrt(math.fsum(each for of_rank in squares for each in of_rank))


def _squares(owners: Owners, vector: Vector, fragment: int, shard_numel: int) -> list[float]:
    blocks = _own_blocks(owners, vector, fragment, shard_numel)
    return [float(torch.linalg.vector_norm(block)) ** 2 for block in blocks]


def has_nonzero(vector: Vector, owners: Owners = ALONE, fragment: int = 0, shard_numel: int = SHARD_NUMEL) -> bool:
    """Whether any element of a vector is not zero. Each rank stops reading at the first block that has one.

    `owners`: the ranks that hold its shards of `shard_numel` elements, which are of this fragment of the model.
    """
    return any(owners.each(_has_nonzero, owners, vector, fragment, shard_numel))


def _has_nonzero(owners: Owners, vector: Vector, fragment: int, shard_numel: int) -> bool:
    return any(bool(block.count_nonzero()) for block in _own_blocks(owners, vector, fragment, shard_numel))


def _own_blocks(owners: Owners, vector: Vector, fragment: int, shard_numel: int) -> Iterator[torch.Tensor]:
    """The elements of a vector in this process's shards, a block at a time."""
    for _, start, stop in owners.shards(fragment, vector.numel, shard_numel):
        yield from (vector.read(first, min(first + BLOCK, stop)) for first in range(start, stop, BLOCK))


def empty(numel: int) -> torch.Tensor:
    """A flat uninitialised float32 tensor on the CPU for short use; `allreduce.spool.held` is for longer use."""
    return torch.empty(numel, dtype=torch.float32, device="cpu")
