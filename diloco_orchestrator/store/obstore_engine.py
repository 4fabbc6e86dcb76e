"""Stores that obstore speaks, behind our interface: a local folder now, the clouds by the same class later.

One table translates its errors; retries are `store.retrying`'s.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore

from diloco_orchestrator.errors import ObjectMissing, StoreDenied, StoreError, StoreFull, StoreUnavailable
from diloco_orchestrator.store.base import ObjectInfo

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# A write of obstore's local engine in progress, or one that died: "name#1".
_STAGING = re.compile(r"#\d+$")

# First match decides. obstore tells operating-system errors only by their text.
_BY_TEXT: tuple[tuple[str, type[StoreError], str], ...] = (
    (r"os error 28\b|No space left|os error 122\b", StoreFull, "Free some space; nothing half-written is visible."),
    (r"os error 30\b|os error 13\b|Permission denied", StoreDenied, "Check that this user may write there."),
    (r"timed? ?out|connection|dns|5\d\d |error sending request", StoreUnavailable, "It may pass; it was retried."),
)


class ObstoreEngine:
    """Keeps the promises of `Store` over any obstore store."""

    def __init__(self, store: "ObjectStore", url: str) -> None:
        self._store = store
        self.url = url

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= start:
            return b""
        try:
            if start == 0 and end is None:
                return bytes(obstore.get(self._store, key).bytes())
            size = obstore.head(self._store, key)["size"]
            stop = size if end is None else min(end, size)
            return bytes(obstore.get_range(self._store, key, start=start, end=stop)) if start < stop else b""
        except Exception as error:
            raise self._translated(error, key, "read") from error

    def put(self, key: str, data: bytes) -> None:
        try:
            obstore.put(self._store, key, data, use_multipart=False)
        except Exception as error:
            raise self._translated(error, key, "write") from error

    def create(self, key: str, data: bytes) -> bool:
        try:
            # Multipart uploads have no create-only mode.
            obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except Exception as error:
            raise self._translated(error, key, "create") from error
        return True

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        try:
            found = obstore.list(self._store, prefix or None, offset=start_after or None).collect()
        except Exception as error:
            raise self._translated(error, prefix, "list") from error
        infos = [ObjectInfo(meta["path"], meta["size"]) for meta in found]
        # obstore's local engine lists in directory order and shows its staging files.
        return iter(sorted((i for i in infos if not _STAGING.search(i.key)), key=lambda info: info.key))

    def delete(self, key: str) -> None:
        try:
            obstore.delete(self._store, key)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._translated(error, key, "delete") from error

    def _translated(self, error: Exception, key: str, verb: str) -> StoreError:
        if isinstance(error, FileNotFoundError):
            return ObjectMissing(f"{key} does not exist in {self.url}.")
        text = str(error).split("\n\nDebug source", 1)[0].strip()
        what = f"cannot {verb} {key or 'the folder'} in {self.url}: {text}."
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return StoreDenied(f"{what} Check the credentials and what they allow.")
        for pattern, kind, remedy in _BY_TEXT:
            if re.search(pattern, text, re.IGNORECASE):
                return kind(f"{what} {remedy}")
        return StoreError(what)


def open_local(path: Path) -> ObstoreEngine:
    """The folder `path`, made if it is missing."""
    try:
        return ObstoreEngine(LocalStore(path, mkdir=True), str(path))
    except Exception as error:
        text = str(error).split("\n\nDebug source", 1)[0].strip()
        raise StoreDenied(
            f"cannot open the folder {path} as a store: {text}. Choose a folder that you may write."
        ) from error
