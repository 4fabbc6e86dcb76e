"""S3 through obstore and through s3fs: credentials, endpoints, and clear words for what is wrong."""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from fast_s3 import running_fast_s3
from fsspec import AbstractFileSystem
from s3_server import S3Server

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ConfigError, ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.fsspec_engine import FsspecEngine
from diloco_orchestrator.store.open_store import open_store, readable_url
from diloco_orchestrator.store.probe import probe
from diloco_orchestrator.store.retrying import RetryPolicy

ENGINES = ["auto", "fsspec"]
HURRIED = RetryPolicy(first_pause_s=0.01, longest_pause_s=0.1, total_s=0.3)


@pytest.fixture(params=ENGINES)
def open_with(request: pytest.FixtureRequest, s3_server: S3Server, bucket: str):
    def opened(where: str | None = None, **changes: object) -> Store:
        url = f"s3://{where or bucket}/run"
        return open_store(url, s3_server.options(**changes), engine=request.param, retry=HURRIED)

    return opened


@pytest.mark.parametrize(("options", "host"), [({}, "us-east-1"), ({"region_name": "eu-central-1"}, "eu-central-1")])
def test_amazons_own_endpoint_needs_no_setting(monkeypatch: pytest.MonkeyPatch, options: dict[str, str], host: str):
    """Nothing is sent: where it would go is in a signed URL."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    given = {"key": "AKIAEXAMPLE", "secret": "x", **options}
    open_store("s3://bucket/run", given)
    url = readable_url("s3://bucket/run", given, "code/a.zip", 60.0)
    assert (
        url.startswith("https://") and f"{host}.amazonaws.com/" in url and "bucket" in url and "run/code/a.zip" in url
    )


def test_aws_region_is_heard(monkeypatch: pytest.MonkeyPatch):
    """EKS's pods and every AWS SDK but boto3 say it so."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    url = readable_url("s3://bucket/run", {"key": "AKIAEXAMPLE", "secret": "x"}, "k", 60.0)
    assert "ap-south-1" in url


def every_call(store: Store):
    return [
        lambda: store.delete("k"),
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.create("k", b""),
        lambda: list(store.list("")),
    ]


@pytest.mark.parametrize("changes", [{"secret": "wrong"}, {"key": "AKIAUNKNOWN"}], ids=["secret", "key"])
def test_wrong_credentials_are_denied_at_the_first_call_and_never_shown(open_with, changes):
    for call in every_call(open_with(**changes)):
        with pytest.raises(StoreDenied, match="s3://") as caught:
            call()
        assert str(changes.get("secret", "no secret")) not in str(caught.value).replace("wrong for", "")


def test_a_bucket_that_does_not_exist_is_no_empty_store(open_with):
    for call in every_call(open_with("no-such-bucket")):
        with pytest.raises(StoreError, match=r"(?i)no.?such.?bucket.*Check the bucket's name and the endpoint"):
            call()


def test_a_server_that_is_not_there_is_retried_then_told(open_with):
    for call in every_call(open_with(endpoint_url="http://127.0.0.1:1")):
        with pytest.raises(StoreUnavailable, match=r"Tried \d+ times"):
            call()


def test_an_unknown_storage_option_is_refused_with_the_nearest(s3_server: S3Server, bucket: str):
    with pytest.raises(ConfigError, match=r"unknown storage option 'endpoint': did you mean 'endpoint_url'\?"):
        open_store(f"s3://{bucket}", s3_server.options(endpoint="x"))
    with pytest.raises(ConfigError, match=r"unknown storage option 'region': did you mean 'region_name'\?"):
        open_store(f"s3://{bucket}", s3_server.options(client_kwargs={"region": "x"}))


@pytest.mark.parametrize("url", ["s3://AKIA:hunter2@bucket/x", "sftp://me:hunter2@host/x", "fsspec+s3://a:hunter2@b/x"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str):
    with pytest.raises(ConfigError, match="pass storage_options") as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


class Grumpy(BaseHTTPRequestHandler):
    """Answers every request but the first with success; the first with the error that the server was given."""

    protocol_version = "HTTP/1.1"  # botocore waits for "100 Continue" before it sends a body

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, code = self.server.first if self.server.seen == 0 else (200, "")  # type: ignore[attr-defined]
        self.server.seen += 1  # type: ignore[attr-defined]
        body = f"<Error><Code>{code}</Code><Message>words</Message></Error>".encode() if code else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0123"')
        self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("status", "code"),
    [(409, "ConditionalRequestConflict"), (503, "SlowDown"), (500, "InternalError"), (503, "ServiceUnavailable")],
)
def test_what_may_pass_is_tried_again_by_every_engine(status: int, code: str, engine: str):
    with grumpy(status, code) as server:
        assert open_store("s3://bucket/x", options_of(server), engine=engine, retry=HURRIED).create("key", b"x") is True
        assert server.seen >= 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(("status", "code"), [(429, ""), (503, "SlowDown")])
def test_a_server_that_asks_for_fewer_requests_is_asked_again_after_what_it_says(status: int, code: str):
    """Through s3fs; obstore shows no header of a reply."""
    with grumpy(status, code) as server:
        clock = ManualClock()
        store = open_store("s3://bucket/x", options_of(server), engine="fsspec", clock=clock, retry=RetryPolicy())
        assert store.create("key", b"x") and 7.0 <= clock.now() <= 8.75


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("status", "code"), [(400, "ExpiredToken"), (403, "SignatureDoesNotMatch"), (403, "InvalidAccessKeyId")]
)
def test_credentials_that_are_no_good_are_told_at_the_first_call(status: int, code: str, engine: str):
    with grumpy(status, code) as server, pytest.raises(StoreDenied):
        open_store("s3://bucket/x", options_of(server), engine=engine, retry=HURRIED).create("key", b"x")


@contextmanager
def grumpy(status: int, code: str) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Grumpy)
    server.first, server.seen = (status, code), 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def options_of(server: ThreadingHTTPServer) -> dict[str, str]:
    return {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (301, "PermanentRedirect"),
        (400, "AuthorizationHeaderMalformed"),  # "the region 'us-east-1' is wrong; expecting 'eu-west-1'"
        (400, "IllegalLocationConstraintException"),
    ],
)
def test_a_wrong_region_is_told_at_the_first_call(status: int, code: str, engine: str):
    with grumpy(status, code) as server, pytest.raises(StoreError, match="in another region: set AWS_REGION") as caught:
        open_store("s3://bucket/x", options_of(server), engine=engine, retry=HURRIED).create("key", b"x")
    assert not isinstance(caught.value, StoreUnavailable) and "s3://bucket/x" in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_object_that_a_lifecycle_rule_has_archived_is_no_matter_of_credentials(s3_server: S3Server, engine: str):
    bucket = s3_server.make_bucket(f"archived-{engine}")
    archived = {"Bucket": bucket, "Key": "run/run.json", "StorageClass": "GLACIER"}
    s3_server.client("s3").put_object(Body=b"{}", **archived)
    store = open_store(f"s3://{bucket}/run", s3_server.options(), engine=engine, retry=HURRIED)
    with pytest.raises(StoreError, match=r"is archived, as by a lifecycle rule.*restore it") as caught:
        store.get("run.json")
    assert not isinstance(caught.value, StoreDenied | StoreUnavailable)


def test_a_url_without_bucket_is_refused():
    with pytest.raises(ConfigError, match="names no bucket"):
        open_store("s3:///folder", {"key": "k", "secret": "s"})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_never_says_continue_gets_the_body(engine: str):
    """`fast_s3` reads a body without answering `Expect: 100-continue` first, as some servers and proxies do."""
    with running_fast_s3() as server:
        options = {"key": "anybody", "secret": "anything", "endpoint_url": server.url}
        store = open_store("s3://bucket/x", options, engine=engine)
        assert store.create("key", b"x") and not store.create("key", b"y") and store.get("key") == b"x"
        store.put("key", b"z")
        server.requests()
        with pytest.raises(ObjectMissing):
            store.get("missing", 0, 100)
        assert server.requests() == {"GET": 1}  # s3fs alone would ask by HEAD and by LIST, too


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment in which boto3 finds nothing."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def test_missing_credentials_are_told_with_what_to_set(bare):
    with pytest.raises(StoreDenied, match=r"no S3 credentials for s3://b/x.*AWS_ACCESS_KEY_ID.*AWS_PROFILE"):
        open_store("s3://b/x")


def test_credentials_and_endpoint_come_from_the_environment(bare, s3_server: S3Server, bucket: str):
    for name, value in s3_server.environ().items():
        bare.setenv(name, value)
    probe(open_store(f"s3://{bucket}/x"))


def test_credentials_and_endpoint_come_from_a_profile(bare, tmp_path: Path, s3_server: S3Server, bucket: str):
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {s3_server.key}\naws_secret_access_key = {s3_server.secret}\n"
    )
    (tmp_path / "config").write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {s3_server.url}\n")
    bare.setenv("AWS_PROFILE", "lab")
    probe(open_store(f"s3://{bucket}/x"))
    bare.delenv("AWS_PROFILE")
    probe(open_store(f"s3://{bucket}/x", {"profile": "lab"}))
    with pytest.raises(ConfigError, match="attic"):
        open_store(f"s3://{bucket}/x", {"profile": "attic"})


def test_runs_in_one_bucket_do_not_see_each_other(s3_server: S3Server, bucket: str):
    one, other = (open_store(f"s3://{bucket}/{name}", s3_server.options()) for name in ("run", "run-2"))
    one.put("a", b"1")
    other.put("b", b"2")
    assert [i.key for i in one.list("")] == ["a"] and [i.key for i in other.list("")] == ["b"]


@pytest.mark.slow
def test_listings_longer_than_a_page_are_whole(s3_server: S3Server, bucket: str):
    from concurrent.futures import ThreadPoolExecutor

    store = open_store(f"s3://{bucket}/x", s3_server.options())
    names = [f"many/{i:05d}" for i in range(1050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b""), names))
    assert [i.key for i in store.list("many/")] == names
    assert [i.key for i in store.list("many/", start_after="many/01040")] == names[1041:]


def test_a_lost_create_is_known_by_its_code_alone():
    """Ceph's gateway sends no field Condition, by which s3fs would know it."""

    class Refused(Exception):
        response: ClassVar = {"Error": {"Code": "PreconditionFailed", "Message": None}}

    class Lost(AbstractFileSystem):
        def pipe_file(self, *args: object, **options: object) -> None:
            raise OSError(errno.EINVAL, None) from Refused()

    store = FsspecEngine(Lost(), "bucket", "fsspec+s3://bucket")
    assert store.create("key", b"") is False
    with pytest.raises(StoreError, match="cannot write key"):
        store.put("key", b"")
