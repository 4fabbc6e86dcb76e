"""The weighted mean of contributions, shard by shard, with the same bits on every machine.

The mean is computed in fp32 on the CPU, in `replica_id` order, with separate multiply and add, because a fused
multiply-add, which not every CPU has, rounds differently. Elements are independent, so blocks and threads do not change
a bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.spool import budget
from diloco_orchestrator.allreduce.threads import in_threads, ranges
from diloco_orchestrator.allreduce.vectors import BLOCK, empty
from diloco_orchestrator.codecs.table import Encoded, get_codec
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol.records import Payload

# One shard of an average: (start, stop) -> its elements [start, stop) as flat fp32 blocks of at most `BLOCK` elements,
# in order, each of which is overwritten by the next one. Several threads may ask for ranges at the same time.
ShardBlocks = Callable[[int, int], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """One replica's contribution to an average: its weight, its payload, and a function that reads its shards."""

    replica_id: int
    weight: float
    payload: Payload
    read: Callable[[int], bytes | memoryview]  # the verified bytes of the shard with this index


@dataclass(frozen=True)
class LeftOut:
    """A contribution that an aggregate left out of the average of one shard, and how far it pointed from the others."""

    replica_id: int
    shard: int
    agreement: float  # its median cosine to the others
    usual: float  # the median of that over all parts


class Aggregate(Protocol):
    """One pseudo-gradient computed shard by shard from several replicas' contributions, each given as a `Part`."""

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """The contributions left out of the shards computed so far, such as those that agree least with the others."""
        ...

    def shard(self, index: int) -> ShardBlocks:
        """The aggregate of one shard, for which every contribution is read once. Its elements are computed lazily.

        Raises `PayloadCorrupt` for bytes that are not the shard in the manifest, and what a part's `read` raises.
        """
        ...


class WeightedParts:
    """The contributions to one average in `replica_id` order, decoded a block at a time.

    Raises `PayloadCorrupt` for a payload of another length or cut into other shards.

    Args:
        lengths: elements of each shard.
    """

    def __init__(self, parts: Sequence[Part], lengths: Sequence[int]) -> None:
        self._parts = sorted(parts, key=lambda part: part.replica_id)
        self.lengths = lengths
        # Divided by the largest weight: equal weights become exactly 1, and token counts beyond 2**24 keep their ratio.
        largest = max(part.weight for part in parts)
        self.weights = [torch.tensor(part.weight / largest, dtype=torch.float32, device="cpu") for part in self._parts]
        self._ones = [bool(weight == 1.0) for weight in self.weights]
        for part in self._parts:
            check_cut(lengths, part)

    def __len__(self) -> int:
        return len(self._parts)

    def shard(self, index: int) -> list[Encoded]:
        """One shard of every contribution. Raises `PayloadCorrupt` for other bytes than the manifest's."""
        numel = self.lengths[index]
        return [Encoded(part.read(index), part.payload.codec, numel) for part in self._parts]

    def weighted(self, position: int, block: torch.Tensor) -> torch.Tensor:
        """`block`, elements of contribution number `position`, times its weight: float32, read-only."""
        values = block.to(torch.float32)
        return values if self._ones[position] else values * self.weights[position]


class WeightedMean:
    """The weighted mean sum(w_i x_i) / sum(w_i) over all contributions, one shard at a time."""

    left_out: Sequence[LeftOut] = ()

    def __init__(self, parts: Sequence[Part], lengths: Sequence[int]) -> None:
        self._parts = WeightedParts(parts, lengths)
        self._total = torch.zeros((), dtype=torch.float32, device="cpu")
        for weight in self._parts.weights:
            self._total = self._total + weight

    def shard(self, index: int) -> ShardBlocks:
        """The mean of one shard, in cache-sized blocks. Raises `PayloadCorrupt` for other bytes than the manifest's."""
        return partial(self._blocks, self._parts.shard(index))

    def _blocks(self, shards: Sequence[Encoded], start: int, stop: int) -> Iterator[torch.Tensor]:
        by_block = self._sums_of_encoded if all(shard.adds for shard in shards) else self._sums
        return (summed.div_(self._total) for summed in by_block(shards, start, stop, empty(min(BLOCK, stop - start))))

    def _sums(self, shards: Sequence[Encoded], start: int, stop: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        for blocks in side_by_side(shards, start, stop, BLOCK):
            summed = buffer[: blocks[0].numel()]
            for position, block in enumerate(blocks):
                weighted = self._parts.weighted(position, block)
                if position:
                    summed.add_(weighted)
                else:
                    torch.add(weighted, 0.0, out=summed)  # not a copy: a sum that begins at zero has no -0.0
            yield summed

    def _sums_of_encoded(
        self, shards: Sequence[Encoded], start: int, stop: int, buffer: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """The same sums, to which each block is added as it is decoded. `start`: where a group begins."""
        for first in range(start, stop, BLOCK):
            summed = buffer[: stop - first].zero_()
            for shard, weight in zip(shards, self._parts.weights, strict=True):
                shard.add_to(summed, first, float(weight))
            yield summed


def mean_into(shards: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
    """Write the weighted mean of all contributions into `shards`, flat tensors of the payload shards' lengths.

    Raises `PayloadCorrupt` for bytes that are not the shard in the manifest, and for other lengths or shards.
    """
    mean = WeightedMean(parts, [shard.numel() for shard in shards])
    for index, shard in enumerate(shards):
        write_blocks(mean.shard(index), shard)


def write_blocks(blocks: ShardBlocks, target: torch.Tensor) -> None:
    """Compute one shard of an average, several ranges of it at a time, into `target`, a flat tensor of its length."""
    in_threads([partial(_copy, blocks, target, *each) for each in ranges(target.numel())])


def encoded_shard(blocks: ShardBlocks, numel: int, codec: str) -> memoryview:
    """One shard of an average, of `numel` elements, computed and encoded in threads.

    The encoding has a header, as that of a payload shard in `codec`.
    """
    found = get_codec(codec)
    header = found.header(numel)
    data = memoryview(bytearray(found.encoded_size(numel)))
    data[: len(header)] = header
    body = data[len(header) :]

    def encode(start: int, stop: int) -> None:
        place = found.body_size(start)
        for block in blocks(start, stop):
            packed = found.encode_block(block).data
            body[place : place + len(packed)] = packed
            place += len(packed)

    in_threads([partial(encode, *each) for each in ranges(numel)])
    return data


class EncodedShards:
    """An aggregate of which each shard was computed before, and is kept in encoded form until it is used.

    It holds the shards of one process within the memory budget (`allreduce.spool`): they are decoded a block at a time,
    in a core's cache.

    Args:
        lengths: elements of each shard.
        codec: name of the codec in which all are encoded.
    """

    left_out: Sequence[LeftOut] = ()

    def __init__(self, lengths: Sequence[int], codec: str) -> None:
        self.lengths, self.codec = lengths, codec
        self._kept = PayloadCache(memory_bytes=budget().limit)

    def put(self, index: int, data: bytes | memoryview) -> None:
        """Keep the encoding of shard `index`, unless one is kept.

        Raises `PayloadCorrupt` for bytes that are no encoding of its elements, `SpoolFailed` if the disk is full.
        """
        Encoded(data, self.codec, self.lengths[index])
        self._kept.put((f"average {index}", ""), data)

    def shard(self, index: int) -> ShardBlocks:
        """One shard that was put here, decoded lazily."""
        data = self._kept.get((f"average {index}", ""))
        assert data is not None, "it was put here"
        return partial(self._blocks, Encoded(data, self.codec, self.lengths[index]))

    def _blocks(self, encoded: Encoded, start: int, stop: int) -> Iterator[torch.Tensor]:
        return (block.to(torch.float32) for block in encoded.blocks(start, stop, BLOCK))


class EncodedAverage:
    """An aggregate of contributions, shard by shard, with its elements encoded in a codec and decoded again.

    So it has the bits of an average that another replica has encoded and sent. Ranges must begin at a multiple of the
    codec's group, the elements that share bytes.
    """

    def __init__(self, aggregate: Aggregate, codec: str) -> None:
        self._aggregate, self._codec = aggregate, get_codec(codec)

    @property
    def left_out(self) -> Sequence[LeftOut]:
        return self._aggregate.left_out

    def shard(self, index: int) -> ShardBlocks:
        """One shard, computed lazily. Raises what the `shard` of the aggregate itself raises."""
        return partial(self._blocks, self._aggregate.shard(index))

    def _blocks(self, blocks: ShardBlocks, start: int, stop: int) -> Iterator[torch.Tensor]:
        for block in blocks(start, stop):
            yield self._codec.encode_block(block).values


def _copy(blocks: ShardBlocks, target: torch.Tensor, start: int, stop: int) -> None:
    for piece, block in zip(target[start:stop].split(BLOCK), blocks(start, stop), strict=True):
        piece.copy_(block)


def side_by_side(shards: Sequence[Encoded], start: int, stop: int, longest: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Elements [start, stop) of several vectors as tuples of blocks of at most `longest` elements, one per vector."""
    return zip(*(shard.blocks(start, stop, longest) for shard in shards), strict=True)


def check_cut(lengths: Sequence[int], part: Part) -> None:
    """Raise `PayloadCorrupt` unless the payload of `part`, one replica's contribution, has shards of these lengths."""
    cut = [stop - start for start, stop in shard_ranges(part.payload.numel, part.payload.shard_numel)]
    if cut != list(lengths) or len(part.payload.shards) != len(lengths):
        raise PayloadCorrupt(
            f"replica {part.replica_id}'s payload of {part.payload.numel} elements, {part.payload.shard_numel} per "
            f"shard, is not cut like the average of {sum(lengths)} elements."
        )
