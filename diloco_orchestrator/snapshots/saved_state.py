"""A replica's saved training state in the bucket: one safetensors object, or above a size limit an index and pieces.

The object that the manifest names is then a safetensors file without tensors, whose metadata lists digest and size of
each piece. `replica.training.checkpoint` has the contents of a state.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from diloco_orchestrator.allreduce.shards import fetch_shard
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.record_format import parse_json
from diloco_orchestrator.protocol.records import Contribution, Shard
from diloco_orchestrator.snapshots.tensor_file import encode, pieces, read_header
from diloco_orchestrator.store.base import Store

Buffers: TypeAlias = Sequence[bytes | memoryview]  # the bytes of a state, in order
_PIECES = "pieces"


def write_state(store: Store, replica_id: int, round_: int, attempt: int, state: Buffers, limit: int) -> Shard:
    """Create the objects of a state, none above `limit` bytes; returns digest and size for the manifest.

    A writer that dies halfway leaves pieces that no manifest names; retention deletes them with the round.
    """
    key = keys.state(replica_id, round_, attempt)
    if sum(len(buffer) for buffer in state) <= limit:
        return _create(store, key, b"".join(state))
    shards: list[Shard] = []
    for piece in pieces(state, limit):
        shards.append(_create(store, keys.state_piece(replica_id, round_, attempt, len(shards)), piece))
        del piece  # before the next one is made
    index = json.dumps([[shard.digest, shard.size] for shard in shards], separators=(",", ":"))
    return _create(store, key, encode({}, {_PIECES: index}))


def _create(store: Store, key: str, data: bytes) -> Shard:
    store.create(key, data)
    return Shard(digest=bulk_digest(data), size=len(data))


def read_state(store: Store, manifest: Contribution) -> Iterator[bytes]:
    """The bytes of the training state that a manifest names, in pieces, each checked against its digest.

    Raises `PayloadCorrupt` for a deleted or changed object, `RecordInvalid` for an invalid index of pieces.
    """
    assert manifest.state is not None
    key = keys.state(manifest.replica_id, manifest.round, manifest.attempt)
    data = fetch_shard(store, key, manifest.state)
    named = pieces_of(data, manifest)
    if not named:
        yield data
    for piece_key, shard in named:
        yield fetch_shard(store, piece_key, shard)


def pieces_of(data: bytes, manifest: Contribution) -> list[tuple[str, Shard]]:
    """Key, digest and size of the objects in which a large state is stored; empty for a state in one object.

    `data`: the object that the manifest names. Raises `RecordInvalid` for an invalid index.
    """
    key = keys.state(manifest.replica_id, manifest.round, manifest.attempt)
    header = read_header(lambda start, end: data[start:end], key)
    if _PIECES not in header.metadata:
        return []
    try:
        shards = [Shard(digest=digest, size=size) for digest, size in parse_json(header.metadata[_PIECES].encode())]
    except (TypeError, ValueError) as error:
        raise RecordInvalid(f"{key} is no index of a saved state ({error}): it was not written by a replica.") from None
    who = (manifest.replica_id, manifest.round, manifest.attempt)
    return [(keys.state_piece(*who, index), shard) for index, shard in enumerate(shards)]
