"""The distance of two payloads says how far apart the pseudo-gradients were, whatever their codec makes of that."""

import math
from typing import Any

import pytest
import torch

from diloco_orchestrator.codecs.table import CODECS, Encoded, encode
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Payload, Progress
from replica.process.range_comparison import _distance, _facts

NUMEL, SHARD = 50_001, 16_384


def distance(first: torch.Tensor, second: torch.Tensor, codec: str) -> float:
    payload = Payload(codec=codec, numel=NUMEL, shard_numel=SHARD, shards=())
    encoded = ([encode(shard, codec) for shard in each.split(SHARD)] for each in (first, second))
    return _distance(*map(iter, encoded), payload)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("apart", [1e-4, *(pytest.param(each, marks=pytest.mark.slow) for each in (2e-3, 0.05)), 0.4])
@pytest.mark.parametrize("tails", [None, 3])
def test_a_distance_is_that_before_encoding(codec: str, apart: float, tails: int | None):
    """Rounding to a few levels turns a small distance into a larger one: without the correction honest re-runs on
    another machine would differ by more than an inner step's share.
    """
    draws = torch.Generator().manual_seed(3)
    values = torch.randn(NUMEL, generator=draws)
    if tails is not None:  # of Student's t, as pseudo-gradients have them: one large value sets the steps of its group
        values = values / torch.randn(tails, NUMEL, generator=draws).square().mean(0).sqrt()
    error = torch.randn(NUMEL, generator=draws)
    other = values + apart * values.norm() / error.norm() * error
    found = distance(values, other, codec)
    if CODECS[codec].feedback:  # of few values: a lower estimate
        assert found <= 1.3 * apart
    else:
        assert 0.5 * apart <= found <= 1.1 * apart or (codec == "bf16" and found <= max(1.1 * apart, 2**-8))
    assert distance(values, values, codec) == 0.0


@pytest.mark.parametrize("codec", CODECS)
def test_of_nothing_published_any_difference_is_far(codec: str):
    assert distance(torch.zeros(NUMEL), torch.ones(NUMEL), codec) == math.inf


@pytest.mark.parametrize("numel", [0, 1, 128, 200])
def test_steps_are_those_between_the_values_that_an_element_may_have(numel: int):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for codec, levels in (("int8", 127), ("int4", 7)):
        squares = sum(
            (float(group.abs().max()) / levels) ** 2 * len(group) for group in values.split(128) if len(group)
        )
        assert Encoded(encode(values, codec), codec, numel).step_norm() == pytest.approx(math.sqrt(squares), rel=1e-4)
    assert Encoded(encode(values, "bf16"), "bf16", numel).step_norm() == 0.0


def test_random_states_that_an_earlier_version_did_not_write_are_no_difference():
    def manifest(cursor: dict[str, Any]) -> Contribution:
        progress = Progress(cursor={"epoch": 0, "batches": 1, **cursor}, rng={}, inner_steps=1, tokens=0)
        return Contribution(
            **Stamp("said", lambda: 0.0)(),
            round=1,
            leg=1,
            replica_id=0,
            attempt=1,
            kind="scores",
            base_digest="",
            snapshot_round=0,
            rebuilt_after=0,
            progress=progress,
        )

    now = manifest({"chance": {"torch": "a", "own": ["b"]}})
    for earlier, equal in (({}, True), ({"chance": {"torch": "a"}}, True), ({"chance": {"torch": "b"}}, False)):
        recorded, found = _facts(manifest(earlier), now)["random state"]
        assert (recorded == found) is equal
