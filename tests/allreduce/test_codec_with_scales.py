"""The seam for codecs: one with scales, written here as a row of the table, goes the whole way of a pseudo-gradient."""

import itertools
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from protocol_fleet import Fleet

from diloco_orchestrator.allreduce.aggregate import AGGREGATES
from diloco_orchestrator.allreduce.payload import publish
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import NotFinite, fetch, open_verified
from diloco_orchestrator.allreduce.vectors import BLOCK, FlatTensors
from diloco_orchestrator.codecs.plain import little_endian
from diloco_orchestrator.codecs.table import CODECS, LARGEST_GROUP, Codec, Encoded, encode
from diloco_orchestrator.config import OuterConfig, make_config
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import average_and_step
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Contribution, Payload
from diloco_orchestrator.store.open_store import open_store
from replica.rounds.carry import WithCarry
from replica.rounds.interface import ContributionFields

GROUP = 256
NUMEL = BLOCK + 3 * LARGEST_GROUP + 300  # more than one block, and a last group that is shorter
SHARD_NUMEL = BLOCK + LARGEST_GROUP
GOLDEN_BYTES = "b3:fec7710f0fe8aef00ceafc0f69b4be9910685d24e0ad959819a18e04abdbb9d2"
GOLDEN_VALUES = "b3:96ef6116e235483f78bb93b0ad4e8a79a81bee289fb3e8ec4fad8d6a88731413"
GOLDEN_BASES = {
    "mean": "b3:47d0f4ef49c0a4be076c0c28174d31432d59d663f82d245a9fe9b948ca1c183f",
    "agreeing_mean": "b3:d2ee655ca2465316feb7bc4a8906b89425832666bdc8c47ecce92d47cb4621c9",
    "trimmed_mean": "b3:f3c58a830e29988d7fb0e5133d8a99b39d22f0bc95329918fbc9e16263cfd10c",
    "median": "b3:560048a1aaa1e60eba8636329a1e702af9d9d3d07ff7f3ed7191669b8023d3cc",
}


def body_size(numel: int) -> int:
    return numel + 4 * -(-numel // GROUP)


def pack(values: torch.Tensor) -> bytes:
    """Each group: its scale, the largest absolute value over 127, as little-endian fp32; then a byte for each value."""
    packed = []
    for group in values.split(GROUP):
        scale = (group.abs().max() / 127).reshape(1)
        quotient = torch.where(scale == 0, torch.zeros_like(group), group / scale)
        whole = quotient.round().nan_to_num().to(torch.int8)
        packed += [scale.numpy().astype("<f4").tobytes(), whole.numpy().tobytes()]
    return b"".join(packed)


def unpack(body: torch.Tensor, numel: int) -> torch.Tensor:
    groups = body.split(GROUP + 4)
    found = [group[4:].view(torch.int8) * little_endian(group[:4], torch.float32) for group in groups]
    decoded = torch.cat([torch.empty(0), *found])
    assert decoded.numel() == numel
    return decoded


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> Codec:
    codec = Codec("int8", 9, GROUP, body_size, pack, unpack)
    monkeypatch.setitem(CODECS, "int8", codec)
    return codec


def numbers(seed: int, numel: int = NUMEL) -> torch.Tensor:
    """Multiples of 1/4096 whose size changes from group to group."""
    mixed = torch.arange(numel, dtype=torch.int64) * 2654435761 + seed * 40503
    scales = 2.0 ** ((torch.arange(numel) // GROUP) % 5)
    return ((mixed % 65521).to(torch.float32) - 32760) / 4096 * scales


Bytes = dict[tuple[int, int], bytes]  # by replica and shard


def published(tmp_path: Path, values: Sequence[torch.Tensor]) -> tuple[list[Contribution], Bytes]:
    """Manifests of these pseudo-gradients, and their bytes, each fetched and verified by both ways there are."""
    store, manifests, read = open_store(str(tmp_path)), [], {}
    for i, vector in enumerate(values):
        key_of = lambda index, i=i: f"{i}-{index}.bin"  # noqa: E731
        payload = publish(store, key_of, FlatTensors([vector]), "int8", SHARD_NUMEL, PayloadCache())
        manifests.append(Contribution.model_construct(replica_id=i, round=1, payload=payload))
        for index in range(len(payload.shards)):
            opened = open_verified(store, key_of(index), payload, index)
            assert opened is not None
            opened.close()
            read[i, index] = fetch(store, key_of(index), payload, index, with_norm=True)
    return manifests, read


def through(values: torch.Tensor, shard_numel: int) -> torch.Tensor:
    """The values as they are after encoding, in shards."""
    return torch.cat([Encoded(encode(part, "int8"), "int8", len(part)).values() for part in values.split(shard_numel)])


def test_its_bytes_are_golden():
    values = numbers(3, 2 * GROUP + 44)
    data = encode(values, "int8")
    assert len(data) == CODECS["int8"].encoded_size(values.numel())
    assert bulk_digest(data) == GOLDEN_BYTES
    assert bulk_digest(Encoded(data, "int8", values.numel()).values().numpy().tobytes()) == GOLDEN_VALUES


def test_what_encoding_loses_is_at_hand_block_by_block(int8: Codec):
    values = numbers(1)
    blocks = [int8.encode_block(block) for block in values.split(BLOCK)]
    encoded = Encoded(encode(values, "int8"), "int8", NUMEL)
    assert b"".join([int8.header(NUMEL), *(bytes(block.data) for block in blocks)]) == encode(values, "int8")
    lost = values - torch.cat([block.values for block in blocks])
    assert 0 < lost.abs().max() <= 16 * 8 / 127 / 2 * 1.001  # half a step of the largest scale
    assert torch.equal(values - encoded.values(), lost)
    squares = sum(block.measure.squares for block in blocks)
    assert squares == pytest.approx(encoded.measure().squares, rel=1e-6)


def test_any_range_is_decoded_with_the_scales_of_its_groups():
    encoded = Encoded(encode(numbers(2), "int8"), "int8", NUMEL)
    whole = encoded.values()
    for start, stop in [(0, 1), (255, 257), (256, 512), (100, 4000), (NUMEL - 1, NUMEL), (NUMEL - 299, NUMEL), (7, 7)]:
        assert torch.equal(encoded.values(start, stop), whole[start:stop])
    assert torch.equal(torch.cat(list(encoded.blocks(5, 9000, 1000))), whole[5:9000])


@pytest.mark.parametrize("how", AGGREGATES)
def test_a_base_stepped_by_it_has_golden_bits(tmp_path: Path, how: str):
    manifests, read = published(tmp_path, [numbers(i) for i in range(5)])
    base = Base.fresh({"w": numbers(9)}, OuterConfig(), shard_numel=SHARD_NUMEL)
    named = [(manifest, float(1 + (how.endswith("mean") and manifest.replica_id % 2))) for manifest in manifests]
    average_and_step(base, 0, named, lambda m, index: read[m.replica_id, index], OuterConfig(), aggregate=how)
    assert base.digest() == GOLDEN_BASES[how]


def test_the_mean_is_that_of_the_decoded_values(tmp_path: Path):
    values = [numbers(i) for i in range(3)]
    manifests, read = published(tmp_path, values)
    base = Base.fresh({"w": torch.zeros(NUMEL)}, OuterConfig(lr=1.0, momentum=0.0), shard_numel=SHARD_NUMEL)
    named = [(manifest, 1.0) for manifest in manifests]
    average_and_step(base, 0, named, lambda m, index: read[m.replica_id, index], OuterConfig(lr=1.0, momentum=0.0))
    first, second, third = (through(each, SHARD_NUMEL) for each in values)
    assert torch.equal(base.parameters["w"], -(first + second + third) / 3)


def test_bytes_and_norms_that_are_not_as_promised_are_refused(tmp_path: Path):
    manifests, _ = published(tmp_path, [numbers(0)])
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
    with pytest.raises(PayloadCorrupt, match="elements encoded as int8"):
        Encoded(store.get("0-1.bin"), "int8", SHARD_NUMEL)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_published(tmp_path: Path, bad: float):
    values = numbers(0)
    values[1000] = bad
    with pytest.raises(NotFinite):
        publish(open_store(str(tmp_path)), str, FlatTensors([values]), "int8", SHARD_NUMEL, PayloadCache())


def test_carried_work_is_added_however_the_sum_is_read(tmp_path: Path):
    values, numel = numbers(4, 1000), 1000
    cache = PayloadCache()
    for index, part in enumerate(values.split(512)):
        cache.put((str(index), ""), encode(part, "int8"))
    payload = Payload(codec="int8", numel=numel, shard_numel=512, shards=())
    whole = through(values, 512)
    with closing(WithCarry(FlatTensors([torch.ones(numel)]), payload=payload, shards=cache, weight=0.5)) as both:
        for cuts in ([0, 1000], [0, 100, 300, 700, 1000]):
            read = torch.cat([both.read(*each) for each in itertools.pairwise(cuts)])
            assert torch.equal(read, 1.0 + 0.5 * whole)


def test_a_run_takes_every_codec_of_the_table_and_no_other():
    fleet = Fleet(replicas=2, rounds=1, codec="int8")
    participants = fleet.join_all()
    for participant, value in zip(participants, (1.0, 3.0), strict=True):
        participant._contributor.contribute_delta(FlatTensors([torch.full((12,), value)]), ContributionFields(steps=1))
    assert participants[0].close().applied
    with pytest.raises(ConfigError, match="unknown codec 'int9': did you mean 'int8'"):
        make_config({"entrypoint": "m:f", "codec": "int9"})


def test_a_codec_whose_groups_would_be_cut_by_blocks_is_no_row():
    with pytest.raises(ValueError, match="groups of 300 do not fill 4096"):
        Codec("int8", 9, 300, body_size, pack, unpack)
    smallest = make_config({"entrypoint": "m:f", "shard_mib": 1}).shard_numel
    assert BLOCK % LARGEST_GROUP == smallest % LARGEST_GROUP == 0
