"""The fast S3 look-alike with a guard at its door, which checks every signature as S3 does: over the key, not the path.

A client that escapes a character of a key in another way than S3 is refused, and so is a body with another digest than
the signed one. A bucket named `public` is read by everybody; of `requester-pays` only who offers to pay reads.
A request that was signed more than 15 minutes from the server's time is refused, as by S3. Beside the user who may do
everything there may be others, each with the buckets that it may read and write.
"""

import hashlib
import io
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from fast_s3 import Server, _Handler

KEY, SECRET = "AKIASIGNED", "a/secret+with=signs"
_CREDENTIALS = Credentials(KEY, SECRET)
_MOST_SKEW_S = 900.0


@dataclass(frozen=True)
class Account:
    """A user of the server, who may read or write these buckets and no others."""

    key: str
    secret: str
    reads: frozenset[str]
    writes: frozenset[str]

    def may(self, method: str, bucket: str) -> bool:
        return bucket in (self.reads if method in ("GET", "HEAD") else self.writes)


class GuardedServer(Server):
    """With the methods and paths of requests that were signed in their URL."""

    def __init__(self, accounts: Collection[Account] = ()) -> None:
        super().__init__()
        self.accounts = {account.key: account for account in accounts}
        self.by_url: set[tuple[str, str]] = set()
        self.refused_urls: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class SignedS3:
    """A running server, as its user sees it."""

    url: str
    server: GuardedServer

    @contextmanager
    def ahead_by(self, seconds: float) -> Iterator[None]:
        """The server's clock is so many seconds ahead of this machine's: this machine's is behind."""
        self.server.ahead_s = seconds
        try:
            yield
        finally:
            self.server.ahead_s = 0.0

    def options(self, account: Account | None = None) -> dict[str, str]:
        key, secret = (KEY, SECRET) if account is None else (account.key, account.secret)
        return {"key": key, "secret": secret, "endpoint_url": self.url}

    def environ(self, account: Account | None = None) -> dict[str, str]:
        options = self.options(account)
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def running_signed_s3(accounts: Collection[Account] = ()) -> Iterator[SignedS3]:
    """A server in a thread of this process."""
    with GuardedServer(accounts) as server:
        server.RequestHandlerClass = _Guarded
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield SignedS3(f"http://127.0.0.1:{server.server_port}", server)
        finally:
            server.shutdown()
            thread.join()


class _Guarded(_Handler):
    server: GuardedServer

    def _serve(self) -> None:
        if (body := self._whole_body()) is None:
            return None
        if refusal := self._refusal(body):
            return self._error(401 if refusal == "Unauthorized" else 403, refusal, self.path)
        connection, self.rfile = self.rfile, io.BytesIO(body)
        try:
            return super()._serve()
        finally:
            self.rfile = connection

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _refusal(self, body: bytes) -> str:
        """The error code of S3; empty for a request that may pass."""
        split = urlsplit(self.path)
        bucket, query = split.path.split("/")[1], dict(parse_qsl(split.query, keep_blank_values=True))
        path = quote(unquote(split.path), safe="/-_.~")  # by S3's rules for the canonical URI
        if bucket == "requester-pays" and self.headers.get("x-amz-request-payer") != "requester":
            return "AccessDenied"
        if "X-Amz-Signature" in query:
            refusal = self._refusal_of_url(path, query)
            (self.server.refused_urls if refusal else self.server.by_url).add((self.command, path))
            return refusal
        authorization = self.headers.get("Authorization", "")
        if not authorization:
            reads = bucket == "public" and self.command in ("GET", "HEAD")
            return "" if reads else "AccessDenied"
        told = dict(part.strip().split("=", 1) for part in authorization.removeprefix("AWS4-HMAC-SHA256").split(","))
        signed_at = datetime.strptime(self.headers["x-amz-date"], "%Y%m%dT%H%M%S%z")
        if abs(signed_at.timestamp() - time.time() - getattr(self.server, "ahead_s", 0.0)) > _MOST_SKEW_S:
            return "RequestTimeTooSkewed"
        digest = self.headers["x-amz-content-sha256"]
        if digest not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
            return "XAmzContentSHA256Mismatch"
        key, _, region, *service = told["Credential"].split("/")
        credentials = self._credentials_of(key, region)
        if credentials is None or service != ["s3", "aws4_request"]:
            return "InvalidAccessKeyId"
        sorted_query = "&".join(f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}" for n, v in query.items())
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{path}?{sorted_query}")
        for name in told["SignedHeaders"].split(";"):
            request.headers[name] = self.headers[name]
        request.context["timestamp"] = self.headers["x-amz-date"]
        signer = S3SigV4Auth(credentials, "s3", region)
        text = signer.string_to_sign(request, signer.canonical_request(request))
        if signer.signature(text, request) != told["Signature"]:
            return "SignatureDoesNotMatch"
        account = self.server.accounts.get(key)
        return "" if account is None or account.may(self.command, bucket) else "AccessDenied"

    def _refusal_of_url(self, path: str, query: dict[str, str]) -> str:
        """The error code of S3 for a request whose signature is in its URL, over method, path and the named headers."""
        told, now = query.pop("X-Amz-Signature"), time.time() + getattr(self.server, "ahead_s", 0.0)
        sorted_query = "&".join(f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}" for n, v in query.items())
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{path}?{sorted_query}")
        for name in query["X-Amz-SignedHeaders"].split(";"):
            request.headers[name] = self.headers.get(name, "")
        request.context["timestamp"] = query["X-Amz-Date"]
        signer = S3SigV4QueryAuth(_CREDENTIALS, "s3", query["X-Amz-Credential"].split("/")[2])
        text = signer.string_to_sign(request, signer.canonical_request(request))
        if signer.signature(text, request) != told:
            return "SignatureDoesNotMatch"
        signed_at = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%S%z").timestamp()
        is_valid = signed_at - _MOST_SKEW_S <= now < signed_at + int(query["X-Amz-Expires"])
        return "" if is_valid else "AccessDenied"

    def _credentials_of(self, key: str, region: str) -> Credentials | None:
        """Those with which a request of this access key must be signed; None for a key or region that is not known."""
        account = self.server.accounts.get(key)
        found = _CREDENTIALS if account is None else Credentials(account.key, account.secret)
        return found if (found.access_key, region) == (key, "us-east-1") else None
