"""The weighted mean of contributions, shard by shard, with the same bits on every machine.

It is computed in fp32 on the CPU, in `replica_id` order, with separate multiply and add: a fused multiply-add, which
not every CPU has, rounds differently. Elements do not depend on each other, so neither blocks nor threads change a bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.vectors import BLOCK
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol import codecs
from diloco_orchestrator.protocol.records import Payload


@dataclass(frozen=True)
class Part:
    """One replica's contribution to a weighted mean: its weight, its payload and how its shards are read."""

    replica_id: int
    weight: float
    payload: Payload
    read: Callable[
        [int], bytes
    ]  # shard index -> the shard's bytes, verified by `payload.fetch` or by `payload.publish`


def mean_into(shards: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
    """Write sum(w_i x_i) / sum(w_i) over all parts into `shards`, flat tensors that are cut as each payload is.

    Every byte is decoded once. Holds one encoded shard in memory beside the result, however many parts there are.
    Raises `PayloadCorrupt` for a payload of another length or cut and for bytes that are not the promised shard, and
    what `read` raises.
    """
    ordered = sorted(parts, key=lambda part: part.replica_id)
    # Divided by the largest weight: equal weights become exactly 1, and token counts beyond 2**24 keep their ratio.
    largest = max(part.weight for part in ordered)
    weights = [torch.tensor(part.weight / largest, dtype=torch.float32) for part in ordered]
    total = torch.zeros((), dtype=torch.float32)
    for weight in weights:
        total = total + weight
    for part in ordered:
        _check_cut(shards, part)
    last = len(ordered) - 1
    for index, shard in enumerate(shards):
        for position, (part, weight) in enumerate(zip(ordered, weights, strict=True)):
            divisor = total if position == last else None
            # Not by a local name, which would keep the bytes while the next ones are read.
            _add(shard, codecs.view(part.read(index), part.payload.codec, shard.numel()), weight, not position, divisor)


def _add(
    shard: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, is_first: bool, divisor: torch.Tensor | None
) -> None:
    """Add `weight * values` to a shard, block by block, then divide it; the first part replaces what it holds."""
    is_one = bool(weight == 1.0)
    for summed, block in zip(shard.split(BLOCK), values.split(BLOCK), strict=True):
        weighted = block.to(torch.float32)
        if not is_one:
            weighted = weighted * weight
        if is_first:
            torch.add(weighted, 0.0, out=summed)  # not a copy: a sum that begins at zero has no -0.0
        else:
            summed.add_(weighted)
        if divisor is not None:
            summed.div_(divisor)


def _check_cut(shards: Sequence[torch.Tensor], part: Part) -> None:
    """Raise `PayloadCorrupt` unless a payload is cut into shards of these lengths."""
    cut = [stop - start for start, stop in shard_ranges(part.payload.numel, part.payload.shard_numel)]
    if cut != [shard.numel() for shard in shards] or len(part.payload.shards) != len(shards):
        raise PayloadCorrupt(
            f"replica {part.replica_id}'s payload of {part.payload.numel} elements, {part.payload.shard_numel} per "
            f"shard, is not cut like the average of {sum(shard.numel() for shard in shards)} elements."
        )
