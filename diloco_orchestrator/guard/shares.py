"""Splits held-out items into N fixed shares by their content, and assigns the shares to a round's replicas."""

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from typing import Any


def content_hash(item: Any) -> str:
    """The sha256 of an item's content, the same on every machine.

    An item may be text (hashed in Unicode form NFC), bytes, a tensor, an array or a JSON value. Raises `TypeError` for
    anything else.
    """
    kind, data = canonical(item)
    return hashlib.sha256(kind.encode() + b"\0" + data).hexdigest()


def canonical(item: Any) -> tuple[str, bytes]:
    """(kind of item, bytes of its content), equal on every machine. Raises `TypeError` for other objects."""
    if isinstance(item, str):
        return "text", unicodedata.normalize("NFC", item).encode()
    if isinstance(item, bytes | bytearray | memoryview):
        return "bytes", bytes(item)
    if hasattr(item, "detach"):
        item = item.detach().cpu().numpy()
    if hasattr(item, "tobytes") and hasattr(item, "dtype"):
        if getattr(item.dtype, "hasobject", False):  # its bytes are addresses in this process's memory
            raise TypeError(
                "a held-out item is an array of objects, which has no canonical content. Use item.tolist(), or numbers."
            )
        return f"array {item.dtype} {tuple(item.shape)}", item.tobytes()
    try:
        return "json", json.dumps(item, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a held-out item of type {type(item).__name__} has no canonical content ({error}). Use text, bytes, "
            "tensors, arrays, or what JSON can hold."
        ) from None


def set_digest(items: Sequence[Any]) -> str:
    """The sha256 over the sorted content hashes of a held-out set, whatever the order of its items."""
    return hashlib.sha256("".join(sorted(map(content_hash, items))).encode()).hexdigest()


def shares_of(items: Sequence[Any], n: int) -> list[list[Any]]:
    """The n shares of a held-out set: items sorted by content hash, share i has every n-th item from the i-th on."""
    ordered = sorted(items, key=content_hash)
    return [ordered[share::n] for share in range(n)]


def deal(n: int, roster: Sequence[int]) -> dict[int, list[int]]:
    """Replica id -> the shares of held-out items that it scores, for the replicas on the roster (who takes part).

    A replica scores its own share; shares of replicas off the roster go to the others in turn.
    """
    present = sorted(set(roster))
    dealt = {replica_id: [replica_id] if replica_id < n else [] for replica_id in present}
    orphans = [share for share in range(n) if share not in dealt] if present else []
    for index, share in enumerate(orphans):
        dealt[present[index % len(present)]].append(share)
    return dealt
