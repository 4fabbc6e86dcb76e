"""A real S3 server on loopback that checks signatures: moto's, in a process of its own.

As a program it prints one line of JSON, {url, key, secret}, and serves until it is killed.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

EVERYTHING = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:*"], "Resource": "*"}]}


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
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
        )
        client.create_bucket(Bucket=name)
        return name


@contextmanager
def running_server() -> Iterator[S3Server]:
    # Three unsigned calls are let through: they create the user and its policy.
    environ = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3"}
    server = subprocess.Popen(
        [sys.executable, __file__], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
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
        if "HTTP_IF_NONE_MATCH" not in environ or environ["REQUEST_METHOD"] != "PUT":
            return self._app(environ, start_response)
        with self._lock:
            return self._app(environ, start_response)


def main() -> None:
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    app = OneCreateAtATime(DomainDispatcherApplication(create_backend_app))
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
    print(json.dumps({"url": url, "key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
