"""Flat fp32 vectors spread over several tensors in memory, and the shards in which they are stored.

The tensors are never concatenated: arithmetic goes through views of them, in blocks that fit a core's cache.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch

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
        self._tensors = [tensor.detach().view(-1) for tensor in tensors if tensor.numel()]
        self._ends = list(accumulate(tensor.numel() for tensor in self._tensors))

    @property
    def numel(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rest(self, start: int) -> torch.Tensor:
        """A view from element `start` to the end of the tensor that holds it."""
        index = bisect_right(self._ends, start)
        tensor = self._tensors[index]
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


def room(numel: int, shard_numel: int, what: str) -> FlatTensors:
    """Zeros, in tensors of `shard_numel` elements within the memory budget (`allreduce.spool`). `what`: for errors."""
    return FlatTensors([held(stop - start, what) for start, stop in shard_ranges(numel, shard_numel)])


def copied(vector: Vector, shard_numel: int = SHARD_NUMEL) -> FlatTensors:
    """A copy of a vector, in tensors of `shard_numel` elements within the memory budget (`allreduce.spool`)."""
    copy = room(vector.numel, shard_numel, "a copy of the pseudo-gradient")
    for start, stop in shard_ranges(vector.numel, shard_numel):
        copy.write(start, vector.read(start, stop))
    return copy


def norm_of(vector: Vector) -> float:
    """The Euclidean norm of all elements, to about six digits."""
    blocks = (vector.read(start, stop) for start, stop in shard_ranges(vector.numel, BLOCK))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(block)) ** 2 for block in blocks))


def has_nonzero(vector: Vector) -> bool:
    """Whether any element is not zero. Stops reading at the first block that has one."""
    return any(bool(vector.read(start, stop).count_nonzero()) for start, stop in shard_ranges(vector.numel, BLOCK))


def empty(numel: int) -> torch.Tensor:
    """A flat uninitialised float32 tensor on the CPU for short use; `allreduce.spool.held` is for longer use."""
    return torch.empty(numel, dtype=torch.float32, device="cpu")
