"""The digest of bulk bytes: payload shards, saved states and the base. Records are hashed by `records.sha256_hex`.

Every digest of bulk bytes is computed here, so that another hash function is a change of one line.
"""

import hashlib
from typing import Protocol


class BulkHasher(Protocol):
    """A digest under way."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Append bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest of all bytes so far, in lowercase hex."""
        ...


def bulk_hasher() -> BulkHasher:
    """A digest of no bytes yet: sha256."""
    return hashlib.sha256()


def bulk_digest(data: bytes | memoryview) -> str:
    """The digest of `data`."""
    hasher = bulk_hasher()
    hasher.update(data)
    return hasher.hexdigest()
