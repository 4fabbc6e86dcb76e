"""A replica's saved training state in the bucket: one safetensors object, or above a size limit an index and pieces.

The object that the manifest names is then a safetensors file without tensors, whose metadata lists digest and size of
each piece. `snapshots.state_file` writes them, `replica.training.checkpoint` has the contents of a state.
"""

from collections.abc import Iterator

from diloco_orchestrator.allreduce.shards import fetch_shard
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import parse_json
from diloco_orchestrator.protocol.records import Contribution, Shard
from diloco_orchestrator.snapshots.tensor_file import read_header
from diloco_orchestrator.store.base import Store

PIECES = "pieces"  # in the metadata of an index: digest and size of each piece, in order


def read_state(store: Store, manifest: Contribution) -> Iterator[bytes]:
    """The bytes of the training state that a manifest names, in pieces, each checked against its digest.

    Raises `PayloadCorrupt` for a deleted or changed object, `RecordInvalid` for an invalid index of pieces.
    """
    data, named = first_object(store, manifest)
    if not named:
        yield data
    for piece_key, shard in named:
        yield fetch_shard(store, piece_key, shard)


def first_object(store: Store, manifest: Contribution) -> tuple[bytes, list[tuple[str, Shard]]]:
    """The bytes of the object that a manifest names as its state, and the pieces that it lists, as `pieces_of`.

    Raises as `read_state` does.
    """
    assert manifest.state is not None
    data = fetch_shard(store, keys.state(manifest.replica_id, manifest.round, manifest.attempt), manifest.state)
    return data, pieces_of(data, manifest)


def pieces_of(data: bytes, manifest: Contribution) -> list[tuple[str, Shard]]:
    """Key, digest and size of the objects in which a large state is stored; empty for a state in one object.

    `data`: the object that the manifest names. Raises `RecordInvalid` for an invalid index.
    """
    key = keys.state(manifest.replica_id, manifest.round, manifest.attempt)
    header = read_header(lambda start, end: data[start:end], key)
    if PIECES not in header.metadata:
        return []
    try:
        shards = [Shard(digest=digest, size=size) for digest, size in parse_json(header.metadata[PIECES].encode())]
    except (TypeError, ValueError) as error:
        raise RecordInvalid(f"{key} is no index of a saved state ({error}): it was not written by a replica.") from None
    who = (manifest.replica_id, manifest.round, manifest.attempt)
    return [(keys.state_piece(*who, index), shard) for index, shard in enumerate(shards)]
