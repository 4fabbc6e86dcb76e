"""Opens stores from URLs and checks at start that one keeps its promises."""

import random
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from diloco_orchestrator.clock import Clock, SystemClock, random_token
from diloco_orchestrator.errors import ConfigError, NoSuchRun, StoreError, unknown_name
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.retrying import RetryingStore, RetryPolicy

__all__ = ["MemoryStore", "ObjectInfo", "RetryPolicy", "RetryingStore", "Store", "open_store", "probe"]

_SCHEMES = ("memory", "file")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    must_exist: bool = False,
) -> Store:
    """The store at `url`: a folder's path, `file:///…`, or `memory://name` (shared within this process).

    Transient faults are retried. Raises `ConfigError` for a URL that cannot be meant, and with `must_exist`
    `NoSuchRun` instead of making a folder that is not there.
    """
    retry_rng = rng or random.Random(random_token())  # jitter must differ between replicas
    engine = _open_engine(url, storage_options or {}, must_exist)
    return RetryingStore(engine, clock or SystemClock(), retry_rng)


def _open_engine(url: str, storage_options: Mapping[str, Any], must_exist: bool) -> Store:
    if not url:
        raise ConfigError("the store's URL is empty. Give a folder, such as runs/first.")
    scheme = _SCHEME.match(url)
    if scheme and scheme[1] == "memory":
        with _memory_lock:
            return _memory.setdefault(url, MemoryStore(url))
    if scheme and scheme[1] != "file":
        raise ConfigError(
            f"cannot open {scheme[0]}…: {unknown_name('store scheme', scheme[1], _SCHEMES)}. "
            "A path, file:// and memory:// work in this version."
        )
    if storage_options:
        raise ConfigError(
            f"storage_options {sorted(storage_options)} mean nothing to the folder {url}. Leave them out."
        )
    from diloco_orchestrator.store.obstore_engine import open_local

    path = (Path(unquote(urlsplit(url).path)) if scheme else Path(url).expanduser()).resolve()
    if must_exist and not path.is_dir():
        raise NoSuchRun(f"there is no folder {path}. Check the address; a run is one folder.")
    return open_local(path)


def absolute_url(url: str) -> str:
    """`url` in a form that means the same in every process: local paths made absolute."""
    return url if _SCHEME.match(url) else str(Path(url).expanduser().resolve())


def probe(store: Store) -> None:
    """Raise `StoreError` unless the store can be written, listed, and honours create-only. Leaves nothing behind."""
    key = f".probe/{random_token()}"
    try:
        first, second = store.create(key, b"1"), store.create(key, b"2")
        listed = [info.key for info in store.list(".probe/")]
        if not first or second or store.get(key) != b"1":
            raise StoreError(
                f"{store.url} ignores create-only writes (a second create of {key} replaced the first), so two "
                "replicas could both end a round. Use a store that honours If-None-Match, such as S3, GCS, R2 or MinIO."
            )
        if key not in listed:
            raise StoreError(f"{store.url} does not list {key} right after it was written; rounds could not be seen.")
    finally:
        store.delete(key)
