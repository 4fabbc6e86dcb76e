"""A payload shard that is missing, truncated, from another round or of another layout is named and not averaged."""

import logging
import re
from collections.abc import Callable

import pytest
import torch
from protocol_fleet import BY_HAND, Fleet, answer

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.codecs.table import encode
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Contribution, Payload, Shard
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore

SHARD = keys.payload(2, 1, 1, 0)
EARLIER = keys.payload(1, 1, 1, 0)


def missing(store: Store, manifest: Contribution) -> None:
    store.delete(SHARD)


def truncated(store: Store, manifest: Contribution) -> None:
    store.put(SHARD, store.get(SHARD)[:-8])


def empty(store: Store, manifest: Contribution) -> None:
    store.put(SHARD, b"")


def of_another_round(store: Store, manifest: Contribution) -> None:
    store.put(SHARD, store.get(EARLIER))


def _as_described(store: Store, manifest: Contribution, codec: str, shard_numel: int) -> None:
    """Other bytes, whose digests the manifest names: twelve ones in another codec, or cut elsewhere."""
    pieces = [encode(each, codec) for each in torch.ones(12).split(shard_numel)]
    shards = tuple(Shard(digest=bulk_digest(each), size=len(each)) for each in pieces)
    for index, each in enumerate(pieces):
        store.put(keys.payload(2, 1, 1, index), each)
    payload = Payload(codec=codec, numel=12, shard_numel=shard_numel, shards=shards)
    store.put(keys.contribution(2, 1), manifest.model_copy(update={"payload": payload}).to_bytes())


def of_another_codec(store: Store, manifest: Contribution) -> None:
    _as_described(store, manifest, "bf16", 16 * 2**20)


def of_a_codec_that_nobody_knows(store: Store, manifest: Contribution) -> None:
    assert manifest.payload is not None
    payload = manifest.payload.model_copy(update={"codec": "int3"})
    store.put(keys.contribution(2, 1), manifest.model_copy(update={"payload": payload}).to_bytes())


def cut_elsewhere(store: Store, manifest: Contribution) -> None:
    _as_described(store, manifest, "fp32", 5)


def without_its_last_shard(store: Store, manifest: Contribution) -> None:
    assert manifest.payload is not None
    payload = manifest.payload.model_copy(update={"shards": ()})
    store.put(keys.contribution(2, 1), manifest.model_copy(update={"payload": payload}).to_bytes())


BAD: list[tuple[Callable[[Store, Contribution], None], str]] = [
    (missing, rf"{SHARD} in memory:// is gone although a manifest names it"),
    (truncated, rf"{SHARD} in memory://: 56 bytes with digest b3:.*the manifest names 64 bytes"),
    (empty, rf"{SHARD} in memory://: 0 bytes with digest b3:.*the manifest names 64 bytes"),
    (of_another_round, rf"{SHARD} in memory://: 64 bytes with digest b3:.*the manifest names 64 bytes"),
    (of_another_codec, r"\(codec, elements, elements per shard, shards\) = \('bf16', 12, .* this round needs \('fp32'"),
    (of_a_codec_that_nobody_knows, r"\('int3', 12, .* this round needs \('fp32'"),
    (cut_elsewhere, r"\('fp32', 12, 5, 3\); this round needs \('fp32', 12, 16777216, 1\)"),
    (without_its_last_shard, r"\('fp32', 12, 16777216, 0\); this round needs \('fp32', 12, 16777216, 1\)"),
]


@pytest.mark.parametrize(("damage", "words"), BAD, ids=lambda each: getattr(each, "__name__", ""))
def test_a_bad_shard_makes_its_contribution_unverifiable_and_the_round_goes_on(damage, words, caplog):
    caplog.set_level(logging.WARNING)
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    answer(one, 1.0), answer(two, 1.0)
    one.close(), two.close()
    manifest = answer(two, 3.0)
    damage(fleet.store, manifest)
    answer(one, 1.0)
    one.close()
    last = fleet.commits()[-1]
    assert [(a.kind, a.averaged) for a in last.answers] == [("delta", True), ("unverifiable", False)]
    (line,) = [r.getMessage() for r in caplog.records if "replica 1 is not averaged" in r.getMessage()]
    assert re.search(words, line), line


class CountsReads(MemoryStore):
    """Remembers how many bytes each read gave."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        self.largest[key] = max(len(data), self.largest.get(key, 0))
        return data


def test_of_a_payload_that_is_larger_than_it_declares_no_more_than_that_is_read():
    """3 GiB, declared as 52 bytes, went into memory."""
    store = CountsReads()
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND, store=store)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    manifest = answer(two, 3.0)
    assert manifest.payload is not None
    key, declared = keys.payload(1, 1, 1, 0), manifest.payload.shards[0].size
    store.put(key, store.get(key) + bytes(2**24))
    store.largest.clear()
    answer(one, 1.0)
    one.close()
    assert [a.kind for a in fleet.commits()[-1].answers] == ["delta", "unverifiable"]
    assert store.largest[key] <= declared + 1


@pytest.mark.parametrize("codec", ["fp32", "int4", "topk64"])
def test_a_payload_that_declares_more_bytes_than_its_elements_can_have_is_not_read(codec):
    """16 MiB for 12 elements, with their right digest, were read by every replica; GiBs would have been."""
    store = CountsReads()
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND, store=store, codec=codec, snapshot_every=50)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    manifest = answer(two, 3.0)
    assert manifest.payload is not None
    key = keys.payload(1, 1, 1, 0)
    data = store.get(key) + bytes(2**24)
    store.put(key, data)
    payload = manifest.payload.model_copy(update={"shards": (Shard(digest=bulk_digest(data), size=len(data)),)})
    store.put(keys.contribution(1, 1), manifest.model_copy(update={"payload": payload}).to_bytes())
    store.largest.clear()
    answer(one, 1.0)
    one.close()
    found = fleet.commits()[-1].answers[1]
    assert (found.kind, found.reason.startswith(f"{key} in memory:// has {len(data)} bytes by its manifest")) == (
        "unverifiable",
        True,
    )
    assert key not in store.largest
