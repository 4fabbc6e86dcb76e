"""Reads payload shards and saved states from the store and checks their digests.

Kept apart from `allreduce.payload`, because commands that only read records must start without importing torch.
"""

from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt
from diloco_orchestrator.protocol.records import Payload, Shard, sha256_hex
from diloco_orchestrator.store.base import Store

_READS = 2  # a bit flipped in transfer is right in the second read; a bit flipped in the store is wrong in both


class PayloadGone(PayloadCorrupt):
    """The object of a payload shard does not exist any more: it was deleted by retention or by hand."""


def fetch(store: Store, key: str, payload: Payload, index: int) -> bytes:
    """The bytes of shard `index` of a payload, read from `key` and verified as `fetch_shard` does, with its errors."""
    return fetch_shard(store, key, payload.shards[index])


def fetch_shard(store: Store, key: str, shard: Shard) -> bytes:
    """The bytes of an object that a manifest names by digest and size.

    Bytes with another digest are read once more, then `PayloadCorrupt` is raised. Raises `PayloadGone` if the object
    does not exist.
    """
    for _ in range(_READS):
        try:
            data = store.get(key)
        except ObjectMissing:
            raise PayloadGone(f"{key} in {store.url} is gone although a manifest names it.") from None
        if sha256_hex(data) == shard.sha256:
            return data
    raise PayloadCorrupt(
        f"{key} in {store.url}: {len(data)} bytes with sha256 {sha256_hex(data)[:12]}, read {_READS} times; the "
        f"manifest names {shard.size} bytes with {shard.sha256[:12]}. They are not used."
    )
