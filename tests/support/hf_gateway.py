"""A look-alike of the S3 gateway of Hugging Face's storage buckets, with its documented quirks, over `signed_s3`.

Paths are /NAMESPACE/BUCKET/KEY. A GET by an agent that it does not know is sent on to a CDN, a second port that refuses
a request with an Authorization header. A condition counts on PutObject alone: of uploads in parts that race all win.
Refused are keys with empty, "." or ".." parts, session tokens, user metadata, aws-chunked bodies, trailing checksums,
listings of version 1 or by another delimiter than "/", and bulk deletes, of which the documentation says nothing.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from signed_s3 import KEY, SECRET, GuardedServer, _Guarded

NAMESPACE = "lab"
_DIRECT = ("aws-cli", "botocore", "aws-sdk-rust")  # agents that get bodies from the gateway itself


class GatewayServer(GuardedServer):
    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Gateway
        self.cdn = ThreadingHTTPServer(("127.0.0.1", 0), _Cdn)
        self.cdn.objects = self.objects  # type: ignore[attr-defined]
        self.redirected = 0  # GETs that were sent to the CDN


@dataclass(frozen=True)
class HfGateway:
    """A running gateway, as its user sees it."""

    server: GatewayServer

    def url(self, bucket: str) -> str:
        return f"hf://buckets/{NAMESPACE}/{bucket}/some/folder"

    def options(self) -> dict[str, str]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{self.server.server_port}"}


@contextmanager
def running_hf_gateway() -> Iterator[HfGateway]:
    """A gateway and its CDN, in threads of this process."""
    with GatewayServer() as server, server.cdn as cdn:
        threads = [threading.Thread(target=each.serve_forever) for each in (server, cdn)]
        for thread in threads:
            thread.start()
        try:
            yield HfGateway(server)
        finally:
            server.shutdown()
            cdn.shutdown()
            for thread in threads:
                thread.join()


class _Gateway(_Guarded):
    server: GatewayServer

    def _refusal(self, body: bytes) -> str:
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        namespace, _, key = unquote(split.path).removeprefix("/").partition("/")
        names = {name.lower() for name in self.headers}
        if namespace != NAMESPACE:
            return "AccessDenied"
        if "x-amz-security-token" in names:
            return "InvalidToken"
        if set(key.rstrip("/").split("/")) & {"", ".", ".."}:
            return "InvalidArgument"
        streamed = "aws-chunked" in self.headers.get("Content-Encoding", "") or "x-amz-trailer" in names
        if streamed or any(name.startswith("x-amz-meta-") for name in names):
            return "NotImplemented"
        is_list = self.command == "GET" and "/" not in key.rstrip("/")
        if is_list and (query.get("list-type") != "2" or query.get("delimiter", "/") != "/"):
            return "NotImplemented"
        return "NotImplemented" if "delete" in query else super()._refusal(body)

    def _get(self, key: str) -> None:
        agent = self.headers.get("User-Agent", "")
        if self.command == "HEAD" or agent.startswith(_DIRECT) or self.server.objects.get(key) is None:
            return super()._get(key)
        self.server.redirected += 1
        path = urlsplit(self.path).path
        return self._reply(302, headers={"Location": f"http://127.0.0.1:{self.server.cdn.server_port}{path}"})

    def _post(self, key: str, query: dict[str, str], create: bool, body: bytes) -> None:
        super()._post(key, query, False, body)  # a condition on CompleteMultipartUpload is not heard


class _Cdn(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.server.objects.get(unquote(self.path).removeprefix("/"))  # type: ignore[attr-defined]
        status, first, last = 400 if "Authorization" in self.headers else 200, 0, len(body)
        if status == 200 and (wanted := self.headers.get("Range")):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            status, first, last = 206, int(begin), min(int(end) + 1 if end else last, last)
            status = 206 if first < last else 416
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(body)}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        part = body[first:last] if status < 400 else b""
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed per request."""
