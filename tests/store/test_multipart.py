"""Uploads in parts: nothing is visible before the end, one creator wins, whoever dies; and bodies over TLS unsigned."""

import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from s3_server import S3Server

from diloco_orchestrator.errors import ConfigError, ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.presigned import PresignedStore, Requests
from diloco_orchestrator.store.retrying import RetryPolicy
from diloco_orchestrator.store.s3 import open_s3
from diloco_orchestrator.store.s3_multipart import MultipartUploads

PART = 5 * 2**20  # the smallest that S3 takes
HURRIED = RetryPolicy(first_pause_s=0.01, longest_pause_s=0.1, total_s=0.3)


def client_of(server: S3Server):
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
    )


@pytest.fixture
def client(s3_server: S3Server):
    return client_of(s3_server)


@pytest.fixture
def uploads(client, bucket: str) -> MultipartUploads:
    return MultipartUploads(lambda: client, bucket, "run", PART)


def half_done(client, bucket: str) -> list[str]:
    return [each["Key"] for each in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


def test_an_object_goes_up_in_parts_and_arrives_whole(uploads, client, bucket):
    sent: list[int] = []
    client.meta.events.register(
        "before-parameter-build.s3.UploadPart", lambda params, **_: sent.append(len(params["Body"]))
    )
    data = os.urandom(2 * PART + 3)
    assert uploads.create("big", data) is True
    assert sorted(sent) == [3, PART, PART]
    assert client.get_object(Bucket=bucket, Key="run/big")["Body"].read() == data
    uploads.put("big", data[:PART])
    assert client.get_object(Bucket=bucket, Key="run/big")["Body"].read() == data[:PART]


def test_a_create_of_what_exists_sends_no_part(uploads, client, bucket):
    client.put_object(Bucket=bucket, Key="run/big", Body=b"first")
    client.meta.events.register("before-call.s3.UploadPart", lambda **_: pytest.fail("a part was sent"))
    assert uploads.create("big", bytes(PART + 1)) is False
    assert half_done(client, bucket) == []


def test_of_racing_creates_one_wins_though_all_parts_were_sent(client, bucket, s3_server):
    """Every writer has looked and found nothing, and has sent its parts, before the first one completes."""
    line = threading.Barrier(4)
    bodies = [bytes([i]) * (PART + 1) for i in range(4)]

    def create(body: bytes) -> bool:
        own = client_of(s3_server)
        own.meta.events.register("before-parameter-build.s3.CompleteMultipartUpload", lambda **_: line.wait(60))
        return MultipartUploads(lambda: own, bucket, "run", PART).create("big", body)

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(create, bodies))
    assert won.count(True) == 1
    assert client.get_object(Bucket=bucket, Key="run/big")["Body"].read() == bodies[won.index(True)]
    assert half_done(client, bucket) == [], "losers take their parts back"


def test_writers_that_begin_at_once_make_one_client(s3_server, bucket):
    made: list[S3Server] = []
    line = threading.Barrier(4)

    def make():
        made.append(s3_server)
        return client_of(s3_server)

    def put(key: str) -> None:
        line.wait()
        uploads.put(key, key.encode())

    uploads = MultipartUploads(make, bucket, "run", PART)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, "abcd"))
    assert len(made) == 1


KILLED = """
import os, signal, sys
import boto3
from diloco_orchestrator.store.s3_multipart import MultipartUploads
url, key, secret, bucket, call, at = sys.argv[1:]
session = boto3.Session(aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1")
client = session.client("s3", endpoint_url=url)
left = [int(at)]
def die(**_):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
client.meta.events.register(f"before-call.s3.{call}", die)
MultipartUploads(lambda: client, bucket, "run", 5 * 2**20).create("big", b"a" * (11 * 2**20))
"""


@pytest.mark.parametrize(
    ("call", "at"), [("UploadPart", 0), ("UploadPart", 2), ("CompleteMultipartUpload", 0)], ids=lambda value: str(value)
)
def test_a_killed_writer_leaves_nothing_that_counts_and_the_create_can_be_repeated(
    s3_server: S3Server, bucket: str, client, call: str, at: int
):
    arguments = [s3_server.url, s3_server.key, s3_server.secret, bucket, call, str(at)]
    died = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert died.returncode == -signal.SIGKILL
    assert half_done(client, bucket) == ["run/big"], "the upload had begun"
    store = open_store(f"s3://{bucket}/run", s3_server.options())
    assert list(store.list("")) == []
    with pytest.raises(ObjectMissing):
        store.get("big")
    again = open_s3(f"s3://{bucket}/run", s3_server.options(), single_put_limit=2**20)
    data = b"b" * (11 * 2**20)
    assert again.create("big", data) is True and again.create("big", data) is False
    assert store.get("big") == data


def test_a_fault_half_way_is_transient_and_takes_the_parts_back(uploads, client, bucket):
    from botocore.exceptions import ConnectionClosedError

    def cut(params, **_):
        if params["query_string"].get("partNumber") == 2:
            raise ConnectionClosedError(endpoint_url="here")

    client.meta.events.register("before-call.s3.UploadPart", cut)
    with pytest.raises(StoreUnavailable, match="cannot create big in parts"):
        uploads.create("big", bytes(2 * PART))
    assert half_done(client, bucket) == []
    client.meta.events.unregister("before-call.s3.UploadPart", cut)
    assert uploads.create("big", bytes(2 * PART)) is True


@pytest.mark.slow
def test_an_upload_that_was_ended_from_elsewhere_begins_anew(s3_server, bucket, client):
    """As a lifecycle rule does. `RetryingStore` repeats the create."""
    own = client_of(s3_server)
    ended: list[str] = []

    def end(params, **_):
        if not ended:
            ended.append(params["query_string"]["uploadId"])
            client.abort_multipart_upload(Bucket=bucket, Key="run/big", UploadId=ended[0])

    own.meta.events.register("before-call.s3.CompleteMultipartUpload", end)
    uploads = MultipartUploads(lambda: own, bucket, "run", PART)
    with pytest.raises(StoreUnavailable, match="cannot create big in parts"):
        uploads.create("big", bytes(PART))
    assert uploads.create("big", bytes(PART)) is True


def test_what_no_retry_mends_is_told_at_once(s3_server, bucket):
    wrong = open_s3(f"s3://{bucket}/run", s3_server.options(secret="wrong"), single_put_limit=0)
    with pytest.raises((StoreDenied, StoreError)) as caught:
        wrong.put("big", b"x")
    assert not isinstance(caught.value, StoreUnavailable)


@pytest.mark.slow
def test_s3fs_creates_large_objects_in_parts_too(s3_server, bucket, client):
    """s3fs does so by itself from 100 MB on."""
    store = open_store(f"fsspec+s3://{bucket}/run", s3_server.options())
    data = bytes(105 * 2**20)
    assert store.create("big", data) is True and store.create("big", b"x" + data[1:]) is False
    assert client.head_object(Bucket=bucket, Key="run/big")["ContentLength"] == len(data)
    assert half_done(client, bucket) == []


# -- signatures of bodies ---------------------------------------------------------------------------------------------


class Remembering(BaseHTTPRequestHandler):
    """Accepts everything; keeps the header that says whether the body was hashed for the signature."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "PUT":
            self.server.seen.append(self.headers["x-amz-content-sha256"])  # type: ignore[attr-defined]
        body = b"<r><UploadId>1</UploadId></r>" if self.command == "POST" else b""
        self.send_response(404 if self.command == "HEAD" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0123"')
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_HEAD = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def remembering(certificate: Path | None) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Remembering)
    server.seen = []  # type: ignore[attr-defined]
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Key and certificate of 127.0.0.1, which signs itself."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_bodies_are_signed_over_http_and_not_over_tls(scheme, certificate, monkeypatch):
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # as somebody with a company's own certificates sets it
    with remembering(certificate if scheme == "https" else None) as server:
        endpoint = f"{scheme}://127.0.0.1:{server.server_port}"
        options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
        store = open_store("s3://bucket/x", options, retry=HURRIED)
        store.put("key", b"body")
        assert store.create("other", b"body") is True
        assert open_s3("s3://bucket/x", options, single_put_limit=1).create("parts", b"body") is True
        seen = server.seen  # type: ignore[attr-defined]
    assert len(seen) == 3
    if scheme == "https":
        assert set(seen) == {"UNSIGNED-PAYLOAD"}
    else:
        assert all(len(each) == 64 and int(each, 16) for each in seen)


def test_requests_that_somebody_has_signed_go_over_tls(certificate, monkeypatch, tmp_path):
    with remembering(certificate) as server:
        url = f"https://127.0.0.1:{server.server_port}/bucket/x/key"
        requests = Requests(ends=0.0, read={}, create={"key": url}, put={}).to_bytes()
        (tmp_path / "requests").write_bytes(requests)
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            PresignedStore("s3://bucket/x", tmp_path / "requests").create("key", b"body")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert PresignedStore("s3://bucket/x", tmp_path / "requests").create("key", b"body") is True


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "az://container/x"])
def test_a_file_of_certificates_that_is_not_there_is_named_before_anything_is_sent(url, monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    options = {"key": "k", "secret": "s"} if url.startswith("s3") else {}
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE names .*gone\.pem, which is no file"):
        open_store(url, options)
    if options:  # nothing is trusted over http
        open_store(url, {**options, "endpoint_url": "http://127.0.0.1:1"})


def test_who_cannot_reach_a_server_reads_why(certificate):
    options = {"key": "k", "secret": "s"}
    with remembering(certificate) as server:
        strange = options | {"endpoint_url": f"https://127.0.0.1:{server.server_port}"}
        with pytest.raises(StoreDenied, match=r"certificate is .* signed by nobody .* SSL_CERT_FILE"):
            open_store("s3://bucket/x", strange, retry=HURRIED).put("key", b"body")
    with remembering(None) as server:
        plain = options | {"endpoint_url": f"https://127.0.0.1:{server.server_port}"}
        with pytest.raises(StoreDenied, match="speaks no TLS there: is its address http://"):
            open_store("s3://bucket/x", plain, retry=HURRIED).get("key")
    nobody = options | {"endpoint_url": f"http://127.0.0.1:{server.server_port}"}
    with pytest.raises(StoreUnavailable, match="Nobody listens there: see endpoint, port, server and HTTPS_PROXY"):
        open_store("s3://bucket/x", nobody, retry=HURRIED).create("key", b"body")
    misspelt = options | {"endpoint_url": "http://no-such-host.invalid"}
    with pytest.raises(StoreUnavailable, match="name is not known: check the endpoint, and this machine's DNS"):
        list(open_store("s3://bucket/x", misspelt, retry=HURRIED).list(""))


# -- a large object that arrives in part ------------------------------------------------------------------------------


class Cutting(BaseHTTPRequestHandler):
    """Sends an object of 8 MiB; closes the first connection in the middle of it."""

    protocol_version = "HTTP/1.1"
    whole = bytes(range(256)) * 2**15

    def do_GET(self) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": len(self.whole), "ETag": '"0123"'}.items():
            self.send_header(name, str(value))
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")
        self.end_headers()
        self.server.seen += 1  # type: ignore[attr-defined]
        if self.server.seen == 1:  # type: ignore[attr-defined]
            self.wfile.write(self.whole[: 5 * 2**20])
            self.close_connection = True
        else:
            self.wfile.write(self.whole)

    def log_message(self, *_: object) -> None:
        pass


def test_a_large_object_whose_transfer_was_cut_is_read_again():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
    server.seen = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        store = open_store("s3://bucket/x", options, retry=HURRIED)
        assert store.get("big") == Cutting.whole
        assert server.seen >= 2  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
