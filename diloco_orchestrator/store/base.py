"""The store interface: five calls on objects of a bucket, with the promises that the protocol relies on.

Engines for real buckets are in the modules beside this one; `store.open_store` chooses one by URL.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Protocol, runtime_checkable

# Bytes. Nothing that we write is one object above it, but a single tensor that is larger; S3 takes at most 5 GiB in one
# request, and what is encoded, sent and read is in memory as a whole.
OBJECT_LIMIT = 2**30


@dataclass(frozen=True)
class ObjectInfo:
    """Key and size of one object of a store, as a listing returns them."""

    key: str
    size: int  # bytes


class Store(Protocol):
    """The objects under one prefix of a bucket. Keys are relative, separated by '/', without a leading slash.

    Every call raises `StoreUnavailable` for a transient fault, `StoreDenied` or `StoreFull` for faults that no retry
    corrects, and `StoreError` for all others. Calls may come from several threads and several processes at once.
    """

    @property
    def url(self) -> str:
        """The URL or path of the folder, for messages and for reopening; without credentials."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of the object; fewer if the object ends earlier.

        Raises `ObjectMissing` if it does not exist. A returned object is always complete, also if its writer died: a
        write shows the whole object or nothing.
        """
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing an existing one in one step. Safe to repeat."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if none exists. Of any number of racing writers exactly one gets True.

        False means that an object exists. It may be the caller's own, from a call whose reply was lost: `RetryingStore`
        reads the object back to find out.
        """
        ...

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """The objects below `prefix` (empty, or ending in '/') in key order, only keys greater than `start_after`.

        Includes every object whose write returned before the call.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete the object. Does nothing if it does not exist."""
        ...


@runtime_checkable
class GivesUrls(Protocol):
    """A store that can return a URL from which others read one object."""

    def readable_url(self, key: str, lifetime_s: float) -> str:
        """The URL from which anybody can GET an object for `lifetime_s` seconds; for a folder the file's path."""
        ...


@runtime_checkable
class KnowsEndpoint(Protocol):
    """A store whose URL alone does not determine it: several servers may have a bucket of the same name."""

    @property
    def endpoint(self) -> str:
        """The server's URL, and the account if the URL names none; empty for the vendor's own server."""
        ...


def endpoint_of(store: Store) -> str:
    """The URL of the server that a store is on; empty if the store's own URL names it or it has none."""
    return store.endpoint if isinstance(store, KnowsEndpoint) else ""


@runtime_checkable
class OpensFiles(Protocol):
    """A store whose objects are local files, which can be mapped into memory instead of copied."""

    def open_file(self, key: str) -> IO[bytes] | None:
        """The object as an open file; None if this store's objects are no files that are safe to map: use `get`.

        The file keeps the object's content after the object was deleted or replaced. Raises as `get` does.
        """
        ...


def open_file(store: Store, key: str) -> IO[bytes] | None:
    """The object as an open file, if the store is a folder whose files can be mapped into memory; else None."""
    return store.open_file(key) if isinstance(store, OpensFiles) else None
