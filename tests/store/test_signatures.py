"""Folders and keys with unusual letters, on a server that checks signatures: the same objects by every engine."""

import urllib.request
from collections.abc import Iterator

import pytest
from s3_server import S3Server
from signed_s3 import SignedS3, running_signed_s3

from diloco_orchestrator.errors import StoreDenied
from diloco_orchestrator.store.open_store import open_store, readable_url
from diloco_orchestrator.store.s3 import open_s3

FOLDERS = ["a b~*%20c", "ü/a+b=c&d,e;it's (one)!:@$"]


@pytest.fixture(scope="module")
def signed() -> Iterator[SignedS3]:
    with running_signed_s3() as server:
        yield server


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_with_unusual_letters_is_one_folder_by_every_engine(signed: SignedS3, folder: str):
    url, options = f"s3://bucket/{folder}", signed.options()
    stores = {scheme: open_store(scheme + url, options) for scheme in ("", "fsspec+")}
    parts = open_s3(url, options, single_put_limit=0)
    assert parts.create(f"parts/{folder}", b"01234") and not parts.create(f"parts/{folder}", b"other")
    for scheme, store in stores.items():
        key = f"by {scheme}~*%20/{folder}"
        assert store.create(key, b"56789") and not store.create(key, b"other")
        for other in stores.values():
            assert other.get(key, 1, 3) == b"67" and other.get(f"parts/{folder}") == b"01234"
            assert [info.key for info in other.list("")] == [key, f"parts/{folder}"]
        with urllib.request.urlopen(readable_url(scheme + url, options, key, 60.0)) as answer:
            assert answer.read() == b"56789"
        store.delete(key)
    assert signed.server.objects.get(f"bucket/{folder}/parts/{folder}") == b"01234"  # by its own name there


def test_a_space_and_its_escape_are_two_folders(signed: SignedS3):
    for folder in ("a b", "a%20b"):
        open_store(f"s3://spaces/{folder}", signed.options()).put("key", folder.encode())
    for scheme in ("s3", "fsspec+s3"):
        assert open_store(f"{scheme}://spaces/a%20b", signed.options()).get("key") == b"a%20b"


def test_a_server_that_signs_a_query_as_it_was_sent_is_told_from_a_wrong_secret(s3_server: S3Server, bucket: str):
    """moto's server: a space in the prefix of a listing is "+" on the line."""
    url, options = f"s3://{bucket}/a b", s3_server.options()
    with pytest.raises(StoreDenied, match=r"wrong for this access key, or this server signs .* use fsspec\+s3://"):
        open_store(url, options).list("")
    assert not list(open_store(f"fsspec+{url}", options).list(""))
    with pytest.raises(StoreDenied, match=r"this access key\.(\n|$)"):
        open_store(f"s3://{bucket}/plain", {**options, "secret": "another"}).list("")


@pytest.mark.parametrize("scheme", ["", "fsspec+"])
def test_a_wrong_secret_is_refused_there(signed: SignedS3, scheme: str):
    with pytest.raises(StoreDenied, match="The secret key is wrong for this access key"):
        open_store(f"{scheme}s3://bucket/x", {**signed.options(), "secret": "another"}).put("key", b"x")


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
@pytest.mark.parametrize("scheme", ["", "fsspec+"])
def test_a_clock_that_is_an_hour_off_is_named(signed: SignedS3, scheme: str, seconds: float):
    with signed.ahead_by(seconds):
        store = open_store(f"{scheme}s3://bucket/clock", signed.options())
        for call in (lambda: store.put("key", b"y"), lambda: list(store.list(""))):
            with pytest.raises(StoreDenied, match="This machine's clock is too far off for signed requests: set it"):
                call()
        with pytest.raises(StoreDenied, match="clock is"):  # by fsspec+s3 a HEAD, whose answer has no reason
            store.get("key")
    store.put("key", b"x")
    assert store.get("key") == b"x"
