"""A look-alike of Cloudflare R2 on loopback, which enforces what R2's documentation says of temporary credentials.

https://developers.cloudflare.com/r2/api/s3/temporary-credentials/ (2026-04): a session token is `jwt/` and a JSON web
token that the secret of an API token's access key has signed, in base64; requests are signed with the SHA-256 of that
web token. It names account, endpoint, bucket, end, operations and paths. The documentation does not say how a listing
is checked (here its prefix must begin with an allowed one), and which error an ended token gets (here 401
Unauthorized).

It is reached under R2's own names, as an HTTP proxy: `environ` has the variables.
"""

import base64
import hashlib
import hmac
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.credentials import Credentials
from signed_s3 import GuardedServer, SignedS3, _Guarded

ACCOUNT = "0123456789abcdef0123456789abcdef"
ENDPOINT = f"http://{ACCOUNT}.r2.cloudflarestorage.com"
KEY, SECRET = "f" * 32, "5" * 64
_READS = {"GetObject", "HeadObject", "ListObjectsV1", "ListObjectsV2"}


class LoopbackR2(SignedS3):
    def environ(self) -> dict[str, str]:
        """What the owner of the account would export, and a machine without an account the last one."""
        return {
            "AWS_ENDPOINT_URL": ENDPOINT,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "auto",
            "http_proxy": self.url,
        }


@contextmanager
def running_r2() -> Iterator[LoopbackR2]:
    """A server in a thread of this process."""
    with GuardedServer() as server:
        server.RequestHandlerClass = _R2
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield LoopbackR2(f"http://127.0.0.1:{server.server_port}", server)
        finally:
            server.shutdown()
            thread.join()


class _R2(_Guarded):
    def _refusal(self, body: bytes) -> str:
        self._claims: dict[str, Any] | None = None
        if token := self.headers.get("x-amz-security-token"):
            self._web_token = base64.b64decode(token).decode().removeprefix("jwt/")
            self._claims = _claims_of(self._web_token, self.headers["Host"])
            now = time.time() + getattr(self.server, "ahead_s", 0.0)
            if self._claims is None or not self._claims["iat"] <= now + 60 or now >= self._claims["exp"]:
                return "Unauthorized"
        refusal = super()._refusal(body)
        return refusal or ("" if self._claims is None or self._may(self._claims, body) else "AccessDenied")

    def _credentials_of(self, key: str, region: str) -> Credentials | None:
        if key != KEY or region not in ("auto", "us-east-1"):
            return None
        return Credentials(key, SECRET if self._claims is None else _secret_of(self._web_token))

    def _may(self, claims: dict[str, Any], body: bytes) -> bool:
        """Whether bucket, operations and paths of the session token allow this request."""
        split = urlsplit(self.path)
        bucket, _, key = unquote(split.path).lstrip("/").partition("/")
        query = parse_qs(split.query, keep_blank_values=True)
        action = _action(self.command, key, query)
        named = re.findall(r"<Key>(.*?)</Key>", body.decode()) if action == "DeleteObjects" else [key]
        names = named if any(named) else query.get("prefix", [""])
        paths = claims.get("paths", {"prefixPaths": [""], "objectPaths": []})
        allowed = _READS if claims.get("scope") == "object-read-only" else None
        return (
            bucket == claims["bucket"]
            and (allowed is None or action in allowed)
            and ("actions" not in claims or action in claims["actions"])
            and all(n in paths["objectPaths"] or n.startswith(tuple(paths["prefixPaths"])) for n in names)
        )


def _action(method: str, key: str, query: dict[str, list[str]]) -> str:
    if method == "GET" and not key:
        return "ListObjectsV2" if "list-type" in query else "ListObjectsV1"
    if method == "POST":
        names = {"uploads": "CreateMultipartUpload", "uploadId": "CompleteMultipartUpload", "delete": "DeleteObjects"}
        return next(action for name, action in names.items() if name in query)
    if "uploadId" in query:
        return "UploadPart" if method == "PUT" else "AbortMultipartUpload"
    return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}[method]


def _claims_of(web_token: str, host: str) -> dict[str, Any] | None:
    """The claims of a web token that the account's key has signed for this endpoint; None for any other."""
    said, _, signature = web_token.rpartition(".")
    header, claims = (json.loads(_decoded(each)) for each in said.split("."))
    right = hmac.digest(SECRET.encode(), said.encode(), "sha256")
    is_ours = header == {"alg": "HS256", "typ": "JWT"} and hmac.compare_digest(right, _decoded(signature))
    is_ours &= (claims["iss"], claims["sub"], claims["aud"]) == (KEY, ACCOUNT, host)
    return claims if is_ours and ("scope" in claims or "actions" in claims) else None


def _secret_of(web_token: str) -> str:
    return hashlib.sha256(web_token.encode()).hexdigest()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
