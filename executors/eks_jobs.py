"""`EKSExecutor`: replicas as Jobs of an EKS cluster, logged in by AWS credentials without the aws command.

`kubernetes_jobs` has everything but the login.
"""

import base64
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.executors.answers import TRANSIENT_STATUSES, Failure, error_of, odd_reply, unreadable
from diloco_orchestrator.executors.constructor_options import plain_options, withheld
from diloco_orchestrator.executors.contract import ExecutorDenied, ExecutorError, LaunchRequest, MissingSdk, Unavailable
from diloco_orchestrator.executors.kubernetes_jobs import KubernetesExecutor
from diloco_orchestrator.executors.prices import EC2, EC2_GPUS, Price, listed_tflops

if TYPE_CHECKING:
    from boto3.session import Session
    from kubernetes.client import Configuration

_TOKEN_URL_S = 60  # lifetime of the signed URL in a token; EKS accepts the token for 15 minutes
_SPOT_PRICE_S = 600.0  # between two questions about the spot price
_FAILURES = (
    Failure(Unavailable, (), "it does not answer ({said}). Try again.", TRANSIENT_STATUSES),
    Failure(  # it throttles, some of it with HTTP status 400
        Unavailable,
        ("Throttling", "TooManyRequestsException", "RequestLimitExceeded"),
        "it does not answer ({said}). Try again.",
    ),
    Failure(
        ExecutorDenied,
        (),
        "it does not let us see it ({said}). Check its name, the region and eks:DescribeCluster.",
        (400, 401, 403, 404),
    ),
)
_CALL_S = (10, 30)  # seconds to connect to AWS, and for its answer; boto3's own limits add up to five minutes


class EKSExecutor(KubernetesExecutor):
    """Runs each attempt as a Job of an EKS cluster, by default on spot nodes. Takes `KubernetesExecutor`'s options too.

    Args:
        cluster: Name of the EKS cluster, entered with the AWS credentials at hand; by default that of the kubeconfig.
        region: AWS region of the cluster, by default that of the AWS configuration.
        spot: Only use spot nodes, of EKS node groups or Karpenter.
        kubeconfig: File that says how to reach the cluster, instead of `cluster`.
        hourly_usd: What one replica's machine costs in US dollars an hour, for max_cost_usd and `status`; by default
            from `instance_type`: with spot AWS's price now, else that of a dated table.
    """

    name = "eks"
    _other_logins = ", or the cluster (cluster=, --cluster)"

    def __init__(
        self, cluster: str | None = None, *, region: str | None = None, spot: bool = True, **options: Any
    ) -> None:
        if cluster is not None and not (options.get("kubeconfig") is options.get("context") is None):
            raise ValueError("cluster and kubeconfig or context both say how to reach a cluster. Give one of them.")
        if cluster is None and region is not None:
            raise ValueError(f"region={region!r} belongs to a cluster. Name that too (cluster=...).")
        super().__init__(spot=spot, **options)
        given = {**options, "cluster": cluster, "region": region, "spot": spot, "pod_template": self._pod.template}
        self.options, self.withheld = plain_options(given), withheld(given)
        self._cluster = cluster
        self._region = region
        self._spot_usd: Price | None = None
        self._spot_read_at: float | None = None

    def _where(self) -> dict[str, str | None]:
        return {"cluster": self._cluster, "region": self._region, "context": self._context}

    def _listed_price(self, request: LaunchRequest) -> Price | None:
        kind = self._pod.instance_type
        if kind is None:
            return None
        listed = EC2.price(kind)
        if self._pod.spot and (now := self._spot_price(kind)) is not None:
            listed = now
        elif self._pod.spot and listed is not None:
            listed = replace(listed, source=f"{listed.source}: the spot price cannot be read, and is lower")
        machines, gpus = request.machines(self._pod.ranks_per_machine), EC2_GPUS.get(kind)
        share = request.ranks / gpus if self._pod.gpu and gpus else machines  # all of a machine whose GPUs nobody knows
        return None if listed is None else Price(listed.hourly_usd * share, listed.source, listed_tflops(kind))

    def _spot_price(self, kind: str) -> Price | None:
        """The highest spot price over the region's zones, asked for every ten minutes; None before AWS reports one.

        Where AWS reports none any more, the last one counts.
        """
        now = self._clock.now()
        if self._spot_read_at is None or now - self._spot_read_at > _SPOT_PRICE_S:
            self._spot_read_at = now
            try:
                found = newest_spot_price(_session(self._region), kind, self._clock.wall_time())
            except ExecutorError:
                found = None
            self._spot_usd = found or self._spot_usd
        return self._spot_usd

    def _login(self) -> "Configuration":
        if self._cluster is None:
            return super()._login()
        import kubernetes.config as kubernetes_config
        from kubernetes import client

        config: Any = kubernetes_config
        session = _session(self._region)
        found = _describe(session, self._cluster)
        server = {"server": found["endpoint"], "certificate-authority-data": found["certificateAuthority"]["data"]}
        kubeconfig = {
            "current-context": "eks",
            "contexts": [{"name": "eks", "context": {"cluster": "eks", "user": "eks"}}],
            "clusters": [{"name": "eks", "cluster": server}],
            "users": [{"name": "eks", "user": {}}],
        }
        configuration: Any = client.Configuration()
        config.load_kube_config_from_dict(kubeconfig, client_configuration=configuration)
        next_token = token_maker(session, self._cluster)

        def sign(configuration: "Configuration") -> None:
            """Put a new token into every request: making one costs one hash, and no token expires in use."""
            configuration.api_key["authorization"] = f"Bearer {next_token()}"

        sign(configuration)
        configuration.refresh_api_key_hook = sign
        return configuration  # type: ignore[no-any-return]


def newest_spot_price(session: "Session", kind: str, wall_time: float) -> Price | None:
    """The highest spot price of an instance type over the session's region at a time; None if AWS reports none."""
    from botocore.config import Config  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
    from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

    now = datetime.fromtimestamp(wall_time, UTC)
    quick = Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 1})
    try:
        reply = session.client("ec2", config=quick).describe_spot_price_history(
            InstanceTypes=[kind], ProductDescriptions=["Linux/UNIX"], StartTime=now
        )
        prices = [float(each["SpotPrice"]) for each in reply.get("SpotPriceHistory") or []]
    except (BotoCoreError, ClientError, ResponseParserError, KeyError, TypeError, ValueError):
        return None
    if not prices:
        return None
    return Price(max(prices), f"EC2's spot price in {session.region_name}, {now:%Y-%m-%d %H:%M} UTC")


def token_maker(session: "Session", cluster: str) -> Callable[[], str]:
    """A function that makes EKS login tokens: presigned AWS requests that identify us, which EKS sends to AWS.

    A token lasts 15 minutes. This function and the one it returns raise `ExecutorDenied` if there are no AWS
    credentials.
    """
    from botocore.exceptions import BotoCoreError
    from botocore.signers import RequestSigner  # type: ignore[import-untyped]

    try:
        sts = session.client("sts")
        credentials = session.get_credentials()
    except BotoCoreError as error:
        raise _login_error(cluster, error) from None
    if credentials is None:
        raise ExecutorDenied(
            f"there are no AWS credentials to enter cluster {cluster} with. "
            "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    region = session.region_name
    signer = RequestSigner(sts.meta.service_model.service_id, region, "sts", "v4", credentials, session.events)

    def token() -> str:
        request = {
            "method": "GET",
            "url": f"{sts.meta.endpoint_url}/?Action=GetCallerIdentity&Version=2011-06-15",
            "body": {},
            "headers": {"x-k8s-aws-id": cluster},
            "context": {},
        }
        try:
            url = signer.generate_presigned_url(request, "", expires_in=_TOKEN_URL_S, region_name=region)
        except BotoCoreError as error:
            raise _login_error(cluster, error) from None
        return "k8s-aws-v1." + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")

    return token


def _session(region: str | None) -> "Session":
    try:
        import boto3.session
        import botocore.exceptions  # type: ignore[import-untyped]
    except ImportError:
        raise MissingSdk(
            "logging in to EKS needs boto3, which is not installed. Install it: pip install 'diloco-orchestrator[eks]'"
        ) from None
    try:
        session = boto3.session.Session(region_name=region)
    except botocore.exceptions.BotoCoreError as error:
        raise ExecutorDenied(f"the AWS configuration does not work: {error}. Does the aws command work?") from None
    if session.region_name is None:
        raise ExecutorDenied("no AWS region is known. Name the cluster's (region=...), or set AWS_DEFAULT_REGION.")
    return session


def _describe(session: "Session", cluster: str) -> dict[str, Any]:
    """AWS's description of a cluster: its endpoint and certificate authority. Raises `ExecutorError`."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    connect_s, read_s = _CALL_S
    limits = Config(connect_timeout=connect_s, read_timeout=read_s, retries={"total_max_attempts": 2})
    try:
        reply = session.client("eks", config=limits).describe_cluster(name=cluster)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        what = f"asking AWS about cluster {cluster} in {session.region_name}"
        raise error_of(what, str(error), _FAILURES, status) from None
    except BotoCoreError as error:
        raise _login_error(cluster, error) from None
    except (ResponseParserError, AttributeError, TypeError) as error:  # the last two of null and []
        raise unreadable(f"describing cluster {cluster}", error) from None
    found = reply.get("cluster") or {}
    authority = found.get("certificateAuthority") or {}
    if not (found.get("endpoint") and authority.get("data")):  # also of a cluster that is being made
        raise odd_reply(f"describing cluster {cluster}", "a cluster with an endpoint", found)
    return dict(found)


def _login_error(cluster: str, error: Exception) -> ExecutorError:
    from botocore import exceptions

    names = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError")
    logins = ("SSOError", "LoginError")  # the last of newer versions: `aws login`
    refused = tuple(getattr(exceptions, name) for name in (*names, *logins) if hasattr(exceptions, name))
    if isinstance(error, refused):
        return ExecutorDenied(
            f"there are no working AWS credentials to enter cluster {cluster} with: {str(error).rstrip('.')}. "
            "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret; a login that has ended: aws sso login."
        )
    return Unavailable(f"AWS did not answer about cluster {cluster}: {error}. Try again.")
