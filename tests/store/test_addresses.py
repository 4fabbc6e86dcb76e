"""Which addresses and options a store takes, and what it says of those that it does not take."""

import os

import pytest

from diloco_orchestrator.errors import ConfigError, ObjectMissing, StoreError, StoreUnavailable
from diloco_orchestrator.store.obstore_engine import ObstoreEngine
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, check_address, open_store

UNSIGNED = {"account_name": "a", "skip_signature": True}


@pytest.mark.parametrize("character", ["#", "?"])
@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3", "gs", "az", "file"])
def test_an_address_that_would_be_cut_is_refused(scheme, character):
    with pytest.raises(ConfigError, match=r"the run would lie in .*runs/a. Choose"):
        open_store(f"{scheme}://b/runs/a{character}2")


@pytest.mark.parametrize("path", ["a//b", "a/../b", "./a", "../a"])
@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3", "gs", "az"])
def test_a_path_that_stores_read_in_different_ways_is_refused(scheme, path):
    with pytest.raises(ConfigError, match="as a part of its path"):
        open_store(f"{scheme}://b/{path}")


@pytest.mark.parametrize("scheme", ["ftp", "hdfs", "http", "https", "reference", "zip", "fsspec+tar"])
def test_what_has_no_create_is_refused_in_one_sentence(scheme):
    with pytest.raises(ConfigError, match=f"^{scheme.removeprefix('fsspec+')}:// can hold no run: .* Use s3://"):
        open_store(f"{scheme}://host/x")


@pytest.mark.parametrize("scheme", ["file", "fsspec+file"])
def test_an_escape_that_stores_read_in_different_ways_is_refused(scheme):
    with pytest.raises(ConfigError, match=r"holds an escape.* Write the path: /tmp/a b"):
        open_store(f"{scheme}:///tmp/a%20b")


def test_a_folder_whose_name_is_no_text_is_refused_before_a_store_sees_it(tmp_path, monkeypatch):
    (folder := tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(folder)
    for url in ("runs/a", str(folder / "a")):
        with pytest.raises(ConfigError, match=r"caf\\udce9.* is no UTF-8. Rename that folder"):
            open_store(absolute_url(url))
    absolute_url("runs/café")


@pytest.mark.parametrize("url", ["S3://b/x", "FSSPEC+S3://b/x", "GS://b/x", "AZ://b/x"])
def test_a_scheme_in_capitals_is_the_same_store(url):
    small = f"{url.partition('://')[0].lower()}://b/x"
    options = {"AZ": UNSIGNED, "GS": {"skip_signature": True}}.get(url[:2], {"key": "k", "secret": "s"})
    assert open_store(url, options).url == open_store(small, options).url == absolute_url(url) == small


NO_ADDRESSES = (
    *(
        "localhost:9000",
        "http://127.0.0.1:PORT",
        "http://127.0.0.1:99999",
        "https://<ACCOUNT>.r2.cloudflarestorage.com",
    ),
    *("http://127.0.0.1:9000 ", 'http://127.0.0.1:9000"', "http://", "http://[::1", "ftp://host"),
)


@pytest.mark.parametrize("endpoint", NO_ADDRESSES)
@pytest.mark.parametrize("url", ["s3://b/x", "hf://buckets/me/b/x", "az://c/x"])
def test_an_endpoint_that_is_no_address_is_refused_in_a_sentence(url: str, endpoint: str):
    given = {**UNSIGNED, "endpoint": endpoint} if url.startswith("az") else {"anon": True, "endpoint_url": endpoint}
    with pytest.raises(ConfigError, match=r"^the endpoint .* is no address of a server. Write http://host:port or"):
        open_store(url, given)


@pytest.mark.parametrize("endpoint", NO_ADDRESSES)
@pytest.mark.parametrize(
    ("url", "name", "options"),
    [("s3://b/x", "AWS_ENDPOINT_URL", {"anon": True}), ("az://c/x", "AZURE_STORAGE_ENDPOINT", UNSIGNED)],
)
def test_so_is_one_of_the_environment(url: str, name: str, options: dict[str, object], endpoint: str, monkeypatch):
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(ConfigError, match=r"ndpoint.* http://host:port or https://host"):
        open_store(url, options)


def test_so_is_a_region_that_is_none(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu central")
    with pytest.raises(ConfigError, match=r"cannot set up S3 access: .*eu central.* a name such as eu-central-1"):
        open_store("s3://b/x", {"anon": True})


def test_the_password_of_an_endpoint_that_is_refused_is_not_shown():
    with pytest.raises(ConfigError) as refused:
        open_store("s3://b/x", {"anon": True, "endpoint_url": "http://me:se-cret-7@host:PORT"})
    assert "se-cret-7" not in str(refused.value)


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:9000/", "https://[::1]:9/a", "http://minio_1:9000", "https://a.b"]
)
def test_an_endpoint_with_a_port_a_path_or_of_a_container_is_taken(endpoint: str):
    assert open_store("s3://b/x", {"anon": True, "endpoint_url": endpoint}).endpoint == endpoint.rstrip("/")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_address_without_bucket_is_refused(scheme):
    with pytest.raises(ConfigError, match=f"names no bucket. Write {scheme}://bucket/folder"):
        open_store(f"{scheme}://")


def test_an_azure_account_that_nobody_has_named_is_told_with_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="Set AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://c/x")


@pytest.mark.parametrize("url", ["s3:/x", "S3:/x", "s3:x", "s3//x", "simplecache::s3://b/x"])
def test_a_slash_that_is_missing_makes_no_folder(url: str):
    for call in (open_store, absolute_url):
        with pytest.raises(ConfigError, match=f"write s3://…, or ./{url} for the folder"):
            call(url)


@pytest.mark.parametrize("scheme", ["file", "fsspec+file"])
def test_a_folder_is_not_taken_for_a_machine_and_left_out(scheme: str):
    with pytest.raises(ConfigError, match=r"names the machine .runs.. Write the path, runs/first"):
        open_store(f"{scheme}://runs/first")


@pytest.mark.parametrize(
    "url", ["runs/first", "/tmp/a#b", "s3://b", "s3://b/", "s3://b/a b~*", "az://c/x", "memory://x#1", "./s3:/x"]
)
def test_other_addresses_are_taken(url):
    check_address(url)


@pytest.mark.parametrize("option", ["allow_http", "timeout", "nonsense"])
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_an_option_that_is_not_of_the_store_is_refused(scheme, option):
    with pytest.raises(ConfigError, match=f"unknown storage option '{option}'"):
        open_store(f"{scheme}://b/x", {option: "5s"})


def test_the_container_of_an_account_is_no_password():
    store = open_store("abfss://c@account.dfs.core.windows.net/x", {"skip_signature": True})
    assert store.url == "abfss://c@account.dfs.core.windows.net/x"
    with pytest.raises(ConfigError, match="unknown store scheme 'wasbs'"):
        open_store("wasbs://c@account.blob.core.windows.net/x")
    with pytest.raises(ConfigError, match="user name or password"):
        open_store("abfss://c:secret@account.dfs.core.windows.net/x", {"skip_signature": True})


def test_an_endpoint_may_speak_http_and_one_that_is_none_is_no_outage():
    store = open_store("az://c/x", {**UNSIGNED, "endpoint": "http://127.0.0.1:9/a"}, retry=INTERACTIVE).__dict__
    engine = store["_opened"].store
    with pytest.raises(StoreUnavailable):  # nobody listens there
        engine.get("key")


@pytest.mark.parametrize(
    ("url", "option", "variable", "value"),
    [
        ("az://c/x", "account_name", "AZURE_STORAGE_ACCOUNT_NAME", "lab"),
        ("az://c/x", "endpoint", "AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9/lab"),
        ("gs://b/x", "base_url", "GOOGLE_BASE_URL", "http://127.0.0.1:9"),
        ("s3://b/x", "endpoint_url", "AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("fsspec+s3://b/x", "endpoint_url", "AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
    ],
)
def test_one_url_on_two_servers_is_two_stores_and_one_on_one_server_is_one(
    url: str, option: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    signed = {"az": UNSIGNED, "gs": {"skip_signature": True}}.get(url[:2], {"key": "k", "secret": "s"})
    other = open_store(url, signed).endpoint
    by_option = open_store(url, {**signed, option: value}).endpoint
    monkeypatch.setenv(variable, value)
    by_variable = open_store(url, {name: signed[name] for name in signed if name != option}).endpoint
    assert other != by_option == by_variable


def test_a_container_that_is_missing_is_no_missing_object():
    engine = open_store("az://c/x", UNSIGNED).__dict__["_opened"].store
    assert isinstance(engine, ObstoreEngine)
    reply = FileNotFoundError("Object at location x not found: <Error><Code>ContainerNotFound</Code></Error>")
    found = engine._translated(reply, "run.json", "read")
    assert type(found) is StoreError and "Check the container's name" in str(found)
    assert isinstance(engine._translated(FileNotFoundError("404"), "run.json", "read"), ObjectMissing)
    built = engine._translated(Exception("Generic error: builder error: URL scheme is not allowed"), "k", "read")
    assert type(built) is StoreError and "Check the endpoint" in str(built)
