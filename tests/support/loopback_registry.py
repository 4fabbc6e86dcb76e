"""A registry of container images on 127.0.0.1: the pull half of the OCI Distribution API, with tokens or passwords.

Manifests are stored by digest, tags name digests, and an index of several platforms is given to who accepts one, as
real registries do. Does NOT prove how Docker Hub and others behave: their rate limits, what they say of private images.
"""

import base64
import hashlib
import json
import ssl
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass
class Request:
    """What a client sent."""

    method: str
    path: str
    authorization: str


@dataclass
class LoopbackRegistry:
    """The service. What differs between registries, and what is wrong with one, is set by the fields."""

    access: str = "open"  # or "token": reading takes a bearer token; "basic": a password
    users: dict[str, str] = field(default_factory=dict)  # with passwords; empty: tokens are given to anybody
    tells_digest: bool = True  # by the header Docker-Content-Digest
    digest: str = ""  # what that header says instead of the truth
    redirects: list[str] = field(default_factory=list)  # the Location of the next answers about manifests
    redirects_after_login: str = ""  # the Location of all answers about manifests to who may read them
    status: int = 0  # of all answers about manifests, instead of the true one
    endless: str = ""  # bodies of GETs that never end: "fast" (bytes as fast as they are read) or "silent"
    realm: str = ""  # where tokens are said to be, instead of here
    token: str = "t0ken"  # what is given as one
    certificate: Path | None = None  # of `certificate_in`, to speak https
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blobs: dict[tuple[str, str], tuple[str, bytes]] = {}  # (repository, digest) -> media type, manifest
        self._tags: dict[tuple[str, str], str] = {}  # (repository, tag) -> digest
        self.leaving = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"registry": self}))
        self._server.daemon_threads = True
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.host = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leaving.set()
        self._server.shutdown()
        self._server.server_close()

    def push(self, repository: str, tag: str, content: str) -> str:
        """Let `tag` name a new image of two platforms from now on. Returns the digest of its index."""
        platforms = []
        for architecture in ("amd64", "arm64"):
            body = {"schemaVersion": 2, "mediaType": MANIFEST, "annotations": {"content": f"{content} {architecture}"}}
            digest, size = self._add(repository, MANIFEST, body)
            platform = {"architecture": architecture, "os": "linux"}
            platforms.append({"mediaType": MANIFEST, "digest": digest, "size": size, "platform": platform})
        index, _ = self._add(repository, INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": platforms})
        self._tags[repository, tag] = index
        return index

    def _add(self, repository: str, kind: str, body: dict[str, object]) -> tuple[str, int]:
        data = json.dumps(body).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[repository, digest] = kind, data
        return digest, len(data)

    def manifest(self, repository: str, reference: str, accepted: str) -> tuple[str, str, bytes] | None:
        """(media type, digest, bytes) of a tag or digest: the first platform's image for who accepts no index."""
        digest = self._tags.get((repository, reference), reference)
        if (repository, digest) not in self.blobs:
            return None
        kind, data = self.blobs[repository, digest]
        if kind == INDEX and INDEX not in accepted:
            digest = json.loads(data)["manifests"][0]["digest"]
            kind, data = self.blobs[repository, digest]
        return kind, digest, data

    def knows(self, authorization: str) -> bool:
        """Whether a Basic authorization is of a user."""
        scheme, _, given = authorization.partition(" ")
        user, _, password = base64.b64decode(given).decode().partition(":") if scheme == "Basic" else ("", "", "")
        return bool(user) and self.users.get(user) == password


def certificate_in(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself, in one file."""
    path = folder / "loopback.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    about = ["-subj", "/CN=loopback", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(path), "-out", str(folder / "crt")]
    subprocess.run(["openssl", "req", "-x509", *curve, *about, *files], check=True, capture_output=True)
    with path.open("a") as file:
        file.write((folder / "crt").read_text())
    return path


class _Handler(BaseHTTPRequestHandler):
    registry: LoopbackRegistry
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        given, parts = self.headers.get("Authorization", ""), urlsplit(self.path)
        self.registry.requests.append(Request(self.command, self.path, given))
        if parts.path == "/token":
            self._give_token(given, parse_qs(parts.query))
            return
        _, _, rest = parts.path.partition("/v2/")
        repository, _, reference = rest.partition("/manifests/")
        registry = self.registry
        if registry.redirects:
            self._answer(307, {"Location": registry.redirects.pop(0)})
        elif registry.access == "token" and given != f"Bearer {registry.token}.{repository}":
            realm = registry.realm or f"http://{registry.host}/token"
            scope = f"repository:{repository}:pull,push"  # more than a reader needs
            challenge = f'Bearer realm="{realm}",service="loopback",scope="{scope}"'
            self._answer(401, {"WWW-Authenticate": challenge}, b"{}")
        elif registry.access == "basic" and not registry.knows(given):
            self._answer(401, {"WWW-Authenticate": 'Basic realm="loopback"'}, b"{}")
        elif registry.redirects_after_login:
            self._answer(307, {"Location": registry.redirects_after_login})
        elif registry.status:
            self._answer(registry.status, {}, b"{}")
        elif (found := registry.manifest(repository, reference, self.headers.get("Accept", ""))) is None:
            self._answer(404, {}, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
        else:
            kind, digest, data = found
            told = {"Docker-Content-Digest": registry.digest or digest} if registry.tells_digest else {}
            self._answer(200, {"Content-Type": kind, **told}, data)

    def _give_token(self, given: str, asked: dict[str, list[str]]) -> None:
        registry, (scope,) = self.registry, asked["scope"]
        kind, repository, action = scope.split(":")
        if registry.users and not registry.knows(given):
            self._answer(401, {}, b"{}")
        elif (kind, action, asked["service"]) != ("repository", "pull", ["loopback"]):
            self._answer(403, {}, b"{}")
        else:
            self._answer(200, {}, json.dumps({"token": f"{registry.token}.{repository}"}).encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        endless = self.registry.endless if self.command == "GET" else ""
        self.send_header("Content-Length", str(2**40 if endless else len(body)))
        self.end_headers()
        try:
            while endless == "fast":
                self.wfile.write(b" " * 65536)
        except OSError:  # the client has gone
            return
        if endless == "silent":
            self.registry.leaving.wait(60.0)
        elif self.command == "GET":
            self.wfile.write(body)
