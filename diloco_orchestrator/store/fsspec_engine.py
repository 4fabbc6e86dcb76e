"""`FsspecEngine`: the store interface over any fsspec filesystem; for S3 that is s3fs.

It is slower than obstore, and its creates are only as exclusive as the filesystem's own: `probe` races some creates
before a run starts.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from diloco_orchestrator.clock import random_token
from diloco_orchestrator.errors import (
    ConfigError,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.s3 import is_anonymous, pays_for_requests, plain_endpoint
from diloco_orchestrator.store.s3_errors import BY_CODE, FOREIGN_404, THROTTLED, retry_after_s, store_error

T = TypeVar("T")

_CALL_S = 900.0  # the longest call, as obstore's: a shard on a slow link may take minutes
_STAGING = "#"  # part of the name of a local file that is being written

_BY_ERRNO: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOSPC: (StoreFull, "Free some space there."),
    errno.EDQUOT: (StoreFull, "The quota is used up."),
    errno.EROFS: (StoreFull, "The file system is read-only: see why (dmesg), and mount it for writing again."),
    errno.EIO: (StoreUnavailable, "The disk or its file server fails: see dmesg."),
    errno.ESTALE: (StoreUnavailable, "The disk or its file server fails: see dmesg."),
    errno.EACCES: (StoreDenied, "Check the credentials and what they allow."),
    errno.EPERM: (StoreDenied, "Check the credentials and what they allow."),
    errno.EREMOTEIO: (StoreUnavailable, "The server failed."),  # s3fs raises it for a 500
    errno.EBUSY: (StoreUnavailable, THROTTLED),  # s3fs raises it for SlowDown
}

# Names of error classes or of their bases, because aiohttp and botocore need not be installed.
_TRANSIENT = {"ConnectionError", "TimeoutError", "ClientConnectionError", "HTTPClientError", "ClientPayloadError"}


class FsspecEngine(Store):
    """The store interface over an fsspec filesystem. On a local disk creates are exclusive by an atomic rename."""

    def __init__(self, filesystem: AbstractFileSystem, root: str, url: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self.url = url
        self._local = isinstance(filesystem, LocalFileSystem)
        # Else fsspec waits for its own thread without end, whatever became of the request there.
        self._bound = {"timeout": _CALL_S} if isinstance(filesystem, AsyncFileSystem) else {}

    @property
    def endpoint(self) -> str:
        """The URL of the S3 endpoint; empty for Amazon's own and for other file systems."""
        client = getattr(self._fs, "s3", None)
        return plain_endpoint(str(client.meta.endpoint_url)) if client else ""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= start:
            return b""
        if start == 0:
            return self._do("read", key, lambda path: self._from_start(path, end))
        return self._do("read", key, lambda path: self._range(path, start, end))

    def _from_start(self, path: str, end: int | None) -> bytes:
        """The first `end` bytes of an object, or all, in one request: a heartbeat may change between two."""
        if end is None:
            return bytes(self._fs.cat_file(path, **self._bound))
        try:
            return bytes(self._fs.cat_file(path, start=0, end=end, **self._bound))
        except FileNotFoundError:
            raise
        except Exception as error:  # servers refuse every range of an empty object, each file system in its own way
            passes = isinstance(self._translated(error, path, "read"), StoreUnavailable | StoreDenied)
            if passes or self._fs.info(path, **self._bound)["size"]:
                raise
            return b""

    def _range(self, path: str, start: int, end: int | None) -> bytes:
        size = self._fs.info(path, **self._bound)["size"]
        stop = size if end is None else min(end, size)
        return bytes(self._fs.cat_file(path, start=start, end=stop, **self._bound)) if start < stop else b""

    def put(self, key: str, data: bytes) -> None:
        if self._local:
            self._do("write", key, lambda path: self._staged(path, data, os.replace))
        else:
            self._do("write", key, lambda path: self._fs.pipe_file(path, data, **self._bound))

    def create(self, key: str, data: bytes) -> bool:
        try:
            if self._local:
                self._do("create", key, lambda path: self._staged(path, data, os.link))
            else:
                self._do("create", key, lambda path: self._fs.pipe_file(path, data, mode="create", **self._bound))
        except _Exists:
            return False
        return True

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        found = self._do("list", prefix, self._files_below)
        keys = ((path[len(self._root) :].lstrip("/"), info["size"]) for path, info in found.items())
        wanted = [ObjectInfo(k, size) for k, size in keys if k.startswith(prefix) and k > start_after]
        return iter(sorted((i for i in wanted if not self._is_staging(i.key)), key=lambda info: info.key))

    def delete(self, key: str) -> None:
        try:
            self._do("delete", key, lambda path: self._fs.rm_file(path, **self._bound))
        except ObjectMissing:
            return

    def readable_url(self, key: str, lifetime_s: float) -> str:
        """The presigned URL for GET; on a local disk the path. Raises `ConfigError` if the filesystem cannot sign."""
        path = f"{self._root}/{key}"
        if self._local:
            return path
        try:
            return str(self._fs.sign(path, expiration=round(lifetime_s)))
        except NotImplementedError:
            raise ConfigError(
                f"{self.url} cannot give out addresses for reading, by which replicas on other machines get the run's "
                "code. Use s3://, gs:// or az://."
            ) from None

    def _files_below(self, path: str) -> dict[str, Any]:
        try:
            return dict(self._fs.find(path.rstrip("/"), detail=True, **self._bound))
        except FileNotFoundError as error:
            if _server_code(error):  # a server lists a folder without objects as empty
                raise
            return {}

    # -- a local disk: fsspec's own create checks first and writes then, which is no compare-and-set ------------------

    def _staged(self, path: str, data: bytes, publish: Callable[[Path, Path], None]) -> None:
        """Write `data` to a temporary file beside `path`; then `publish(temporary, path)` renames it atomically."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{target.name}{_STAGING}{random_token()}")
        try:
            draft.write_bytes(data)
            publish(draft, target)
        finally:
            draft.unlink(missing_ok=True)

    def _is_staging(self, key: str) -> bool:
        return self._local and _STAGING in key.rpartition("/")[2]

    # -- errors ---------------------------------------------------------------------------------------------------

    def _do(self, verb: str, key: str, call: Callable[[str], T]) -> T:
        try:
            return call(f"{self._root}/{key}")
        except FileExistsError as error:
            raise _Exists from error
        except FileNotFoundError as error:
            if _is_foreign(error):
                raise self._translated(error, key, verb) from error
            if _no_bucket(error) or verb not in ("read", "delete"):
                raise StoreError(
                    f"cannot {verb} {key or 'the folder'} in {self.url}: "
                    f"{'there is no such bucket' if _no_bucket(error) else 'not found'}. "
                    "Check the bucket's name and the endpoint."
                ) from error
            raise ObjectMissing(f"{key} does not exist in {self.url}.") from error
        except Exception as error:  # each file system raises its own kinds
            # s3fs knows such a reply only by the field Condition, which Ceph's gateway does not send.
            if verb == "create" and _server_code(error) in ("PreconditionFailed", "412"):
                raise _Exists from error
            raise self._translated(error, key, verb) from error

    def _translated(self, error: Exception, key: str, verb: str) -> StoreError:
        what = f"cannot {verb} {key or 'the folder'} in {self.url}:"
        if _is_foreign(error):
            return StoreUnavailable(f"{what} {FOREIGN_404}")
        code = _server_code(error)
        text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        # botocore's words for a reply without S3's XML are "An error occurred ()".
        what = f"{what} {f'HTTP {code}' if code.isdecimal() else text}."
        if {kind.__name__ for kind in type(error).__mro__} & _TRANSIENT:
            return StoreUnavailable(what)
        metadata = getattr(_reply(error), "response", {}).get("ResponseMetadata", {})
        after_s = retry_after_s(metadata.get("HTTPHeaders", {}))
        if code in BY_CODE:
            kind, remedy = BY_CODE[code]
            return store_error(kind, f"{what} {remedy}", after_s)
        if code == "429" or (code.isdecimal() and code >= "500"):
            return StoreUnavailable(f"{what} The server failed, or a proxy before it.", after_s)
        if isinstance(error, OSError) and error.errno in _BY_ERRNO:
            kind, remedy = _BY_ERRNO[error.errno]
            return store_error(kind, f"{what} {remedy}", after_s)
        if isinstance(error, PermissionError) or "credentials" in text.lower():
            return StoreDenied(f"{what} Check the credentials and what they allow.")
        return StoreError(what)


def _reply(error: BaseException | None) -> BaseException | None:
    """botocore's error that holds the server's reply, which s3fs keeps as the cause of its own; None without one."""
    while error is not None and not isinstance(getattr(error, "response", None), dict):
        error = error.__cause__
    return error


def _server_code(error: BaseException) -> str:
    """The S3 error code in the server's reply, or its HTTP status if it has none; empty if no server replied."""
    response = getattr(_reply(error), "response", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return str(response.get("Error", {}).get("Code") or status)


def _is_foreign(error: BaseException) -> bool:
    """Whether an error is a 404 with a body but without a code of S3's. The answer to HEAD never has a body."""
    reply = _reply(error)
    headers = getattr(reply, "response", {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
    is_head = str(getattr(reply, "operation_name", "")).startswith("Head")
    return _server_code(error) == "404" and headers.get("content-length", "0") != "0" and not is_head


class _Exists(StoreError):
    """The object to create exists already. Used only within this file."""


def _no_bucket(error: FileNotFoundError) -> bool:
    return _server_code(error) == "NoSuchBucket" or "bucket does not exist" in str(error)


def _session(profile: str | None) -> Any:
    """An aiobotocore session that sends bodies at once.

    botocore lets every body wait until the server has answered `100 Continue`. aiohttp waits for that answer without
    end, and some servers and proxies never send it. None without aiobotocore.
    """
    try:
        from aiobotocore.session import AioSession  # type: ignore[import-untyped]
        from botocore.handlers import add_expect_header  # type: ignore[import-untyped]
    except ImportError:
        return None  # fsspec says what is missing
    session = AioSession(profile=profile)
    session.unregister("before-call.s3", add_expect_header)
    return session


def open_fsspec(url: str, options: Mapping[str, Any], name: str) -> FsspecEngine:
    """The store at any URL that fsspec knows. `name`: the URL that opens it again.

    Listing caches are off, because a listing must include what was just written. Raises `ConfigError` for an unknown
    protocol, invalid options or a missing package.
    """
    protocol = url.partition("://")[0]
    extra: dict[str, Any] = {}
    if protocol in ("s3", "s3a"):
        # A retry inside s3fs, after the reply to our create was lost, would report the object as somebody else's.
        extra |= {"session": _session(options.get("profile")), "anon": is_anonymous()}
        extra["requester_pays"] = pays_for_requests()
        extra["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "read_timeout": 30, "connect_timeout": 10}
    try:
        filesystem, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **{**extra, **options}
        )
    except ImportError as error:
        raise ConfigError(f"cannot open {url}: {error}.") from None
    except ValueError as error:
        raise ConfigError(
            f"cannot open {url}: {error}. Use a path, s3://, gs://, az:// or a URL of fsspec's."
        ) from None
    if protocol in ("s3", "s3a"):
        filesystem.retries = 1
    return FsspecEngine(filesystem, str(root), name.rstrip("/"))
