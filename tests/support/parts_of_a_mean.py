"""Parts of an average, made of tensors in memory."""

import torch

from diloco_orchestrator.allreduce.mean import Part
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.codecs import table as codecs
from diloco_orchestrator.protocol.records import Payload, Shard


def declared(values: torch.Tensor) -> float:
    """The norm of a vector as a manifest declares it."""
    return float(f"{torch.linalg.vector_norm(values, dtype=torch.float64):.4g}")


def part(
    replica_id: int,
    values: torch.Tensor,
    weight: float = 1.0,
    shard_numel: int = 4,
    codec: str = "fp32",
    fine: codecs.Ranges = (),
) -> Part:
    """`fine`: ranges of each shard in the codec for fine parameters."""
    bodies = [codecs.encode(values[start:stop], codec, fine) for start, stop in shard_ranges(len(values), shard_numel)]
    shards = tuple(Shard(digest="b3:" + "0" * 64, size=len(body)) for body in bodies)
    norms = tuple(declared(values[start:stop]) for start, stop in shard_ranges(len(values), shard_numel))
    payload = Payload(codec=codec, numel=len(values), shard_numel=shard_numel, shards=shards, norms=norms)
    return Part(replica_id, weight, payload, bodies.__getitem__)
