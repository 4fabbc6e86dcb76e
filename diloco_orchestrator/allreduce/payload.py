"""Payloads: writes a flat fp32 vector as encoded shards.

Reading and verifying shards is in `allreduce.shards`, the encodings are in `protocol.codecs`. Which contributions are
averaged is decided by `protocol.rounds`.
"""

from collections.abc import Callable

from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import NotFinite, shard_ranges
from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.errors import PayloadCorrupt, RoundReused
from diloco_orchestrator.protocol import codecs
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Payload, Shard
from diloco_orchestrator.store.base import Store


def publish(
    store: Store,
    key_of_shard: Callable[[int], str],
    vector: Vector,
    codec: str,
    shard_numel: int,
    cache: PayloadCache,
) -> Payload:
    """Create the shards of a vector and return their description for the manifest. Safe to repeat with equal numbers.

    Every element is read, encoded and hashed once. Raises `NotFinite` if the vector holds NaN or infinity once it is
    encoded (bf16 turns the largest fp32 numbers into infinity), before anything is written; `RoundReused` if a shard
    exists with other bytes.

    Args:
        key_of_shard: shard index -> key.
        codec: name of the encoding.
        shard_numel: elements per shard.
        cache: gets the bytes of each shard, for a reader in this process.
    """
    shards: list[Shard] = []
    nonfinite = 0
    for index, (start, stop) in enumerate(shard_ranges(vector.numel, shard_numel)):
        data = codecs.encode(vector.read(start, stop), codec)
        nonfinite += codecs.count_nonfinite(data, codec, stop - start)
        if not nonfinite:  # else nothing will be published, and the other shards are only counted
            shards.append(Shard(digest=bulk_digest(data), size=len(data)))
            cache.put((key_of_shard(index), shards[-1].digest), data)
    if nonfinite:
        raise NotFinite(f"this tensor holds {nonfinite} elements that are not finite.")
    for index, shard in enumerate(shards):
        key = key_of_shard(index)
        kept = cache.get((key, shard.digest))
        assert kept is not None, "it was put there above"
        _create_same(store, key, kept)
    return Payload(codec=codec, numel=vector.numel, shard_numel=shard_numel, shards=tuple(shards))


def _create_same(store: Store, key: str, data: bytes) -> None:
    """Create an object. Raises `RoundReused` if it exists with other bytes."""
    if not store.create(key, data) and store.get(key) != data:
        raise RoundReused(
            f"{key} in {store.url} already holds another payload: this round id was used before with other numbers. "
            "Use a new folder, or the next round id."
        )


def check_shape(payload: Payload, codec: str, numel: int, shard_numel: int) -> None:
    """Raise `PayloadCorrupt` unless the manifest describes a vector of this length, codec and shard size."""
    expected = (codec, numel, shard_numel, len(shard_ranges(numel, shard_numel)))
    found = (payload.codec, payload.numel, payload.shard_numel, len(payload.shards))
    if found != expected:
        raise PayloadCorrupt(
            f"the payload is (codec, elements, elements per shard, shards) = {found}; this round needs {expected}."
        )
