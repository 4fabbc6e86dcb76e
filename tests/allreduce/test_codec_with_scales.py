"""Codecs whose groups share a scale, the whole way of a pseudo-gradient: encode, publish, verify, average, carry."""

import itertools
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_fleet import Fleet

from diloco_orchestrator.allreduce.aggregate import AGGREGATES
from diloco_orchestrator.allreduce.payload import publish
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import NotFinite, fetch, open_verified
from diloco_orchestrator.allreduce.vectors import BLOCK, FlatTensors
from diloco_orchestrator.codecs.scaled import GROUP
from diloco_orchestrator.codecs.table import CODECS, LARGEST_GROUP, Encoded, encode
from diloco_orchestrator.config import OuterConfig, make_config
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import average_and_step
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Contribution, Payload
from diloco_orchestrator.store.open_store import open_store
from replica.rounds.debt import StoredPayload, WithDebt
from replica.rounds.interface import ContributionFields

NUMEL = BLOCK + 3 * LARGEST_GROUP + 301  # more than one block, and a last group that is shorter and odd
SHARD_NUMEL = BLOCK + LARGEST_GROUP
LEVELS = {"int8": 127, "int4": 7}
GOLDEN = {
    "int8": (
        "b3:8893d70e990502ee5e9fa7576cc9f463a84b953c3733c70c5fa3d694c8652348",
        "b3:aa89a2a0905fd21b869191006920c887f11875067fb00ea31d121f62157fd926",
    ),
    "int4": (
        "b3:8bf16d0c51942190d8cd2ab5c7bea8e81f376d622daafbf670b0e634ffb3fd14",
        "b3:b6f63160a8dda1393178bb5b107180552f340b56ada93f01097c3f997ee91c94",
    ),
}
GOLDEN_BASES = {
    ("int8", "mean"): "b3:86d62b99f7dc281801db879eba2a87042b95a25576f41f9758496d78e84f26e2",
    ("int8", "agreeing_mean"): "b3:99168e57c8c488cc383d1f399ff21a52d0d9724b63461f3cd8aad877e8d41725",
    ("int8", "trimmed_mean"): "b3:4101aa661d916d40489142e7c4177617a10ca5cbd692361df9cba6d0045dd045",
    ("int8", "median"): "b3:59325710dd8a5e2b750b779d9e763d0ba437d9acf4a59cb30828686d1d7c2c46",
    ("int8", "contributors_mean"): "b3:86d62b99f7dc281801db879eba2a87042b95a25576f41f9758496d78e84f26e2",
    ("int4", "mean"): "b3:dcaae272495488abce5c734d5cb53a0fa147de1c74148d94bc11fe8ba0790c91",
}


@pytest.fixture(params=LEVELS)
def codec(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def as_described(values: torch.Tensor, codec: str) -> bytes:
    """The bytes behind the header, by the words of `codecs.scaled`, one number after another."""
    packed = b""
    for group in values.split(GROUP) if len(values) else ():
        numbers = group.numpy()
        scale = np.abs(numbers).max() / np.float32(LEVELS[codec])
        scale = scale if scale >= 2.0**-126 else np.float32(0)
        factor = np.float32(1) / scale if scale else np.float32(0)
        whole = [int(np.rint(number * factor)) for number in numbers]
        packed += scale.astype("<f4").tobytes()
        if codec == "int8":
            packed += bytes(number & 255 for number in whole)
        else:
            nibbles = [number + 8 for number in whole] + [0] * (len(whole) % 2)
            packed += bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    return packed


def numbers(seed: int, numel: int = NUMEL) -> torch.Tensor:
    """Multiples of 1/4096 whose size changes from group to group."""
    mixed = torch.arange(numel, dtype=torch.int64) * 2654435761 + seed * 40503
    scales = 2.0 ** ((torch.arange(numel) // 256) % 5)
    return ((mixed % 65521).to(torch.float32) - 32760) / 4096 * scales


Bytes = dict[tuple[int, int], bytes]  # by replica and shard


def published(tmp_path: Path, values: Sequence[torch.Tensor], codec: str) -> tuple[list[Contribution], Bytes]:
    """Manifests of these pseudo-gradients, and their bytes, each fetched and verified by both ways there are."""
    store, manifests, read = open_store(str(tmp_path)), [], {}
    for i, vector in enumerate(values):
        key_of = lambda index, i=i: f"{i}-{index}.bin"  # noqa: E731
        payload = publish(store, key_of, FlatTensors([vector]), codec, SHARD_NUMEL, PayloadCache())
        manifests.append(Contribution.model_construct(replica_id=i, round=1, payload=payload))
        for index in range(len(payload.shards)):
            opened = open_verified(store, key_of(index), payload, index)
            assert opened is not None
            opened.close()
            read[i, index] = fetch(store, key_of(index), payload, index, with_norm=True)
    return manifests, read


def through(values: torch.Tensor, shard_numel: int, codec: str) -> torch.Tensor:
    """The values as they are after encoding, in shards."""
    return torch.cat([Encoded(encode(part, codec), codec, len(part)).values() for part in values.split(shard_numel)])


def test_its_bytes_are_golden(codec: str):
    values = numbers(3, 2 * GROUP + 45)
    data = encode(values, codec)
    assert len(data) == CODECS[codec].encoded_size(values.numel())
    decoded = Encoded(data, codec, values.numel()).values().numpy().tobytes()
    assert (bulk_digest(data), bulk_digest(decoded)) == GOLDEN[codec]


@settings(max_examples=40)
@given(numel=st.integers(0, 3 * GROUP), seed=st.integers(0, 99), exponent=st.integers(-148, 120))
def test_its_bytes_are_those_of_its_description(numel: int, seed: int, exponent: int):
    """From the smallest numbers that fp32 holds up to large ones, and of every length."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    for codec in LEVELS:
        assert encode(values, codec) == CODECS[codec].header(numel) + as_described(values, codec)


def test_what_encoding_loses_is_at_hand_block_by_block(codec: str):
    values, found = numbers(1), CODECS[codec]
    blocks = [found.encode_block(block) for block in values.split(BLOCK)]
    encoded = Encoded(encode(values, codec), codec, NUMEL)
    assert b"".join([found.header(NUMEL), *(bytes(block.data) for block in blocks)]) == encode(values, codec)
    lost = values - torch.cat([block.values for block in blocks])
    assert 0 < lost.abs().max() <= 16 * 8 / LEVELS[codec] / 2 * 1.001  # half a step of the largest scale
    assert torch.equal(values - encoded.values(), lost)
    squares = sum(block.measure.squares for block in blocks)
    assert squares == pytest.approx(encoded.measure().squares, rel=1e-6)


def test_any_range_is_decoded_with_the_scales_of_its_groups(codec: str):
    encoded = Encoded(encode(numbers(2), codec), codec, NUMEL)
    whole = encoded.values()
    for start, stop in [(0, 1), (127, 129), (128, 256), (100, 4001), (NUMEL - 1, NUMEL), (NUMEL - 299, NUMEL), (7, 7)]:
        assert torch.equal(encoded.values(start, stop), whole[start:stop])
    assert torch.equal(torch.cat(list(encoded.blocks(5, 9000, 1000))), whole[5:9000])


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_elements_whose_scale_is_not_finite_are_not_either(codec: str, scale: float):
    data = bytearray(encode(torch.ones(2 * GROUP), codec))
    first = len(CODECS[codec].header(0))
    data[first : first + 4] = np.float32(scale).tobytes()
    assert Encoded(bytes(data), codec, 2 * GROUP).measure().nonfinite == GROUP


@pytest.mark.parametrize("scale", [0.0, 1e-40, -1.0])
def test_a_scale_of_zero_or_a_denormal_one_gives_its_multiples(codec: str, scale: float):
    """What an encoder never writes beside elements that are not zero: each decodes to scale times its whole number."""
    data, levels = bytearray(encode(torch.ones(2 * GROUP), codec)), LEVELS[codec]
    first = len(CODECS[codec].header(0))
    data[first : first + 4] = np.float32(scale).tobytes()
    found = Encoded(bytes(data), codec, 2 * GROUP)
    assert torch.equal(found.values(0, GROUP), torch.full((GROUP,), float(np.float32(scale)) * levels))
    assert found.measure().nonfinite == 0 and torch.equal(found.values(GROUP), torch.ones(GROUP))


@pytest.mark.parametrize(("codec", "how"), [*(("int8", how) for how in AGGREGATES), ("int4", "mean")])
def test_a_base_stepped_by_it_has_golden_bits(tmp_path: Path, codec: str, how: str):
    manifests, read = published(tmp_path, [numbers(i) for i in range(5)], codec)
    base = Base.fresh({"w": numbers(9)}, OuterConfig(), shard_numel=SHARD_NUMEL)
    named = [(manifest, float(1 + (how.endswith("mean") and manifest.replica_id % 2))) for manifest in manifests]
    average_and_step(base, 0, named, lambda m, index: read[m.replica_id, index], OuterConfig(), aggregate=how)
    assert base.digest() == GOLDEN_BASES[codec, how]


def test_the_mean_is_that_of_the_decoded_values(tmp_path: Path, codec: str):
    values = [numbers(i) for i in range(3)]
    manifests, read = published(tmp_path, values, codec)
    base = Base.fresh({"w": torch.zeros(NUMEL)}, OuterConfig(lr=1.0, momentum=0.0), shard_numel=SHARD_NUMEL)
    named = [(manifest, 1.0) for manifest in manifests]
    average_and_step(base, 0, named, lambda m, index: read[m.replica_id, index], OuterConfig(lr=1.0, momentum=0.0))
    first, second, third = (through(each, SHARD_NUMEL, codec) for each in values)
    assert torch.equal(base.parameters["w"], -(first + second + third) / 3)


def test_bytes_and_norms_that_are_not_as_promised_are_refused(tmp_path: Path, codec: str):
    manifests, _ = published(tmp_path, [numbers(0)], codec)
    payload: Payload = manifests[0].payload  # type: ignore[assignment]
    store = open_store(str(tmp_path))
    scale_of_the_first_group = bytearray(store.get("0-0.bin"))
    scale_of_the_first_group[18] ^= 1
    store.put("spoilt.bin", bytes(scale_of_the_first_group))
    with pytest.raises(PayloadCorrupt, match="read 2 times"):
        fetch(store, "spoilt.bin", payload, 0)
    assert open_verified(store, "spoilt.bin", payload, 0) is None
    lying = payload.model_copy(update={"norms": (1.0, 1.0)})
    with pytest.raises(PayloadCorrupt, match="the manifest declares 1"):
        fetch(store, "0-0.bin", lying, 0, with_norm=True)
    with pytest.raises(PayloadCorrupt, match=f"elements encoded as {codec}"):
        Encoded(store.get("0-1.bin"), codec, SHARD_NUMEL)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_published(tmp_path: Path, bad: float, codec: str):
    values = numbers(0)
    values[1000] = bad
    with pytest.raises(NotFinite):
        publish(open_store(str(tmp_path)), str, FlatTensors([values]), codec, SHARD_NUMEL, PayloadCache())


def test_carried_work_is_added_however_the_sum_is_read(codec: str):
    values, numel = numbers(4, 1000), 1000
    stored = StoredPayload(Payload(codec=codec, numel=numel, shard_numel=512, shards=()))
    for index, part in enumerate(values.split(512)):
        stored.put(index, encode(part, codec))
    whole = through(values, 512, codec)
    with closing(WithDebt(FlatTensors([torch.ones(numel)]), [(stored, 0.5)])) as both:
        for cuts in ([0, 1000], [0, 100, 300, 700, 1000]):
            read = torch.cat([both.read(*each) for each in itertools.pairwise(cuts)])
            assert torch.equal(read, 1.0 + 0.5 * whole)


def test_a_run_takes_every_codec_of_the_table_and_no_other(codec: str):
    fleet = Fleet(replicas=2, rounds=1, codec=codec)
    participants = fleet.join_all()
    for participant, value in zip(participants, (1.0, 3.0), strict=True):
        participant._contributor.contribute_delta(FlatTensors([torch.full((12,), value)]), ContributionFields(steps=1))
    assert participants[0].close().applied
    with pytest.raises(ConfigError, match="unknown codec 'int9': did you mean 'int8'"):
        make_config({"entrypoint": "m:f", "codec": "int9"})


def test_a_codec_whose_groups_would_be_cut_by_blocks_is_no_row():
    with pytest.raises(ValueError, match="groups of 300 do not fill 4096"):
        replace(CODECS["int8"], group=300)
    smallest = make_config({"entrypoint": "m:f", "shard_mib": 1}).shard_numel
    assert BLOCK % LARGEST_GROUP == smallest % LARGEST_GROUP == 0
