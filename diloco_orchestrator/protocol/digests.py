"""Digests: sha256 of records, blake3 of bulk bytes, which are payload shards, saved states, snapshot files and bases.

blake3 hashes ten times as many bytes in a second as sha256 where the CPU has no instructions for that. A digest in a
record says which it is: `b3:` and 64 hex digits for blake3, 64 hex digits alone for sha256. Every digest of bulk bytes
is computed here.
"""

import hashlib
from typing import Annotated, TypeAlias

from blake3 import blake3
from pydantic import Field

Sha256 = str  # 64 lowercase hex digits
BulkDigest: TypeAlias = Annotated[str, Field(pattern=r"^b3:[0-9a-f]{64}$")]  # str in code; records check its form
_PREFIX = "b3:"


def sha256_hex(data: bytes | memoryview) -> Sha256:
    """The digest of a record's bytes."""
    return hashlib.sha256(data).hexdigest()


class BulkHasher:
    """A digest under way, of no bytes yet."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def update(self, data: bytes | memoryview, /) -> None:
        """Append bytes."""
        self._hasher.update(data)

    def digest(self) -> BulkDigest:
        """The digest of all bytes so far."""
        return _PREFIX + self._hasher.hexdigest()


def bulk_digest(data: bytes | memoryview) -> BulkDigest:
    """The digest of `data`."""
    return _PREFIX + blake3(data).hexdigest()
