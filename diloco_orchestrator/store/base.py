"""The store interface: five calls on objects of a bucket, with the promises that the protocol relies on.

Engines for real buckets are in the modules beside this one; `store.open_store` chooses one by URL.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from diloco_orchestrator.errors import ConfigError

# Bytes. Nothing that we write is one object above it, but a single tensor that is larger; S3 takes at most 5 GiB in one
# request, and what is encoded, sent and read is in memory as a whole.
OBJECT_LIMIT = 2**30


@dataclass(frozen=True)
class ObjectInfo:
    """Key and size of one object of a store, as a listing returns them."""

    key: str
    size: int  # bytes


def is_folder(prefix: str) -> bool:
    """Whether a prefix can be listed: it is empty or ends in '/'. Below any other one some stores list nothing."""
    return prefix.endswith("/") or not prefix


class Store(ABC):
    """The objects under one prefix of a bucket. Keys are relative, separated by '/', without a leading slash.

    Every call raises `StoreUnavailable` for a transient fault, `StoreDenied` or `StoreFull` for faults that no retry
    corrects, and `StoreError` for all others. Calls may come from several threads and several processes at once.
    """

    url: str  # of the folder, or its path, for messages and for reopening; without credentials

    @abstractmethod
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of the object; fewer if the object ends earlier.

        Raises `ObjectMissing` if it does not exist. A returned object is always complete, also if its writer died: a
        write shows the whole object or nothing.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing an existing one in one step. Safe to repeat."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if none exists. Of any number of racing writers exactly one gets True.

        False means that an object exists. It may be the caller's own, from a call whose reply was lost: `RetryingStore`
        reads the object back to find out.
        """

    @abstractmethod
    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """The objects below `prefix` (empty, or ending in '/') in key order, only keys greater than `start_after`.

        Includes every object whose write returned before the call.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object. Does nothing if it does not exist."""

    # -- what a store may offer beside that ----------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The server's URL, and the account if `url` names none: several servers may have a bucket of the same name.

        Empty (default) for the vendor's own server, and where there is none.
        """
        return ""

    @property
    def requests_allowed(self) -> int | None:
        """Requests in five minutes that all processes of an account may send; None (default) without such a limit."""
        return None

    def open_file(self, key: str) -> IO[bytes] | None:
        """The object as an open file, which can be mapped into memory; None (default) if it is no such file: use `get`.

        The file keeps the object's content after the object was deleted or replaced. Raises as `get` does.
        """
        return None

    def readable_url(self, key: str, lifetime_s: float) -> str:
        """The URL from which anybody can GET an object for `lifetime_s` seconds; for a folder the file's path.

        Raises `ConfigError` if the store cannot sign one, as by default.
        """
        raise ConfigError(f"{self.url} is gone with this process, and nobody else can read from it. Use a bucket.")

    def without_read_back(self) -> "Store":
        """This store with a `create` that reads no existing object: False may then mean our own, whose reply was lost.

        It is for objects of many megabytes whose writer need not know who wrote them, or reads them anyway. Default:
        this store, which reads none.
        """
        return self
