"""The weighted mean: its arithmetic, its order, and bits that do not depend on the machine."""

import pytest
import torch
from parts_of_a_mean import part

from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.vectors import BLOCK
from diloco_orchestrator.errors import PayloadCorrupt


def mean(parts: list[Part], numel: int, shard_numel: int = 4) -> torch.Tensor:
    out = torch.full((numel,), float("nan"))
    mean_into(out.split(shard_numel), parts)
    return out


def test_weights_are_relative():
    one, two = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([5.0, 2.0, -1.0, 0.0, 1.0])
    assert mean([part(0, one, 3), part(1, two, 1)], 5).tolist() == [2.0, 2.0, 2.0, 3.0, 4.0]
    assert mean([part(0, one, 3e30), part(1, two, 1e30)], 5).tolist() == [2.0, 2.0, 2.0, 3.0, 4.0]


def test_the_order_is_by_replica_whatever_order_they_come_in():
    values = [torch.randn(50, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(5)]
    parts = [part(i, value) for i, value in enumerate(values)]
    assert torch.equal(mean(parts, 50), mean(parts[::-1], 50))


def test_token_weights_beyond_what_fp32_counts_keep_their_ratio():
    values = [part(0, torch.tensor([0.0]), 2.0**25 + 1), part(1, torch.tensor([1.0]), 2.0**25 + 1)]
    assert mean(values, 1).item() == 0.5


def test_the_cache_gives_back_what_it_got_from_memory_and_file():
    cache = PayloadCache(memory_bytes=10)
    bodies = {(f"key {i}", "sha"): bytes([i]) * 6 for i in range(4)}
    for name, body in bodies.items():
        cache.put(name, body)
        cache.put(name, body)
    assert {name: cache.get(name) for name in bodies} == bodies
    assert cache.get(("never", "sha")) is None
    cache.clear()
    assert all(cache.get(name) is None for name in bodies)
    cache.put(("key 0", "sha"), b"ten bytes!")
    assert cache.get(("key 0", "sha")) == b"ten bytes!"
    cache.close()


def test_the_sum_is_taken_in_replica_order_from_zero_though_it_is_computed_in_blocks():
    """Over more than one block, in which the last one is shorter, with weights that are not one."""
    numel, weights = BLOCK + 7, [1.0, 0.3, 0.7]
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(3)]
    values[0][:3] = values[1][:3] = values[2][:3] = -0.0
    summed, total = torch.zeros(numel), torch.zeros(())
    for each, weight in zip(values, weights, strict=True):
        summed, total = summed + each * torch.tensor(weight), total + torch.tensor(weight)
    parts = [part(i, values[i], weights[i], numel) for i in (2, 0, 1)]
    found = mean(parts, numel, numel)
    assert torch.equal(found.view(torch.int32), (summed / total).view(torch.int32))  # -0.0 and 0.0 differ


def test_a_payload_that_is_cut_otherwise_is_not_averaged():
    values = torch.arange(8.0)
    for other in (part(1, torch.arange(12.0)), part(1, values, shard_numel=3), part(1, torch.arange(7.0))):
        with pytest.raises(PayloadCorrupt, match=r"replica 1's payload .* is not cut like the average of 8 elements"):
            mean([part(0, values), other], 8)


def test_averaging_leaves_the_payloads_as_they_were():
    """The mean decodes without a copy: what it reads may be averaged again."""
    parts = [part(i, torch.randn(9, generator=torch.Generator().manual_seed(i)), 1.0 + i) for i in range(3)]
    before = [[one.read(index) for index in range(3)] for one in parts]
    copies = [[bytes(bytearray(body)) for body in bodies] for bodies in before]
    assert torch.equal(mean(parts, 9), mean(parts, 9)) and before == copies
