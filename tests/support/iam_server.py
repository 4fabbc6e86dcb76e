"""An S3 server on loopback with users who may do what their IAM policies say: moto's, and beside it a judge of our own.

moto checks signatures, actions and resources. It knows no conditions on S3 calls, asks about a bulk delete with the
bucket's ARN instead of each object's, and tells everybody what is missing; all three are the judge's, as AWS's and
Ceph's documentation have them: a missing object is told only to who may list it (403 otherwise), with its key as
`s3:prefix`. So moto gets every policy without its conditions (`for_moto`), the judge gets it as it is, and what passes
pleases both. It does NOT prove how AWS itself reads a policy.

As a program it takes {user: policy} as its argument, prints one line of JSON, and serves until it is killed.
"""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs

from s3_server import Expiring, OneCreateAtATime, has_expired, let_tokens_live

BUCKET = "bucket"
ADMIN = "admin"
ROLE = "arn:aws:iam::123456789012:role/lender"  # that every user may assume, with a policy of the request's own
_CALLS = "/_calls"
_EVERYTHING = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
_NOTHING: dict[str, Any] = {"Statement": []}
CREATES = "s3:ObjectCreationOperation"
_KEY_ACTIONS = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One thing that a request asks to be allowed."""

    action: str
    resource: str
    context: Mapping[str, str]  # condition keys that it has


# -- the judge --------------------------------------------------------------------------------------------------------


def allows(policy: Policy, question: Question) -> bool:
    """As IAM decides: a Deny wins, without an Allow it is no."""
    effects = {each["Effect"] for each in policy["Statement"] if _is_about(each, question)}
    return "Allow" in effects and "Deny" not in effects


def denies(policy: Policy, question: Question) -> bool:
    """For a policy that only forbids, as a bucket's may."""
    return any(each["Effect"] == "Deny" and _is_about(each, question) for each in policy["Statement"])


def _is_about(statement: Mapping[str, Any], question: Question) -> bool:
    return (
        any(_like(pattern.lower(), question.action.lower()) for pattern in _listed(statement["Action"]))
        and any(_like(pattern, question.resource) for pattern in _listed(statement["Resource"]))
        and all(
            _holds(operator, question.context.get(key), _listed(values))
            for operator, conditions in statement.get("Condition", {}).items()
            for key, values in conditions.items()
        )
    )


def _holds(operator: str, value: str | None, wanted: list[str]) -> bool:
    if operator == "Null":
        return wanted == [str(value is None).lower()]
    if operator in ("StringEquals", "Bool"):
        return value in wanted
    if operator == "StringLike":
        return value is not None and any(_like(pattern, value) for pattern in wanted)
    raise ValueError(f"this judge does not know the condition operator {operator}. Teach it, or use another.")


def _like(pattern: str, text: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text, re.DOTALL) is not None


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def for_moto(policy: Policy) -> dict[str, Any]:
    """The policy without what moto cannot judge; whoever may delete objects may ask moto for a bulk delete."""
    statements = [{key: value for key, value in each.items() if key != "Condition"} for each in policy["Statement"]]
    removers = [each for each in statements if "s3:DeleteObject" in each["Action"]]
    bulk = [{"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{BUCKET}"} for _ in removers]
    return {**policy, "Statement": statements + bulk}


def questions(environ: Mapping[str, Any], body: bytes) -> list[Question]:
    """What a request asks for. Empty for one that is none of S3's about our bucket."""
    _, bucket, key = f"{environ['PATH_INFO']}/".split("/", 2)
    key, method = key.removesuffix("/"), environ["REQUEST_METHOD"]
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    arn = f"arn:aws:s3:::{bucket}"
    if key and method in _KEY_ACTIONS:
        header = environ.get("HTTP_IF_NONE_MATCH")
        context = {} if header is None else {"s3:if-none-match": header}
        if _KEY_ACTIONS[method] == "s3:PutObject":  # "false" for a part, which makes no object
            context[CREATES] = str("partNumber" not in query).lower()
        return [Question(_KEY_ACTIONS[method], f"{arn}/{key}", context)]
    if method == "GET" and bucket:
        prefix = query.get("prefix")
        return [Question("s3:ListBucket", arn, {} if prefix is None else {"s3:prefix": prefix[0]})]
    if method == "POST" and "delete" in query:
        removed = re.findall(rb"<Key>(.*?)</Key>", body)
        return [Question("s3:DeleteObject", f"{arn}/{each.decode()}", {}) for each in removed]
    if method == "PUT" and bucket:
        return [Question("s3:CreateBucket", arn, {})]
    return []


# -- around moto ------------------------------------------------------------------------------------------------------


class Judge:
    """Refuses what the policy of a request's user does not allow, and writes every call down."""

    def __init__(self, app: Any, policies: dict[str, Policy]) -> None:
        self._app, self._policies = app, policies  # by access key
        self.names: dict[str, str] = {}  # of users, by access key
        self._calls: list[dict[str, Any]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _CALLS:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._calls).encode()]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = BytesIO(body)
        user = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        if environ["REQUEST_METHOD"] == "POST" and b"Action=AssumeRole" in body:
            return self._mint(parse_qs(body.decode()), environ, start_response)
        asked = questions(environ, body)
        refused = not asked or not all(allows(self._policies.get(user, _NOTHING), each) for each in asked)
        expired = has_expired(environ.get("HTTP_X_AMZ_SECURITY_TOKEN"))
        for each in asked:
            told: dict[str, Any] = {"action": each.action, "resource": each.resource, "context": dict(each.context)}
            told |= {"user": self.names.get(user, "nobody"), "key": user, "refused": refused or expired}
            self._calls.append(told)
        if refused and environ["REQUEST_METHOD"] == "POST":
            return _refuse_each(asked, start_response)
        if refused:
            return _refuse(start_response)
        return self._answer(user, asked[0], environ, start_response)

    def _mint(self, asked: Mapping[str, list[str]], environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """moto's temporary credentials, which may do what the request's policy says and no more."""
        answers: list[tuple[Any, ...]] = []
        data = b"".join(self._app(environ, lambda *answer: answers.append(answer)))
        if (found := re.search(rb"<AccessKeyId>(.*?)</AccessKeyId>", data)) is not None:
            key = found[1].decode()
            self._policies[key], self.names[key] = json.loads(asked["Policy"][0]), asked["RoleSessionName"][0]
        start_response(*answers[0])
        return [data]

    def _answer(self, user: str, asked: Question, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """moto's, unless it says that something is missing to one who must not know."""
        answers: list[tuple[Any, ...]] = []
        data = b"".join(self._app(environ, lambda *answer: answers.append(answer)))
        if answers[0][0].startswith("404") and asked.action == "s3:GetObject":
            bucket, _, key = asked.resource.partition("/")
            if not allows(self._policies[user], Question("s3:ListBucket", bucket, {"s3:prefix": key})):
                return _refuse(start_response)
        start_response(*answers[0])
        return [data]


def _refuse(start_response: Any) -> list[bytes]:
    start_response("403 Forbidden", [("Content-Type", "application/xml")])
    return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]


def _refuse_each(asked: list[Question], start_response: Any) -> list[bytes]:
    """A bulk delete is answered object by object."""
    names = (each.resource.partition("/")[2] for each in asked)
    errors = "".join(
        f"<Error><Key>{name}</Key><Code>AccessDenied</Code><Message>no</Message></Error>" for name in names
    )
    start_response("200 OK", [("Content-Type", "application/xml")])
    return [f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{errors}</DeleteResult>'.encode()]


# -- for tests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IamServer:
    """Where it is, and each user's access key and secret."""

    url: str
    users: Mapping[str, tuple[str, str]]

    def options(self, user: str) -> dict[str, str]:
        """`storage_options` of a user."""
        key, secret = self.users[user]
        return {"key": key, "secret": secret, "endpoint_url": self.url}

    def environ(self, user: str) -> dict[str, str]:
        """What a user would export."""
        key, secret = self.users[user]
        return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}

    def calls(self, user: str) -> list[dict[str, Any]]:
        """What a user has asked so far."""
        with urllib.request.urlopen(f"{self.url}{_CALLS}") as answer:
            return [each for each in json.load(answer) if each["user"] == user]


@contextmanager
def running_iam_server(policies: Mapping[str, Policy], token_s: float | None = None) -> Iterator[IamServer]:
    """With the bucket `BUCKET`, a user for each policy, and `ADMIN`, who may do everything.

    `token_s`: how long session tokens live, whatever is asked for; None: as long as is asked for.
    """
    command = [sys.executable, __file__, json.dumps({**policies, ADMIN: _EVERYTHING}), json.dumps(token_s)]
    environ = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "0"}
    server = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        yield IamServer(**json.loads(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def main() -> None:
    import boto3
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.iam.models import iam_backends
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    by_key: dict[str, Policy] = {}
    judge = Judge(Expiring(OneCreateAtATime(DomainDispatcherApplication(create_backend_app))), by_key)
    if (token_s := json.loads(sys.argv[2])) is not None:
        let_tokens_live(token_s)
    users = {}
    iam = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
    role = iam.create_role("lender", json.dumps(_EVERYTHING), "/", None, "", [], "3600")
    iam.put_role_policy(role.name, "policy", json.dumps(_EVERYTHING))  # the judge knows better
    for name, policy in json.loads(sys.argv[1]).items():
        iam.create_user("us-east-1", name)
        iam.put_user_policy(name, "policy", json.dumps(for_moto(policy)))
        made = iam.create_access_key(name)
        users[name] = (made.access_key_id, made.secret_access_key)
        by_key[made.access_key_id], judge.names[made.access_key_id] = policy, name
    server = make_server("127.0.0.1", 0, judge, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    key, secret = users[ADMIN]
    admin = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=key, aws_secret_access_key=secret
    )
    admin.create_bucket(Bucket=BUCKET)
    print(json.dumps({"url": url, "users": users}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
