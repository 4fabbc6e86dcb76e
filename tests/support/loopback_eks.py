"""An EKS cluster on loopback: moto answers for AWS, a loopback Kubernetes looks at the token as EKS and STS would."""

import base64
import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, quote, urlparse

import boto3
from loopback_kubernetes import LoopbackKubernetes, running_kubernetes
from moto.server import ThreadedMotoServer

CLUSTER, REGION = "night-shift", "eu-central-1"
ACCESS_KEY, SECRET_KEY = "AKIALOOPBACK0000TEST", "secret-of-the-aws-user-0042"


def signed_url(token: str) -> str:
    """The question to STS that a token holds."""
    assert token.startswith("k8s-aws-v1.")
    text = token.removeprefix("k8s-aws-v1.")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()


def is_let_in(token: str) -> bool:
    """As EKS and STS decide: a question at most 15 minutes old, signed by our user together with the cluster's name."""
    if not token.startswith("k8s-aws-v1."):
        return False
    url = urlparse(signed_url(token))
    query, _, given = url.query.rpartition("&X-Amz-Signature=")
    told = {key: values[0] for key, values in parse_qs(query).items()}
    asked = datetime.strptime(told["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    key_id, _, scope = told["X-Amz-Credential"].partition("/")
    headers = f"host:{url.netloc}\nx-k8s-aws-id:{CLUSTER}\n\nhost;x-k8s-aws-id"
    canonical = f"GET\n/\n{query_in_order(query)}\n{headers}\n{hashlib.sha256(b'').hexdigest()}"
    to_sign = f"AWS4-HMAC-SHA256\n{told['X-Amz-Date']}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (*scope.split("/"), to_sign):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key_id == ACCESS_KEY and given == key.hex() and datetime.now(UTC) - asked < timedelta(minutes=15)


def query_in_order(query: str) -> str:
    """The query as signatures are made of it."""
    return "&".join(sorted(f"{key}={quote(values[0], safe='-_.~')}" for key, values in parse_qs(query).items()))


def environ(aws: str) -> dict[str, str]:
    """What a user of the cluster would export. `aws`: URL of the server that stands for AWS."""
    return {
        "AWS_ENDPOINT_URL": aws,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


@contextmanager
def running_aws() -> Iterator[str]:
    """moto in this process; its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def running_cluster(aws: str) -> Iterator[LoopbackKubernetes]:
    """A cluster that AWS knows. The caller's environment must be that of `environ`."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.eks.models import eks_backends

    eks = boto3.client("eks", region_name=REGION)
    eks.create_cluster(name=CLUSTER, roleArn="arn:aws:iam::123456789012:role/eks", resourcesVpcConfig={})
    with running_kubernetes(accepts=is_let_in) as kubernetes:
        eks_backends[DEFAULT_ACCOUNT_ID][REGION].clusters[CLUSTER].endpoint = kubernetes.url
        yield kubernetes
        eks.delete_cluster(name=CLUSTER)
