"""The store interface: five calls on named bytes, with the promises that the protocol rests on.

Knows no URL and no vendor; `open_store` in `diloco_orchestrator.store` picks an engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class ObjectInfo:
    """One entry of a listing."""

    key: str
    size: int  # bytes


class Store(Protocol):
    """Objects under one prefix of a bucket. Keys are relative, '/'-separated, without leading slash.

    Every call raises `StoreUnavailable` for a transient fault, `StoreDenied` and `StoreFull` for what no retry mends,
    `StoreError` for the rest. All calls may be made from several threads and several processes.
    """

    @property
    def url(self) -> str:
        """Where the objects are, without credentials, for messages."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of the newest complete version; shorter where the object ends earlier.

        Raises `ObjectMissing` if there is none. Never a torn object: a writer that died left nothing.
        """
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write the object whole, replacing any. Safe to repeat."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if there is none: of any number of racing writers exactly one gets True.

        False means that somebody's object stands there, perhaps our own from a call whose reply was lost; the
        retrying store settles that case by reading back.
        """
        ...

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below `prefix` (empty, or ending in '/') in key order, only keys greater than `start_after`.

        Sees every object whose write had returned before the call.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the object; no error if it is gone already."""
        ...


@runtime_checkable
class GivesUrls(Protocol):
    """A store whose objects somebody else can be let read."""

    def readable_url(self, key: str, lifetime_s: float) -> str:
        """Where to GET an object for so many seconds; a file's path for a folder."""
        ...
