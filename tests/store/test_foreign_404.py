"""A 404 that is not the store's own: a proxy's page says nothing about an object, the store's own codes do."""

import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.retrying import RetryPolicy

XML = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>no</Message></Error>'
OWN = {  # as the services document them
    "s3": XML.format("NoSuchKey"),
    "fsspec+s3": XML.format("NoSuchKey"),
    "gs": XML.format("NoSuchKey"),
    "az": XML.format("BlobNotFound"),
}
FOREIGN = (
    "<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body><center>nginx</center></body></html>",
    "404 page not found\n",  # Traefik and other programs in Go
    "default backend - 404",  # an ingress of Kubernetes
    '{"message":"no Route matched with those values"}',  # Kong
)


class Away(BaseHTTPRequestHandler):
    """Answers every request with 404, or the status that the server has been given, and its body."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = self.server.body.encode()  # type: ignore[attr-defined]
        self.send_response(getattr(self.server, "status", 404))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed per request."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Away) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def opened(scheme: str, server: ThreadingHTTPServer) -> Store:
    url = f"http://127.0.0.1:{server.server_port}"
    s3 = {"key": "k", "secret": "s", "endpoint_url": url}
    options: dict[str, dict[str, Any]] = {
        "s3": s3,
        "fsspec+s3": s3,
        "gs": {"base_url": url, "skip_signature": True},
        "az": {"account_name": "lab", "endpoint": url, "skip_signature": True},
    }
    retry = RetryPolicy(total_s=5.0)
    return open_store(f"{scheme}://b/run", options[scheme], clock=ManualClock(), rng=random.Random(0), retry=retry)


CALLS: tuple[Callable[[Store], Any], ...] = (
    lambda store: store.get("key"),
    lambda store: store.get("key", 0, 8),
    lambda store: store.get("key", 3, 9),
    lambda store: store.get("key", 3),
)


@pytest.mark.parametrize("scheme", OWN)
def test_only_the_stores_own_404_says_that_an_object_is_missing(scheme: str, server: ThreadingHTTPServer):
    store = opened(scheme, server)
    for body in (OWN[scheme], ""):  # some servers send none
        server.body = body  # type: ignore[attr-defined]
        for call in CALLS:
            with pytest.raises(ObjectMissing):
                call(store)
    for body in FOREIGN:
        server.body = body  # type: ignore[attr-defined]
        for call in CALLS:
            with pytest.raises(StoreUnavailable):
                call(store)


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3", "az"])
def test_a_write_a_listing_or_a_delete_that_meets_a_foreign_404_is_tried_again(
    scheme: str, server: ThreadingHTTPServer
):
    store = opened(scheme, server)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: store.put("key", b"x"),
        lambda: store.create("key", b"x"),
        lambda: list(store.list("")),
        lambda: store.delete("key"),
    )
    for body in FOREIGN:
        server.body = body  # type: ignore[attr-defined]
        for call in calls:
            with pytest.raises(StoreUnavailable, match=r"404 without an error code of the store\. Some"):
                call()
    server.body = XML.format("ContainerNotFound" if scheme == "az" else "NoSuchBucket")  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="name and the") as told:
        store.create("key", b"x")
    assert not isinstance(told.value, StoreUnavailable | ObjectMissing)


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_404_without_a_body_is_neither_an_empty_folder_nor_a_missing_object_that_was_to_be_written(
    scheme: str, server: ThreadingHTTPServer
):
    store = opened(scheme, server)
    server.body = ""  # type: ignore[attr-defined]
    for call in (lambda: list(store.list("")), lambda: store.put("key", b"x"), lambda: store.create("key", b"x")):
        with pytest.raises(StoreError) as told:
            call()  # type: ignore[no-untyped-call]
        assert not isinstance(told.value, StoreUnavailable | ObjectMissing)


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_page_of_a_proxy_is_what_its_status_says(scheme: str, server: ThreadingHTTPServer):
    store, server.body = opened(scheme, server), FOREIGN[0]  # type: ignore[attr-defined]
    errors = {502: StoreUnavailable, 429: StoreUnavailable, 403: StoreDenied}
    for server.status, error in errors.items():  # type: ignore[attr-defined]
        for call in (CALLS[0], lambda store: store.create("key", b"x"), lambda store: list(store.list(""))):
            with pytest.raises(error) as told:
                call(store)  # type: ignore[no-untyped-call]
            assert "dmesg" not in str(told.value)
