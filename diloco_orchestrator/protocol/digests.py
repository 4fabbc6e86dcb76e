"""Digests: sha256 for records; blake3 for bulk bytes (payload shards, saved states, snapshot files, bases).

blake3 hashes ten times as many bytes a second as sha256 on a CPU without sha256 instructions. In records a blake3
digest is `b3:` and 64 hex digits, a sha256 is 64 hex digits alone. All digests of bulk bytes are computed here.
"""

import hashlib
from typing import Annotated, TypeAlias

from blake3 import blake3
from pydantic import Field

Sha256 = str  # 64 lowercase hex digits
BulkDigest: TypeAlias = Annotated[str, Field(pattern=r"^b3:[0-9a-f]{64}$")]  # str in code; records check its form
_PREFIX = "b3:"


def sha256_hex(data: bytes | memoryview) -> Sha256:
    """The sha256 of `data`, the exact bytes of a record, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


class BulkHasher:
    """An incremental blake3 digest, at first of no bytes."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def update(self, data: bytes | memoryview, /) -> None:
        """Append `data` to the bytes that are hashed."""
        self._hasher.update(data)

    def digest(self) -> BulkDigest:
        """The digest of all bytes so far."""
        return _PREFIX + self._hasher.hexdigest()


def bulk_digest(data: bytes | memoryview) -> BulkDigest:
    """The blake3 digest of `data`, as `b3:` and 64 hex digits."""
    return _PREFIX + blake3(data).hexdigest()
