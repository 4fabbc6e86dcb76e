"""Reading gs and az: without credentials, at the reader's own cost, from a server that knows little."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from diloco_orchestrator.errors import StoreDenied
from diloco_orchestrator.store.open_store import open_store

_BLOB = "<Blob><Name>x/{}</Name><Properties><Last-Modified>Wed, 01 Jan 2020 00:00:00 GMT</Last-Modified>{}"
_REST = "<Content-Length>1</Content-Length><Content-Type>x</Content-Type><Etag>1</Etag></Properties></Blob>"
_BLOBS = "".join(_BLOB.format(name, _REST) for name in ("a", "b", "c"))
_LISTING = f"<EnumerationResults><Blobs>{_BLOBS}</Blobs><NextMarker/></EnumerationResults>"


class Anything(BaseHTTPRequestHandler):
    """Has every object, of which it lists three, and keeps the headers by which it was asked for the last one."""

    def do_GET(self) -> None:
        self.server.asked = dict(self.headers)  # type: ignore[attr-defined]
        body = _LISTING.encode() if "comp=list" in self.path else b"v"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

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


def test_a_listing_begins_where_it_should_though_the_server_begins_with_the_first_object(server):
    """Azurite ignores `startFrom`."""
    options = {"account_name": "a", "skip_signature": True, "endpoint": f"http://127.0.0.1:{server.server_port}"}
    store = open_store("az://container/x", options)
    assert [info.key for info in store.list("")] == ["a", "b", "c"]
    assert [info.key for info in store.list("", start_after="b")] == ["c"]


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
