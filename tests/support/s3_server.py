"""A real S3 server on loopback that checks signatures: moto's, in a process of its own.

As a program it prints one line of JSON, {url, key, secret}, and serves until it is killed.
"""

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

EVERYTHING = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["s3:*", "iam:*", "sts:*"], "Resource": "*"}],
}
ROLE = "arn:aws:iam::123456789012:role/tests"


@dataclass(frozen=True)
class S3Server:
    """Where it is, and a user that may do everything there."""

    url: str
    key: str
    secret: str

    def options(self, **changes: Any) -> dict[str, Any]:
        """`storage_options` for it."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.url, **changes}

    def environ(self) -> dict[str, str]:
        """What a user would export."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> str:
        self.client("s3").create_bucket(Bucket=name)
        return name

    @functools.cache  # noqa: B019 - a process has one or two servers
    def client(self, service: str) -> Any:
        """boto3's, of the user that may do everything; one for all, because to make it takes .1 s of CPU time."""
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
        )


@contextmanager
def running_server(token_s: float = 3600.0) -> Iterator[S3Server]:
    """`token_s`: how long the session tokens of `ROLE` live, whatever is asked for."""
    # Three unsigned calls are let through: they create the user and its policy.
    environ = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3"}
    command = [sys.executable, __file__, str(token_s)]
    server = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        yield S3Server(**json.loads(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


class OneCreateAtATime:
    """moto looks for the object and then writes it, which two threads can do at once; S3 does both in one."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environ or environ["REQUEST_METHOD"] not in ("PUT", "POST"):
            return self._app(environ, start_response)
        with self._lock:
            return self._app(environ, start_response)


class Expiring:
    """moto takes a session token for ever; S3 answers 400 ExpiredToken after its end."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if not has_expired(environ.get("HTTP_X_AMZ_SECURITY_TOKEN")):
            return self._app(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else body
        start_response("400 Bad Request", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


def has_expired(token: str | None) -> bool:
    """Whether this is the session token of an assumed role whose time is over."""
    from moto.core.utils import utcnow
    from moto.sts.models import sts_backends

    roles = sts_backends["123456789012"]["aws"].assumed_roles
    return any(role.session_token == token and role.expiration < utcnow() for role in roles)


def let_tokens_live(seconds: float) -> None:
    from moto.sts.models import STSBackend

    assume = STSBackend.assume_role
    STSBackend.assume_role = lambda self, **asked: assume(self, **{**asked, "duration": seconds})  # type: ignore[method-assign]


class Presigned:
    """moto lets no presigned URL through where it checks signatures. This checks them, and signs the request anew."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        query = parse_qs(environ.get("QUERY_STRING", ""))
        if "X-Amz-Signature" not in query:
            return self._app(environ, start_response)
        told = {name: values[0] for name, values in query.items()}
        url = f"http://{environ['HTTP_HOST']}{environ['RAW_URI'].partition('?')[0]}"
        credentials = _credentials(told["X-Amz-Credential"].partition("/")[0])
        if (
            environ["REQUEST_METHOD"] != "GET"
            or _is_late(told)
            or _signature(url, told, credentials) != told.pop("X-Amz-Signature")
        ):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        request = AWSRequest("GET", url, headers={"host": environ["HTTP_HOST"]})
        S3SigV4Auth(credentials, "s3", told["X-Amz-Credential"].split("/")[2]).add_auth(request)
        for name in ("Authorization", "X-Amz-Date", "X-Amz-Content-SHA256"):
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = request.headers[name]
        return self._app({**environ, "QUERY_STRING": ""}, start_response)


def _credentials(key: str) -> Credentials:
    """Of any user that moto knows."""
    from moto.iam.models import iam_backends

    for backend in iam_backends.values():
        for each in backend.values():
            for user in each.users.values():
                for access in user.access_keys:
                    if access.access_key_id == key:
                        return Credentials(key, access.secret_access_key)
    return Credentials(key, "nobody has this key")


def _is_late(told: dict[str, str]) -> bool:
    signed = datetime.strptime(told["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    return time.time() > signed + int(told["X-Amz-Expires"])


def _signature(url: str, told: dict[str, str], credentials: Credentials) -> str:
    """What the signature must be."""
    others = {name: value for name, value in told.items() if name != "X-Amz-Signature"}
    auth = S3SigV4QueryAuth(credentials, "s3", told["X-Amz-Credential"].split("/")[2])
    request = AWSRequest("GET", f"{url}?{urlencode(others, quote_via=quote)}")
    request.context["timestamp"] = told["X-Amz-Date"]
    request.headers["host"] = urlsplit(url).netloc
    return str(auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request))


def main() -> None:
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    let_tokens_live(float(sys.argv[1]))
    app = Expiring(Presigned(OneCreateAtATime(DomainDispatcherApplication(create_backend_app))))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
    url = f"http://127.0.0.1:{port}"
    iam = boto3.client(
        "iam", endpoint_url=url, region_name="us-east-1", aws_access_key_id="nobody", aws_secret_access_key="nobody"
    )
    iam.create_user(UserName="tests")
    made = iam.create_access_key(UserName="tests")["AccessKey"]
    iam.put_user_policy(UserName="tests", PolicyName="everything", PolicyDocument=json.dumps(EVERYTHING))
    user = S3Server(url, made["AccessKeyId"], made["SecretAccessKey"]).client("iam")
    user.create_role(RoleName="tests", AssumeRolePolicyDocument=json.dumps(EVERYTHING))
    user.put_role_policy(RoleName="tests", PolicyName="everything", PolicyDocument=json.dumps(EVERYTHING))
    print(json.dumps({"url": url, "key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
