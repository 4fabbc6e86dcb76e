"""The digest of bulk bytes: payload shards, saved states, snapshot files and bases. Records are hashed with sha256.

blake3 hashes ten times as many bytes in a second as sha256 where the CPU has no instructions for that. A digest in a
record says which it is: `b3:` and 64 hex digits for blake3, 64 hex digits alone for sha256. Every digest of bulk bytes
is computed here.
"""

from typing import Annotated, TypeAlias

from blake3 import blake3
from pydantic import Field

BulkDigest: TypeAlias = Annotated[str, Field(pattern=r"^b3:[0-9a-f]{64}$")]  # str in code; records check its form
_PREFIX = "b3:"


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
