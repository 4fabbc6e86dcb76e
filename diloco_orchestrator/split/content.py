"""Identity of items: their canonical content and its hash, and the Merkle root of a set of hashes.

Held-out and training items are compared by these hashes, which ignore white space. `guard.shares`, which assigns
held-out items to replicas, distinguishes items by white space.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from typing import Any

from diloco_orchestrator.guard.shares import canonical

ItemHash = bytes  # 32


def item_hash(item: Any) -> ItemHash:
    """The sha256 of an item's canonical content, the same on every machine.

    Text is brought to Unicode form NFC and its runs of white space to one space, also within JSON values. Bytes,
    tensors and arrays are compared exactly. Raises `TypeError` for anything else.
    """
    if isinstance(item, str):  # by far the most frequent kind
        return hashlib.sha256(b"text\0" + _normalised(item).encode()).digest()
    kind, data = canonical(_normalised(item))
    return hashlib.sha256(kind.encode() + b"\0" + data).digest()


def kind_of(item: Any) -> str:
    """The kind of the item: "text", "bytes", "array" or "json". Only items of one kind can be equal."""
    if isinstance(item, str):
        return "text"
    if isinstance(item, bytes | bytearray | memoryview):
        return "bytes"
    return "array" if hasattr(item, "detach") or hasattr(item, "tobytes") else "json"


def _normalised(item: Any) -> Any:
    if isinstance(item, str):
        return " ".join((item if item.isascii() else unicodedata.normalize("NFC", item)).split())
    if isinstance(item, dict):
        return {_normalised(name): _normalised(value) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [_normalised(each) for each in item]
    return item


def merkle_root(hashes: Iterable[ItemHash]) -> str:
    """The Merkle tree hash of RFC 6962 (section 2.1) over the sorted distinct hashes, as 64 hex digits."""
    level = [hashlib.sha256(b"\0" + each).digest() for each in sorted(set(hashes))]
    if not level:
        return hashlib.sha256(b"").hexdigest()
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        # An odd node moves up as it is: for n leaves this is RFC 6962's tree, whose left part is a power of two.
        level = [hashlib.sha256(b"\1" + pair[0] + pair[1]).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].hex()
