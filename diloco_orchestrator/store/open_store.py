"""Opens a store by its URL: chooses the engine and wraps it in retries."""

import math
import os
import random
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from diloco_orchestrator.clock import Clock, SystemClock, random_token
from diloco_orchestrator.errors import ConfigError, NoSuchRun, unknown_name
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.presigned import ENV_REQUESTS, PresignedStore
from diloco_orchestrator.store.retrying import RetryingStore, RetryPolicy

# For commands: a person waits for the result, and retries do not correct a misspelt endpoint.
INTERACTIVE = RetryPolicy(first_call_s=10.0)
_OUTAGE_S = 6 * 3600.0  # outages of large stores have lasted for hours
# For replicas: one that ended would be launched again into the same outage, at the cost of its budget of errors.
LASTING = RetryPolicy(total_s=_OUTAGE_S)
# For coordinators: a run whose coordinator has ended relaunches nobody.
SUPERVISING = RetryPolicy(total_s=_OUTAGE_S, first_call_s=10.0)
# For commands that watch a run for days: they cost next to nothing, and whoever started one may not see that it ended.
WATCHING = RetryPolicy(total_s=math.inf, first_call_s=10.0, refused_s=math.inf)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ENGINES = ("auto", "obstore", "fsspec")
_VIA_FSSPEC = "fsspec+"  # before a URL: the same as engine="fsspec", for callers that can pass only a URL
_OBSTORE_CLOUDS = {"gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_HF_BUCKETS = "hf://buckets/"
# In five minutes, of a free account: the Hub states no other limit for its buckets, and no key says which plan one has.
_HF_REQUESTS = 1000

# A known scheme without its colon or slashes, or "://" after what is no scheme.
_NEARLY_A_SCHEME = re.compile(
    r"(s3a?|gc?s|az|abfss?|hf|memory|file|https?|ftp|hdfs)(:(?!//)|//)|[^./~].*://", re.IGNORECASE
)
_NO_FOLDERS = (  # that fsspec opens, and no run can use
    *("data", "dir", "ftp", "git", "github", "hdfs", "http", "https", "jupyter", "reference", "tar", "webhdfs", "zip"),
)

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    engine: str = "auto",
    clock: Clock | None = None,
    rng: random.Random | None = None,
    retry: RetryPolicy | None = None,
    must_exist: bool = False,
    is_leaving: Callable[[], bool] = lambda: False,
) -> Store:
    """Open the store at `url`, with retries of transient faults.

    A folder's path, `file://`, `s3://bucket/x`, `gs://`, `az://`, `hf://buckets/…` go through obstore; `memory://name`
    is shared within this process; every other URL, and any with `engine="fsspec"` or written `fsspec+s3://…`, through
    fsspec.

    Args:
        storage_options: credentials and endpoint as s3fs spells them (key, secret, token, endpoint_url, …).
        engine: "auto", "obstore" or "fsspec".
        clock, rng: for the pauses between retries; by default the system's.
        retry: how long transient faults are retried.
        must_exist: raise `NoSuchRun` for a local folder that does not exist, instead of creating it.
        is_leaving: whether this process was asked to end, so that faults are retried only briefly.

    Raises `ConfigError` for an invalid URL, engine or option, `StoreDenied` if there are no credentials.
    """
    if engine not in _ENGINES:
        raise ConfigError(unknown_name("engine", engine, _ENGINES))
    retry_rng = rng or random.Random(random_token())  # jitter must differ between replicas

    def opened() -> Store:
        return _open_engine(url, storage_options or {}, engine, must_exist)

    return RetryingStore(opened(), clock or SystemClock(), retry_rng, retry, is_leaving=is_leaving, reopen=opened)


def readable_url(url: str, storage_options: Mapping[str, Any] | None, key: str, lifetime_s: float) -> str:
    """The URL from which anybody can read the object `key` of the store at `url` for `lifetime_s` seconds.

    A presigned https URL, which is a credential, or the file's path if the store is a folder. Raises `ConfigError` if
    the store cannot sign one.
    """
    # Through obstore if it can: s3fs signs in a way that newer regions refuse.
    engine = _open_engine(url.removeprefix(_VIA_FSSPEC), storage_options or {}, "auto", must_exist=False)
    return engine.readable_url(key, lifetime_s)


def requests_allowed(url: str) -> int | None:
    """`Store.requests_allowed` of the store at `url`, without opening it."""
    return _HF_REQUESTS if url.startswith(_HF_BUCKETS) else None


def options_elsewhere(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """The storage options with which another machine opens the store at `url` as this one does.

    They are `storage_options` and, for S3, the endpoint and region from this machine's environment or profile.
    """
    plain = url.removeprefix(_VIA_FSSPEC)
    if not plain.startswith(("s3://", "s3a://")):
        return dict(storage_options)
    from diloco_orchestrator.store.s3 import address_of

    if plain == url:
        return {**address_of(storage_options), **storage_options}
    inner = storage_options.get("client_kwargs") or {}
    known = {name: value for name, value in storage_options.items() if name in ("endpoint_url", "profile")} | inner
    kwargs = {**address_of(known), **inner}  # s3fs passes these to botocore
    return {**storage_options, "client_kwargs": kwargs} if kwargs else dict(storage_options)


def _open_engine(url: str, options: Mapping[str, Any], engine: str, must_exist: bool) -> Store:
    if not url:
        raise ConfigError("the store's URL is empty. Give a folder, such as runs/first, or s3://bucket/folder.")
    check_address(url)
    url = _plain(url)
    found = _SCHEME.match(url)
    scheme = found[1] if found else ""
    who, at, _ = urlsplit(url).netloc.partition("@") if found else ("", "", "")
    if at and (":" in who or not scheme.startswith(("abfs", "wasb"))):  # container@account
        raise ConfigError(
            f"the {scheme} URL holds a user name or password, which would be seen in logs and process lists. Leave it "
            "out and pass storage_options."
        )
    if engine == "fsspec" or scheme.startswith(_VIA_FSSPEC):
        from diloco_orchestrator.store.fsspec_engine import open_fsspec

        return open_fsspec(url.removeprefix(_VIA_FSSPEC), options, name=_VIA_FSSPEC + url.removeprefix(_VIA_FSSPEC))
    if scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(url, MemoryStore(url))
    if scheme in ("", "file"):
        return _open_folder(url, bool(scheme), options, must_exist)
    if scheme in ("s3", "s3a", *_OBSTORE_CLOUDS) and (requests := os.environ.get(ENV_REQUESTS)):
        return PresignedStore(url.rstrip("/"), Path(requests))
    if scheme in ("s3", "s3a"):
        from diloco_orchestrator.store.s3 import open_s3

        return open_s3(url, options)
    if url.startswith(_HF_BUCKETS):
        from diloco_orchestrator.store.s3 import open_hf

        return open_hf(url, options, _HF_REQUESTS)
    if scheme in _OBSTORE_CLOUDS:
        from diloco_orchestrator.store.obstore_engine import open_cloud

        kind = scheme if at else _OBSTORE_CLOUDS[scheme]
        return open_cloud(url.replace(f"{scheme}://", f"{kind}://", 1), options)
    return _open_by_fsspec(url, scheme, options)


def _open_folder(url: str, is_url: bool, options: Mapping[str, Any], must_exist: bool) -> Store:
    from diloco_orchestrator.store.obstore_engine import open_local

    if options:
        raise ConfigError(f"storage_options {sorted(options)} mean nothing to the folder {url}. Leave them out.")
    path = (Path(urlsplit(url).path) if is_url else Path(url).expanduser()).resolve()
    if must_exist and not path.is_dir():
        raise NoSuchRun(f"there is no folder {path}. Check the address; a run is one folder.")
    # A new run is its user's alone. To share it, chmod it, or make its folder first.
    with suppress(OSError):  # which the engine meets too, and explains
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open_local(path)


def _open_by_fsspec(url: str, scheme: str, options: Mapping[str, Any]) -> Store:
    from fsspec import available_protocols

    from diloco_orchestrator.store.fsspec_engine import open_fsspec

    known = {"memory", "file", "s3", *_OBSTORE_CLOUDS, *available_protocols()}
    if scheme not in known:
        raise ConfigError(unknown_name("store scheme", scheme, known))
    return open_fsspec(url, options, name=url)


def check_address(url: str) -> None:
    """Raise `ConfigError` for a URL that stores would read as another one, or whose store can hold no run.

    The former are such as "s3:/b", "s3//b" and "file://runs/a", or have "#", "?", ".." or an empty part; the latter
    have no create-only writes. Also for bytes that are no text, which obstore ends this process for.
    """
    if url != url.encode(errors="replace").decode():
        raise ConfigError(f"{url!a} is no UTF-8. Rename that folder, or, if others show its name, set LC_ALL=C.UTF-8.")
    if (scheme := _SCHEME.match(url)) is None:
        if (found := _NEARLY_A_SCHEME.match(url)) is not None:
            meant = (found[1] or "s3").lower()
            raise ConfigError(f"{url} is no URL, and hardly a folder: write {meant}://…, or ./{url} for the folder.")
        return
    name, rest = scheme[1].lower().removeprefix(_VIA_FSSPEC), url[scheme.end() :]
    if name in _NO_FOLDERS:
        raise ConfigError(
            f"{name}:// can hold no run: it has no create-only writes. Use s3://, gs://, az:// or a folder."
        )
    if (bad := next((each for each in "#?" if each in rest), "")) and name != "memory":
        raise ConfigError(
            f"{url} holds {bad!r}, where a URL's path ends: the run would lie in {url.partition(bad)[0]}. Choose a "
            f"folder without {bad!r}."
        )
    if name == "file" and unquote(rest) != rest:  # a space to RFC 8089 and to pathlib, three characters to other stores
        raise ConfigError(
            f"{url} holds an escape, which stores read in different ways. Write the path: {unquote(rest)}"
        )
    host, _, path = rest.partition("/")
    if name == "file" and host not in ("", "localhost"):
        raise ConfigError(f"{url} names the machine {host!r}. Write the path, {rest}, or file:///…")
    wrong = next((part for part in path.strip("/").split("/") if part in (".", "..", "")), None)
    if path.strip("/") and wrong is not None and name not in ("memory", "file"):
        raise ConfigError(
            f"{url} holds {(wrong or '/')!r} as a part of its path, which stores read in different ways. Write the "
            "folder's name without it."
        )


def absolute_url(url: str) -> str:
    """`url` in a form that is valid in every process: a local path is made absolute, any other URL is unchanged."""
    check_address(url)
    return _plain(url) if _SCHEME.match(url) else str(Path(url).expanduser().resolve())


def _plain(url: str) -> str:
    """`url` with its scheme in small letters, so that one store has one URL."""
    return scheme[0].lower() + url[scheme.end() :] if (scheme := _SCHEME.match(url)) else url
