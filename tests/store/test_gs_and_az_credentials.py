"""Credentials of gs and az that another program writes anew while a process waits: no call is lost to the rotation."""

import base64
import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import StoreDenied
from diloco_orchestrator.store.open_store import open_store


class Bucket(BaseHTTPRequestHandler):
    """Takes every object from the one credential that is valid now, and gives tokens of Entra ID for an assertion."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._who() == self.server.valid:  # type: ignore[attr-defined]
            return self._answer(201, b"")
        return self._answer(401, b"<Error><Code>AuthenticationFailed</Code></Error>")

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        token = next(part.partition("=")[2] for part in asked.split("&") if part.startswith("client_assertion="))
        answer = {"access_token": token, "token_type": "Bearer", "expires_in": 3600}
        self._answer(200, json.dumps(answer).encode())

    do_GET = do_POST  # noqa: N815

    def _who(self) -> str:
        token = self.headers["Authorization"].removeprefix("Bearer ")
        if "." not in token:
            return token
        head = token.partition(".")[0]  # of a JWT that the service account's key has signed
        return str(json.loads(base64.urlsafe_b64decode(head + "=="))["kid"])

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed per request."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        server.valid = "first"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Rotating(ManualClock):
    """A clock by which another program writes the file while the process waits for the second time."""

    def __init__(self, write: Callable[[], object]) -> None:
        super().__init__()
        self.write, self.slept = write, 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.slept += 1
        if self.slept == 2:
            self.write()


def service_account(name: str) -> str:
    """A key file of Google's."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    told = {"type": "service_account", "client_email": "a@lab", "private_key": pem, "private_key_id": name}
    return json.dumps(told)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_credentials_file_that_is_written_anew_is_read_again(scheme: str, server, tmp_path: Path, monkeypatch):
    url, file = f"http://127.0.0.1:{server.server_port}", tmp_path / "credentials"
    written = service_account if scheme == "gs" else str
    given = {
        "gs": {"GOOGLE_APPLICATION_CREDENTIALS": str(file), "GOOGLE_BASE_URL": url},
        "az": {
            "AZURE_FEDERATED_TOKEN_FILE": str(file),
            "AZURE_CLIENT_ID": "client",
            "AZURE_TENANT_ID": "tenant",
            "AZURE_AUTHORITY_HOST": url,
            "AZURE_STORAGE_ACCOUNT_NAME": "lab",
            "AZURE_STORAGE_ENDPOINT": url,
        },
    }
    for name, value in given[scheme].items():
        monkeypatch.setenv(name, value)
    file.write_text(written("first"))
    clock = Rotating(lambda: file.write_text(written("second")))
    store = open_store(f"{scheme}://bucket/run", clock=clock, rng=random.Random(1))
    store.put("key", b"1")
    server.valid = "second"
    store.put("key", b"2")
    assert clock.slept <= 3
    server.valid = "third"
    with pytest.raises(StoreDenied, match=r"Tried \d+ times in"):
        store.put("key", b"3")
