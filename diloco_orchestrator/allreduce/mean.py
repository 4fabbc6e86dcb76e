"""The weighted mean of contributions, shard by shard, with the same bits on every machine.

It is computed in fp32 on the CPU, in `replica_id` order, with separate multiply and add: a fused multiply-add, which
not every CPU has, rounds differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.allreduce.payload import FlatTensors, decode, shard_ranges
from diloco_orchestrator.protocol.records import Payload


@dataclass(frozen=True)
class Part:
    """One replica's contribution to a weighted mean: its weight, its payload and how its shards are read."""

    replica_id: int
    weight: float
    payload: Payload
    read: Callable[[int], bytes]  # shard index -> the shard's bytes, digest checked


def mean_into(out: FlatTensors, parts: Sequence[Part]) -> None:
    """Write sum(w_i x_i) / sum(w_i) over all parts into `out`, which has the length of each of them.

    Holds two shards in memory, however many parts there are. Raises `PayloadCorrupt` for bytes that are not the shard
    that a payload promises or hold NaN or infinity, and what `read` raises.
    """
    ordered = sorted(parts, key=lambda part: part.replica_id)
    # Divided by the largest weight: equal weights become exactly 1, and token counts beyond 2**24 keep their ratio.
    largest = max(part.weight for part in ordered)
    weights = [torch.tensor(part.weight / largest, dtype=torch.float32) for part in ordered]
    total = torch.zeros((), dtype=torch.float32)
    for weight in weights:
        total = total + weight
    for index, (start, stop) in enumerate(shard_ranges(out.numel, ordered[0].payload.shard_numel)):
        summed = torch.zeros(stop - start, dtype=torch.float32)
        for part, weight in zip(ordered, weights, strict=True):
            values = decode(part.read(index), part.payload, index, f"replica {part.replica_id}'s payload")
            summed += values.mul_(weight)
        out.write(start, summed.div_(total))
