"""Self-test that averages and outer steps have the same bits on this machine as on every other one.

Inputs are exact in fp32, so that only the arithmetic itself can differ. A replica runs the test whenever it joins a
run.
"""

import functools
import math

import torch

from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.allreduce.threads import one_torch_thread
from diloco_orchestrator.codecs.table import encode
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import BaseDiverged
from diloco_orchestrator.outer.arithmetic import denormals_kept
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Payload, Shard

GOLDEN_EDGES = "b3:b1f92e6f8816082298b94cb689549213b2adbdfd39e4b744fe25354e0609c0f1"
GOLDEN = "b3:a43a75cce7da9fd54df3bfd612ee4faea91b5de097cc53245260919b65358354"
GOLDEN_AGGREGATES = "b3:72546bee17624b01c2f708b058ee5c474faffa763077542a37d873a9bd8a6e3a"
_NUMEL, _ROUNDS, _REPLICAS = 4099, 5, 3
_SORTED = 6  # contributions of which a trimmed mean adds four and a median two
_EDGES = 2**17


def outer_steps_digest() -> str:
    """The digest of a base after five weighted means and Nesterov steps on fixed inputs; must equal `GOLDEN`."""
    base = Base.fresh({"w": _numbers(0)}, OuterConfig())
    for round_ in range(_ROUNDS):
        mean = torch.empty(_NUMEL, dtype=torch.float32, device="cpu")
        mean_into([mean], [_part(i, _numbers(10 * round_ + i)) for i in range(_REPLICAS)])
        base = step(base, {"w": mean}, OuterConfig())
    return base.digest()


def edge_cases_digest() -> str:
    """The digest of a base after an outer step on denormals, ties and values near 3e38; must equal `GOLDEN_EDGES`."""
    numbers = {name: _edges(name) for name in ("denormal", "huge", "tie")}
    base = Base.fresh({name: values * 0.5 for name, values in numbers.items()}, OuterConfig())
    means = {}
    for name, values in numbers.items():
        means[name] = torch.empty_like(values)
        mean_into([means[name]], [_part(i, values * (-1.0) ** i) for i in range(_REPLICAS)])
    return step(base, means, OuterConfig()).digest()


def aggregates_digest() -> str:
    """The digest of agreeing mean, trimmed mean and median of unequal weights; must equal `GOLDEN_AGGREGATES`."""
    found = []
    for how in ("agreeing_mean", "trimmed_mean", "median"):
        for name in ("ordinary", "denormal", "huge", "tie"):
            ordinary = name == "ordinary"
            rows = [_numbers(i) if ordinary else _edges(name, _NUMEL) * ((i % 4 - 1.5) / 4) for i in range(_SORTED)]
            aggregate = aggregate_of(how, [_part(i, row) for i, row in enumerate(rows)], [rows[0].numel()])
            found += [block.numpy().tobytes() for block in aggregate.shard(0)(0, rows[0].numel())]
    return bulk_digest(b"".join(found))


@functools.cache
def is_golden() -> bool:
    """Whether averages (of every kind) and outer steps have the golden bits on this machine; computed once."""
    with denormals_kept(), one_torch_thread():  # computed as in a round
        found = (outer_steps_digest(), edge_cases_digest(), aggregates_digest())
    return found == (GOLDEN, GOLDEN_EDGES, GOLDEN_AGGREGATES)


def check_arithmetic() -> None:
    """Raise `BaseDiverged` if averages and outer steps have other bits on this machine than on all others.

    They are computed twice first, because a single flipped bit in memory must not remove a replica.
    """
    if not is_golden():
        is_golden.cache_clear()
    if not is_golden():
        raise BaseDiverged(
            "the outer step of this machine gives other bits than the golden ones: its replica would leave every run "
            "that others take part in. Its CPU or its torch build differs: see `diloco doctor`. Nothing was published."
        )


def _edges(name: str, numel: int = _EDGES) -> torch.Tensor:
    """Values of shape (numel,), float32: 'denormal', 'huge' (near 3e38) or 'tie' (sums halfway between two floats)."""
    index = torch.arange(numel, dtype=torch.int32, device="cpu")
    if name == "denormal":
        return (index * 61 + 1).bitwise_and(0x7FFFFF).view(torch.float32)
    if name == "huge":
        return 3e38 - (index % 1021).to(torch.float32) * 1e32
    return 1.0 + (index % 4099).to(torch.float32) * 2.0**-23


def _numbers(seed: int) -> torch.Tensor:
    """Multiples of 1/4096 between -8 and 8, of shape (_NUMEL,), float32."""
    mixed = torch.arange(_NUMEL, dtype=torch.int64, device="cpu") * 2654435761 + seed * 40503
    return ((mixed % 65521).to(torch.float32) - 32760) / 4096


def _part(replica_id: int, values: torch.Tensor) -> Part:
    numel = values.numel()
    body = encode(values, "fp32")
    shard = Shard(digest=bulk_digest(body), size=len(body))
    norm = float(values.abs().max()) * math.sqrt(numel) / 2  # about the declared one, and the same everywhere
    payload = Payload(codec="fp32", numel=numel, shard_numel=numel, shards=(shard,), norms=(norm,))
    return Part(replica_id, float(replica_id + 1), payload, [body].__getitem__)
