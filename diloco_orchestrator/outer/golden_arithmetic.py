"""Checks that this machine computes averages and outer steps with the same bits as every other machine.

The inputs are exact in fp32, so that only the arithmetic itself can differ.
"""

import torch

from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol.codecs import encode
from diloco_orchestrator.protocol.records import Payload, Shard, sha256_hex

GOLDEN = "59d45717794ccf3fa1fcdf8926c5082d8c32f2a4b2e692432f49b94115428ec0"
_NUMEL, _ROUNDS, _REPLICAS = 4099, 5, 3


def outer_steps_digest() -> str:
    """The digest of a base after five weighted means and Nesterov steps on fixed inputs; must equal `GOLDEN`."""
    base = Base.fresh({"w": _numbers(0)}, OuterConfig())
    for round_ in range(_ROUNDS):
        mean = torch.empty(_NUMEL)
        mean_into([mean], [_part(i, _numbers(10 * round_ + i)) for i in range(_REPLICAS)])
        base = step(base, {"w": mean}, OuterConfig())
    return base.digest()


def _numbers(seed: int) -> torch.Tensor:
    """Multiples of 1/4096 between -8 and 8, of shape (_NUMEL,), float32."""
    mixed = torch.arange(_NUMEL, dtype=torch.int64) * 2654435761 + seed * 40503
    return ((mixed % 65521).to(torch.float32) - 32760) / 4096


def _part(replica_id: int, values: torch.Tensor) -> Part:
    body = encode(values, "fp32")
    shard = Shard(sha256=sha256_hex(body), size=len(body))
    payload = Payload(codec="fp32", numel=_NUMEL, shard_numel=_NUMEL, shards=(shard,))
    return Part(replica_id, float(replica_id + 1), payload, [body].__getitem__)
