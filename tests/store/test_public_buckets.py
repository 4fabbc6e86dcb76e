"""Reading without credentials, and at the reader's own cost, as the environment asks for it."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from diloco_orchestrator.errors import StoreDenied
from diloco_orchestrator.store.open_store import open_store


class Anything(BaseHTTPRequestHandler):
    """Has every object, and keeps the headers by which it was asked for the last one."""

    def do_GET(self) -> None:
        self.server.asked = dict(self.headers)  # type: ignore[attr-defined]
        self.send_response(200)
        for name, value in {
            "Content-Length": "1",
            "ETag": '"1"',
            "Last-Modified": "Wed, 01 Jan 2020 00:00:00 GMT",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"v")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed per request."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Anything) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("gs://bucket/x", ("GOOGLE_BASE_URL", "GOOGLE_SKIP_SIGNATURE")),
        ("az://container/x", ("AZURE_STORAGE_ENDPOINT", "AZURE_SKIP_SIGNATURE")),
    ],
)
def test_gs_and_az_read_without_credentials(url, names, server, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lab")
    monkeypatch.setenv(names[0], f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv(names[1], "true")
    assert open_store(url).get("key") == b"v"
    assert "Authorization" not in server.asked


def test_gs_names_the_project_that_pays(server, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "lab-42")
    options = {"base_url": f"http://127.0.0.1:{server.server_port}", "skip_signature": True}
    assert open_store("gs://bucket/x", options).get("key") == b"v"
    assert server.asked["x-goog-user-project"] == "lab-42"


@pytest.mark.parametrize("url", ["gs://bucket/x", "az://container/x"])
def test_who_has_no_credentials_is_told_what_to_set(url):
    engine = open_store(url, {"account_name": "lab"} if url[0] == "a" else None).__dict__["_opened"].store
    asks = "Generic error: Error performing token request: Error performing GET http://169.254.169.254/x in 1 ms - "
    found = engine._translated(Exception(f"{asks}Server returned non-2xx status code: 403 Forbidden"), "k", "read")
    assert isinstance(found, StoreDenied) and "GOOGLE_SKIP_SIGNATURE=true or AZURE_SKIP_SIGNATURE=true" in str(found)
