"""A base whose shards are in several ranks: each holds, steps and hashes its own, together they are the whole base."""

from functools import partial

import torch

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.codecs.table import encode
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import average_and_step
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Contribution, Payload, Shard

SHAPES = {"a": torch.Size((7, 3)), "b": torch.Size((11,)), "c": torch.Size((2, 5))}
FRAGMENTS, SHARD_NUMEL, RANKS = [["a", "c"], ["b"]], 4, 3
OUTER = OuterConfig(lr=0.7, momentum=0.9)


class OneOf(Owners):
    """One rank of several, which sees nothing of the others."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ranks = rank, RANKS


def whole_and_parts() -> tuple[Base, list[Base]]:
    generator = torch.Generator().manual_seed(5)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    parts = [Base.zeros(SHAPES, FRAGMENTS, SHARD_NUMEL, OneOf(rank), momenta=True) for rank in range(RANKS)]
    for part in parts:
        for name, value in values.items():
            part.write(name, 1, value.view(-1)[1:])  # from any element on, over the borders of shards
            part.write(name, 0, value.view(-1)[:1])
    return Base.fresh(values, OUTER, FRAGMENTS, SHARD_NUMEL), parts


def assert_are_one(parts: list[Base], whole: Base) -> None:
    """Each shard is in one of the parts, with the bits of the whole base, and has no memory in the others."""
    for fragment in range(len(FRAGMENTS)):
        shards = whole.shards(fragment)
        for index, shard in enumerate(shards):
            assert [index in dict(part.own_shards(fragment)) for part in parts] == [
                (fragment + index) % RANKS == rank for rank in range(RANKS)
            ]
            for part in parts:
                theirs = part.shards(fragment)[index]
                if index in dict(part.own_shards(fragment)):
                    assert theirs.equals(shard)
                else:
                    assert theirs.parameters.is_meta and theirs.momenta.is_meta


def test_each_shard_of_a_dealt_base_is_in_one_rank():
    whole, parts = whole_and_parts()
    assert_are_one(parts, whole)


def test_a_rank_reads_and_steps_its_own_shards_to_the_bits_of_the_whole_base():
    whole, parts = whole_and_parts()
    for fragment, names in enumerate(FRAGMENTS):
        numel = whole.numel(names)
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(fragment))
        bodies = [encode(gradient[start:stop], "bf16") for start, stop in shard_ranges(numel, SHARD_NUMEL)]
        shards = tuple(Shard(digest=bulk_digest(body), size=len(body)) for body in bodies)
        payload = Payload(codec="bf16", numel=numel, shard_numel=SHARD_NUMEL, shards=shards)
        read: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}

        def shard_of(rank: int, manifest: Contribution, index: int, bodies=bodies, read=read) -> bytes:
            read[rank].append(index)
            return bodies[index]

        named = [(manifest_of(payload), 1)]
        average_and_step(whole, fragment, named, lambda _, index, bodies=bodies: bodies[index], OUTER)
        for rank, part in enumerate(parts):
            average_and_step(part, fragment, named, partial(shard_of, rank), OUTER)
            assert read[rank] == [index for index, _ in part.own_shards(fragment)]
    assert_are_one(parts, whole)


def manifest_of(payload: Payload) -> Contribution:
    who = {"write_id": "test", "at": 0.0, "round": 1, "leg": 1, "replica_id": 0, "attempt": 1}
    claim = {"base_digest": "", "snapshot_round": 0, "rebuilt_after": 0}
    return Contribution(**who, **claim, kind="delta", payload=payload)
