"""`PresignedStore`: the store interface over requests that somebody else has signed, one URL for each object and verb.

For a machine without credentials of the store. It reads the requests from a file (`Requests`), which another process
replaces by newer ones (`join.windows`).
"""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, Self

from diloco_orchestrator.errors import ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.s3_errors import BY_CODE, retry_after_s, store_error
from diloco_orchestrator.store.upload_limits import LEAST_S, OVER, UploadLimits

ENV_REQUESTS = "DILOCO_SIGNED_REQUESTS"  # the path of the file, of a machine with such a link
_TIMEOUT_S = 30.0  # without a byte from the server, of an answer
_CONNECT_S = 10.0
_CODE = re.compile(rb"<Code>(\w+)</Code>")
# Azure's answers to a create of what exists; Azurite has the last one. S3 and GCS answer 412.
_EXISTS = ("BlobAlreadyExists", "UnauthorizedBlobOverwrite", "AuthorizationPermissionMismatch")
# Headers of a request that creates, and of any that writes, by the kind of store.
CREATES = {"s3": {"If-None-Match": "*"}, "az": {"If-None-Match": "*"}, "gs": {"x-goog-if-generation-match": "0"}}
_WRITES = {"az": {"x-ms-blob-type": "BlockBlob"}}
_MOST_BYTES = 64 * 2**20  # of requests, uncompressed

# Keys that this process has written, with their sizes, by the path of the file of requests: what is read lists objects
# as they were when the requests were signed.
_written: defaultdict[str, dict[str, int]] = defaultdict(dict)
_lock = threading.Lock()


@dataclass(frozen=True)
class Requests:
    """Signed requests for the objects below one folder, which existed when they were signed or may be written."""

    ends: float  # seconds since 1970, at which the store accepts the first of them no more
    read: dict[str, tuple[int, str]]  # by key: size in bytes, and URL for GET
    create: dict[str, str]  # by key: URL for PUT with the store's header for that, such as `If-None-Match: *`
    put: dict[str, str]  # by key: URL for PUT, which may overwrite

    def to_bytes(self) -> bytes:
        return zlib.compress(json.dumps(asdict(self), separators=(",", ":")).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The requests that `to_bytes` encoded. Raises `ValueError` for any other bytes."""
        try:
            unpacked = zlib.decompressobj().decompress(data, _MOST_BYTES)
            said = json.loads(unpacked)
            read = {key: (int(size), str(url)) for key, (size, url) in said["read"].items()}
            return cls(float(said["ends"]), read, dict(said["create"]), dict(said["put"]))
        except (zlib.error, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no signed requests: {error}") from None


class PresignedStore(Store):
    """The store interface over the signed requests in `file`, for the folder at `url`.

    It deviates from the interface in one point: it lists and reads others' objects as they were when the newest
    requests were signed, so that those that are younger do not exist yet. To write an object for which no request is
    signed (yet), or to read one that this process has just written, raises `StoreUnavailable`. Deleting, and
    requests that have ended, raise `StoreDenied`. Objects are written in one request each.

    Raises `StoreError` if `file` cannot be read.
    """

    def __init__(self, url: str, file: Path) -> None:
        self.url = url
        self._kind = {"g": "gs", "a": "az"}.get(url[0], "s3")
        self._file = file
        self._limits = UploadLimits()
        self._opener = urllib.request.build_opener(_Http, _Https)
        self._read_at = 0
        self._requests = self._newest()

    def _newest(self) -> Requests:
        try:
            changed = self._file.stat().st_mtime_ns
            if changed != self._read_at:
                self._requests, self._read_at = Requests.from_bytes(self._file.read_bytes()), changed
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read the signed requests for {self.url} in {self._file}: {error}") from error
        return self._requests

    @property
    def _ours(self) -> dict[str, int]:
        return _written[str(self._file)]

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        found = self._newest().read.get(key)
        if found is None and key in self._ours:
            raise StoreUnavailable(f"cannot read {key} in {self.url} yet: no request for it is signed. {_WHO}")
        if found is None:
            raise ObjectMissing(f"{key} does not exist in {self.url}, or came after its requests were signed.")
        if end is not None and end <= start:
            return b""
        headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        status, data = self._send("read", key, found[1], None, headers)
        if status == 416:
            return b""
        if status == 404:
            raise ObjectMissing(f"{key} does not exist in {self.url}.")
        return data if status == 206 or not headers else data[start:end]

    def put(self, key: str, data: bytes) -> None:
        self._send("write", key, self._url_to_write(self._newest().put, key), data, {})
        self._note(key, data)

    def create(self, key: str, data: bytes) -> bool:
        requests = self._newest()
        if key in requests.read or key in self._ours:
            return False
        url = self._url_to_write(requests.create, key)
        status, _ = self._send("create", key, url, data, CREATES[self._kind])
        self._note(key, data)
        return status != 412

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        with _lock:
            found = dict(self._ours)
        found |= {key: size for key, (size, _) in self._newest().read.items()}
        wanted = sorted(key for key in found if key.startswith(prefix) and key > start_after)
        return iter([ObjectInfo(key, found[key]) for key in wanted])

    def delete(self, key: str) -> None:
        raise StoreDenied(f"cannot delete {key} in {self.url}: no request for that is signed for this machine.")

    def _note(self, key: str, data: bytes) -> None:
        with _lock:
            self._ours[key] = len(data)

    def _url_to_write(self, urls: dict[str, str], key: str) -> str:
        if (url := urls.get(key)) is None:
            raise StoreUnavailable(f"cannot write {key} in {self.url} yet: no request for it is signed. {_WHO}")
        return url

    def _send(self, verb: str, key: str, url: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of the answer: of success, or 404, 412 or 416. Raises the store's errors for any other."""
        if data is not None:
            headers = {**headers, "Content-Type": "application/octet-stream", **_WRITES.get(self._kind, {})}
        request = urllib.request.Request(url, data, headers, method="GET" if data is None else "PUT")
        what = f"cannot {verb} {key} in {self.url}"
        try:
            with (
                nullcontext(_TIMEOUT_S) if data is None else self._limits.timed(len(data)) as limit_s,
                self._opener.open(request, timeout=limit_s) as answer,
            ):
                return int(answer.status), answer.read()
        except urllib.error.HTTPError as error:
            body = error.read(2**16)
            code = found[1].decode() if (found := _CODE.search(body)) else ""
            if error.code in (412, 416) or code in ("NoSuchKey", "BlobNotFound"):
                return error.code, b""
            if verb == "create" and code in _EXISTS:
                return 412, b""
            refused = StoreDenied if error.code in (401, 403) else StoreError
            kind, remedy = BY_CODE.get(code or str(error.code), (refused, ""))
            if kind is StoreDenied:
                ends = datetime.fromtimestamp(self._requests.ends, UTC)
                remedy = f"Its signed requests end at {ends:%Y-%m-%d %H:%M} UTC, unless they are renewed. {_WHO}"
            elif error.code in (429, *range(500, 600)) or (error.code == 404 and not code):
                kind = StoreUnavailable
            words = f"{what}: {code or error.code}. {remedy}".rstrip()
            raise store_error(kind, words, retry_after_s(dict(error.headers))) from None
        except (OSError, HTTPException) as error:  # an OSError of urllib's names no URL
            remedy = f". {OVER}" if data and "timed out" in str(error) else ""
            raise StoreUnavailable(f"{what}: {error}{remedy}") from error


class _Watched(HTTPConnection):
    """A connection that ends once the other side takes no bytes for `LEAST_S`, where the system can watch that.

    The time limit of a request is no limit for connecting.
    """

    def connect(self) -> None:
        limit_s, self.timeout = self.timeout, _CONNECT_S
        super().connect()
        self.sock.settimeout(limit_s)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * LEAST_S))


class _WatchedTls(_Watched, HTTPSConnection):
    """The same over TLS."""


class _Http(urllib.request.HTTPHandler):
    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> HTTPResponse:
        return super().do_open(_Watched, req, **options)


class _Https(urllib.request.HTTPSHandler):
    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> HTTPResponse:
        return super().do_open(_WatchedTls, req, **options)


_WHO = "Whoever supervises the run (launch, attach) signs them."
