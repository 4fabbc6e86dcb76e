"""Aggregates of a round's contributions into one pseudo-gradient: means (weighted, agreeing, trimmed, …) and median.

Each works block by block, in float32 on the CPU, with the same bits on every machine. `protocol.rounds` and
`protocol.weights` decide which contributions take part, and with which weights.
"""

import functools
from collections.abc import Iterator, Sequence

import torch

from diloco_orchestrator.allreduce.agreement import AgreeingMean
from diloco_orchestrator.allreduce.mean import (
    Aggregate,
    EncodedAverage,
    LeftOut,
    Part,
    ShardBlocks,
    WeightedMean,
    WeightedParts,
    side_by_side,
)
from diloco_orchestrator.allreduce.vectors import BLOCK, empty
from diloco_orchestrator.codecs.fine import within
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.errors import ConfigError, unknown_name

AGGREGATES = ("mean", "agreeing_mean", "trimmed_mean", "median", "contributors_mean")
_SHORTEST = 4096  # elements of a piece that is sorted at once, at the least; all pieces together fit a core's cache


def aggregate_of(how: str, parts: Sequence[Part], lengths: Sequence[int], codec: str | None = None) -> Aggregate:
    """The aggregate named `how`, one of `AGGREGATES`, of the contributions `parts` with a weight above zero.

    `lengths`: elements of each shard. `codec`: name of the codec in which the aggregate is encoded and decoded again,
    as a commit records it; None: it is not encoded. Raises `ConfigError` for another name, `PayloadCorrupt` for a
    payload of another length or cut into other shards.
    """
    if how not in AGGREGATES:
        raise ConfigError(unknown_name("aggregate", how, AGGREGATES))
    found = _exactly(how, [part for part in parts if part.weight], lengths)
    return found if codec is None else EncodedAverage(found, codec)


def _exactly(how: str, parts: Sequence[Part], lengths: Sequence[int]) -> Aggregate:
    if how == "mean":
        return WeightedMean(parts, lengths)
    if how == "agreeing_mean":
        return AgreeingMean(parts, lengths)
    if how == "contributors_mean":
        return ContributorsMean(parts, lengths)
    return TrimmedMean(parts, lengths, trimmed(how, len(parts)))


def trimmed(how: str, count: int) -> int:
    """Number of values that an aggregate leaves out at each end when it averages `count` values of a coordinate.

    `how`: its name. A median keeps the middle one or two; a trimmed mean leaves out a quarter, one of three, none of
    two; a mean none.
    """
    if how == "mean" or count < 3:
        return 0
    return (count - 1) // 2 if how == "median" else max(1, count // 4)


class ContributorsMean:
    """The weighted mean of each element over the contributions that sent it, one shard at a time (arXiv 2508.15706).

    A sparse codec sends some elements of each chunk; one that decodes to 0 counts as not sent. All other codecs send
    every element, so that this is their weighted mean. An element that nobody sent is 0.
    """

    left_out: Sequence[LeftOut] = ()

    def __init__(self, parts: Sequence[Part], lengths: Sequence[int]) -> None:
        self._parts = WeightedParts(parts, lengths)

    def shard(self, index: int) -> ShardBlocks:
        """The mean of one shard, computed lazily. Raises `PayloadCorrupt` for other bytes than the manifest's."""
        return functools.partial(self._blocks, self._parts.shard(index))

    def _blocks(self, shards: Sequence[Encoded], start: int, stop: int) -> Iterator[torch.Tensor]:
        buffers = empty(min(BLOCK, stop - start)), empty(min(BLOCK, stop - start))
        sparse = [shard.sparse for shard in shards]
        for first, blocks in zip(range(start, stop, BLOCK), side_by_side(shards, start, stop, BLOCK), strict=True):
            numel = blocks[0].numel()
            summed, total = (buffer[:numel].zero_() for buffer in buffers)
            for position, block in enumerate(blocks):
                summed.add_(self._parts.weighted(position, block))
                sent = torch.ones(numel, dtype=torch.float32, device="cpu")
                for low, high in within(sparse[position], first, first + numel):
                    sent[low:high] = block[low:high] != 0
                total.add_(self._parts.weighted(position, sent))
            yield summed.div_(total.masked_fill_(total == 0, 1.0))


class TrimmedMean:
    """The mean of each coordinate without its `trim` lowest and `trim` highest values, one shard at a time.

    Weights do not count, except of clipped parts: values are multiplied by the part's weight over the largest weight,
    which is 1 unless the part was clipped. Raises `PayloadCorrupt` for a payload of another length or cut into other
    shards.
    """

    left_out: Sequence[LeftOut] = ()  # of every part some values are averaged

    def __init__(self, parts: Sequence[Part], lengths: Sequence[int], trim: int) -> None:
        self._parts = WeightedParts(parts, lengths)
        self._kept = slice(trim, len(parts) - trim)
        self._count = torch.tensor(len(parts) - 2 * trim, dtype=torch.float32, device="cpu")
        self._piece = max(_SHORTEST, BLOCK // len(parts) // _SHORTEST * _SHORTEST)

    def shard(self, index: int) -> ShardBlocks:
        """The trimmed mean of one shard, computed lazily. Values of a coordinate are summed from the lowest up."""
        return functools.partial(self._blocks, self._parts.shard(index))

    def _blocks(self, shards: Sequence[Encoded], start: int, stop: int) -> Iterator[torch.Tensor]:
        buffer = empty(min(BLOCK, stop - start))
        for first in range(start, stop, BLOCK):
            last = min(first + BLOCK, stop)
            whole = buffer[: last - first]
            together = side_by_side(shards, first, last, self._piece)
            for target, pieces in zip(whole.split(self._piece), together, strict=True):
                # Adding zero makes -0.0 to 0.0: then equal values have equal bits, in whatever order they are sorted.
                rows = [self._parts.weighted(position, piece) + 0.0 for position, piece in enumerate(pieces)]
                lowest, *others = sorted_rows(rows)[self._kept]
                target.copy_(lowest)
                for row in others:
                    target.add_(row)
                target.div_(self._count)
            yield whole


def sorted_rows(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of equal shape, sorted coordinate by coordinate: the first one holds the lowest values.

    The given tensors are overwritten. A network of minima and maxima of whole rows, which takes a tenth of the time of
    `torch.sort` across rows.
    """
    ordered, spare = list(rows), torch.empty_like(rows[0])
    for low, high in _network(len(ordered)):
        torch.minimum(ordered[low], ordered[high], out=spare)
        torch.maximum(ordered[low], ordered[high], out=ordered[high])
        ordered[low], spare = spare, ordered[low]
    return ordered


@functools.cache
def _network(count: int) -> tuple[tuple[int, int], ...]:
    """The pairs that a sorting network compares: Batcher's merge exchange, Knuth vol. 3, algorithm 5.2.2M."""
    pairs = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top if count > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            q, r, d = q >> 1, p, q - p
        p >>= 1
    return tuple(pairs)
