"""A body that arrives cut in half, with a Content-Length that agrees: no HTTP client can tell, and digests stop it."""

import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from fast_s3 import running_fast_s3
from protocol_fleet import Fleet, play
from signed_s3 import SignedS3, _Guarded, running_signed_s3

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.s3 import Signer

# Of what replicas began with nothing follows, and no digest names it: `verify` lists it as not pinned.
UNPINNED = re.compile(r"start/\d+/")


@pytest.fixture
def server() -> Iterator[SignedS3]:
    with running_signed_s3() as server:
        yield server


def fleet_of(server: SignedS3) -> Fleet:
    return Fleet(replicas=2, rounds=3, store=open_store("s3://bucket/run", server.options()))


def cut(server: SignedS3, key: str) -> bytes:
    """Serve half of an object from now on. Returns the whole."""
    whole = server.server.objects.get(f"bucket/run/{key}")
    assert whole is not None
    server.server.objects.put(f"bucket/run/{key}", whole[: len(whole) // 2], False)
    return whole


@pytest.mark.parametrize("scheme", ["s3", pytest.param("fsspec+s3", marks=pytest.mark.slow)])
def test_half_of_any_object_that_the_log_pins_is_told_by_verify(server: SignedS3, scheme: str):
    fleet = fleet_of(server)
    replicas = fleet.join_all()
    for _ in range(2):
        play(replicas, [1.0, -0.5])
    store: Store = open_store(f"{scheme}://bucket/run", server.options())
    assert verify_run(store).agrees
    pinned = [info.key for info in store.list("") if not UNPINNED.match(info.key)]
    kinds = {re.sub(r"\d+|[0-9a-f]{16}", "N", key): key for key in pinned}
    assert len(kinds) >= 10
    for key in kinds.values():
        whole = cut(server, key)
        assert not verify_run(store).agrees, key
        server.server.objects.put(f"bucket/run/{key}", whole, False)
    assert verify_run(store).agrees


def test_servers_of_tests_keep_nothing_of_a_body_that_ends_early_as_s3_does(server: SignedS3):
    with running_fast_s3() as fast:
        for url, options in (
            (server.url, server.options()),
            (fast.url, {**server.options(), "endpoint_url": fast.url}),
        ):
            address = urlsplit(Signer("s3://bucket/run", options).url_of("put", "cut", 60.0))
            with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
                lines = f"PUT {address.path}?{address.query} HTTP/1.1", f"Host: {address.netloc}", "Content-Length: 9"
                connection.sendall("\r\n".join((*lines, "", "half")).encode())
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b"", url
            assert not list(open_store("s3://bucket/run", options).list("")), url


class CutsOnce(_Guarded):
    """Answers the first GET of replica 1's payload of round 2 with half of it."""

    cut: tuple[str, ...] = ("rounds/00000002/payload/1/1/0.bin",)

    def _get(self, key: str) -> None:
        whole = self.server.objects.get(key)
        if whole is None or not key.endswith(CutsOnce.cut):
            return super()._get(key)
        CutsOnce.cut = ()
        self.server.objects.put(key, whole[: len(whole) // 2], False)
        try:
            return super()._get(key)
        finally:
            self.server.objects.put(key, whole, False)


def test_half_of_a_payload_is_never_averaged_and_the_whole_is_read_again(server: SignedS3):
    server.server.RequestHandlerClass = CutsOnce
    fleet = fleet_of(server)
    replicas = fleet.join_all()
    for _ in range(2):
        play(replicas, [1.0, -0.5])
    assert CutsOnce.cut == ()
    assert all(answer.averaged for commit in fleet.commits() for answer in commit.answers)
    assert verify_run(fleet.store).agrees
