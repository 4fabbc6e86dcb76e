"""LoRA products averaged exactly: equal to full-rank averaging in float64, and the same bits everywhere."""

import pytest
import torch

from diloco_orchestrator.codecs import table as codecs
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.adapter_products import merged, with_residuals
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import average_and_step
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Contribution, Payload, Shard
from diloco_orchestrator.protocol.start_records import AdapterPair
from diloco_orchestrator.snapshots.model_tensors import same_bytes

OUT, IN, RANK, REPLICAS = 24, 20, 4, 4
PAIR = AdapterPair(a="l.lora_A", b="l.lora_B", weight="l.weight", residual="l.lora_residual", scaling=2.0)
PLAIN = OuterConfig(lr=1.0, momentum=0.0)


class Rounds:
    """A base with one adapter and one other parameter, and rounds whose replicas went random ways from it."""

    def __init__(self, outer: OuterConfig, *, exact: bool = True, shard_numel: int = 2**20, seed: int = 0) -> None:
        self.outer, self.pairs = outer, (PAIR,) if exact else ()
        self.random = torch.Generator().manual_seed(seed)
        parameters = {"l.lora_A": self.draw(RANK, IN), "l.lora_B": 0.1 * self.draw(OUT, RANK), "other": self.draw(7)}
        fragments = [tuple(parameters)]
        if exact:
            parameters, fragments = with_residuals(parameters, fragments, self.pairs)  # type: ignore[assignment]
        self.shard_numel = shard_numel
        self.base = Base.fresh(parameters, outer, fragments, shard_numel)

    def draw(self, *shape: int) -> torch.Tensor:
        """Multiples of 1/512 between -2 and 2: normal random numbers differ between CPU types."""
        return torch.randint(-1024, 1025, shape, generator=self.random).to(torch.float32) / 512

    @property
    def product(self) -> torch.Tensor:
        """What the adapter adds to its weight, up to the scaling, float64."""
        found = {name: self.base.parameters[name].double() for name in self.base.parameters}
        return found["l.lora_B"] @ found["l.lora_A"] + found.get("l.lora_residual", 0.0)

    def round(self, codec: str = "fp32", weights: tuple[float, ...] = (1, 1, 1, 1)) -> torch.Tensor:
        """Take one round. Returns the weighted mean of the replicas' products, residual included, float64."""
        before = {name: self.base.parameters[name].clone() for name in self.base.fragments[0]}
        residual = self.product - before["l.lora_B"].double() @ before["l.lora_A"].double()
        named, bodies, mean = [], {}, torch.zeros(OUT, IN, dtype=torch.float64)
        for replica_id, weight in enumerate(weights):
            moved = {name: 0.2 * self.draw(*each.shape) for name, each in before.items()}
            flat = torch.cat([moved[name].flatten() for name in self.base.fragments[0]])
            parts = flat.split(self.shard_numel)
            shards = [codecs.encode(part, codec) for part in parts]
            decoded = torch.cat(
                [codecs.Encoded(body, codec, part.numel()).values() for body, part in zip(shards, parts, strict=True)]
            )
            pieces = decoded.split([each.numel() for each in before.values()])
            local = {
                name: each - piece.view_as(each) for (name, each), piece in zip(before.items(), pieces, strict=True)
            }
            mean += weight * (local["l.lora_B"].double() @ local["l.lora_A"].double())
            infos = tuple(Shard(digest=bulk_digest(each), size=len(each)) for each in shards)
            payload = Payload(codec=codec, numel=flat.numel(), shard_numel=self.shard_numel, shards=infos)  # type: ignore[arg-type]
            named.append((Contribution.model_construct(replica_id=replica_id, round=1, payload=payload), float(weight)))
            bodies[replica_id] = shards

        def read(manifest: Contribution, index: int) -> bytes:
            return bodies[manifest.replica_id].pop(0)  # a second read fails

        average_and_step(self.base, 0, named, read, self.outer, adapters=self.pairs)
        return residual + mean / sum(weights)


def error(found: torch.Tensor, expected: torch.Tensor, of: torch.Tensor | None = None) -> float:
    return float((found - expected).norm() / (expected if of is None else of).norm())


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (3, 1, 2, 5), (1, 0.25)])
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_the_product_becomes_the_mean_of_the_replicas_products(weights, codec):
    exact = Rounds(PLAIN)
    for _ in range(4):
        expected = exact.round(codec, weights)
        assert error(exact.product, expected) < 1e-6


def test_the_plain_mean_of_factors_misses_it_by_far():
    plain = Rounds(PLAIN, exact=False)
    expected = plain.round()
    assert error(plain.product, expected) > 0.05


@pytest.mark.parametrize("outer", [OuterConfig(), OuterConfig(lr=0.5, momentum=0.8, nesterov=False)])
def test_with_momentum_it_is_the_outer_step_of_full_rank_averaging(outer):
    exact = Rounds(outer)
    momentum = torch.zeros(OUT, IN, dtype=torch.float64)
    for _ in range(6):
        before = exact.product
        gradient = before - exact.round()
        momentum = outer.momentum * momentum + gradient
        direction = gradient + outer.momentum * momentum if outer.nesterov else momentum
        expected = before - outer.lr * direction
        assert error(exact.product, expected) < 1e-6
        assert error(exact.base.momenta["l.lora_residual"].double(), momentum) < 1e-6


def test_everything_but_the_residual_is_stepped_as_without_it():
    exact, plain = Rounds(OuterConfig()), Rounds(OuterConfig(), exact=False)
    for _ in range(3):
        exact.round()
        plain.round()
    for name in plain.base.parameters:
        assert torch.equal(exact.base.parameters[name], plain.base.parameters[name])
        assert torch.equal(exact.base.momenta[name], plain.base.momenta[name])


GOLDEN = "b3:8c812924747c20ee804ccc5c80acb7f88a8decd972a827e6cc7a1d5f3358fdc4"


def test_the_bits_are_the_same_everywhere(monkeypatch):
    """Whatever the number of threads and the blocks; and equal to those of the machine that wrote the golden digest."""
    digests = []
    for threads, block in ((1, 2**17), (4, 2**17), (1, 50)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        monkeypatch.setattr("diloco_orchestrator.outer.adapter_products.BLOCK", block)
        try:
            rounds = Rounds(OuterConfig())
            for _ in range(3):
                rounds.round()
        finally:
            torch.set_num_threads(before)
        digests.append(rounds.base.digest())
    assert digests == [GOLDEN] * 3


def test_residuals_in_several_shards_have_the_same_values():
    whole, cut = Rounds(OuterConfig()), Rounds(OuterConfig(), shard_numel=100)
    for _ in range(2):
        whole.round()
        cut.round()
    assert len(cut.base.shards(1)) == 5
    for name in whole.base.parameters:
        assert torch.equal(whole.base.parameters[name], cut.base.parameters[name])


def test_a_frozen_weight_takes_its_residual_rounded_once():
    weight, residual = torch.full((2, 2), 1.0, dtype=torch.bfloat16), torch.full((2, 2), 2.0**-9)
    assert torch.equal(merged(weight, residual, 1.0), weight)  # below half a unit in the last place
    assert torch.equal(merged(weight, residual, 8.0), weight + 2.0**-6)
    assert merged(weight, residual, 8.0).dtype == torch.bfloat16


def test_a_weight_without_a_residual_keeps_its_bytes():
    weight = torch.tensor([[-0.0, 0.0], [1.0, 2.0**-140]])
    assert same_bytes(merged(weight, torch.zeros(2, 2), 2.0), weight)
