"""Opens `s3://bucket/prefix` through obstore with credentials, endpoint and region that boto3 finds; and `hf://buckets/`.

boto3 knows profiles, SSO and roles; obstore alone would query the instance metadata address. `storage_options` have the
names that s3fs uses.
"""

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from diloco_orchestrator.errors import ConfigError, StoreDenied, StoreError, unknown_name
from diloco_orchestrator.store.base import OBJECT_LIMIT
from diloco_orchestrator.store.obstore_engine import (
    CLIENT_OPTIONS,
    NO_RETRIES,
    ObstoreEngine,
    check_certificates,
    checked_endpoint,
    without_user,
)
from diloco_orchestrator.store.s3_credentials import ENV_WRITING_PROFILE

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

OPTIONS = ("key", "secret", "token", "endpoint_url", "profile", "region_name", "anon", "client_kwargs")
_CLIENT_KWARGS = ("region_name", "endpoint_url")
_DEFAULT_REGION = "us-east-1"  # what S3-compatible servers expect when no region is set
_NAMES = "AWS_ENDPOINT_URL, the profile, or storage_options"  # where an endpoint is named
_HF_GATEWAY = "https://s3.hf.co"  # speaks S3 for the storage buckets of Hugging Face


def open_s3(url: str, options: Mapping[str, Any], single_put_limit: int = OBJECT_LIMIT) -> ObstoreEngine:
    """The store below `s3://bucket/prefix`.

    Objects above `single_put_limit` bytes are sent in parts.

    Raises `ConfigError` for an invalid URL or option, if boto3 or the file that SSL_CERT_FILE names is missing,
    `StoreDenied` if there are no credentials, `StoreError` if they cannot be read.
    """
    parts = urlsplit(url)
    if not parts.netloc:
        raise ConfigError(f"{url} names no bucket. Write s3://bucket/folder.")
    prefix = parts.path.strip("/")
    session, settings = _session_of(url, options)
    credentials = _credentials(session, settings, url)
    endpoint = _endpoint(session, settings)
    if _is_tls(endpoint):
        check_certificates()
    opened = partial(_obstore, parts.netloc, prefix, credentials, endpoint, session.region_name)
    writing, writer, writes = options, opened, None
    if profile := os.environ.get(ENV_WRITING_PROFILE):
        writing = {**options, "profile": profile}
        theirs = _credentials(*_session_of(url, writing), url)
        writer = partial(_obstore, parts.netloc, prefix, theirs, endpoint, session.region_name)
        writes = writer(CLIENT_OPTIONS)

    from diloco_orchestrator.store.s3_multipart import MultipartUploads

    def client() -> Any:  # over a session of its own: `BotocoreCredentials` says why
        return _client(_session_of(url, writing)[0], endpoint, _anonymous(settings))

    uploads = MultipartUploads(client, parts.netloc, prefix)
    plain = plain_endpoint(endpoint or "")
    return ObstoreEngine(
        opened(CLIENT_OPTIONS),
        url.rstrip("/"),
        uploads,
        single_put_limit,
        endpoint=plain,
        writes=writes,
        writer=writer,
    )


def open_hf(url: str, options: Mapping[str, Any], allowed: int) -> ObstoreEngine:
    """The store below `hf://buckets/NAMESPACE/NAME/prefix`, a storage bucket of Hugging Face, through its S3 gateway.

    Every object goes up in one request, because the gateway documents create-only writes for those alone; and is
    deleted by one, because it does not say that it knows bulk deletes. `options`: those of `open_s3`; `endpoint_url`
    names another gateway than Hugging Face's, without the namespace. Endpoint and region of the environment are those
    of another store and are not used. `allowed`: requests in five minutes. Raises as `open_s3`.
    """
    namespace, _, rest = urlsplit(url).path.strip("/").partition("/")
    name, _, prefix = rest.partition("/")
    if not name:
        raise ConfigError(f"{url} names no bucket. Write hf://buckets/NAMESPACE/NAME/folder.")
    session, settings = _session_of(url, options)
    endpoint = f"{checked_endpoint(settings.get('endpoint_url') or _HF_GATEWAY, _NAMES).rstrip('/')}/{namespace}"
    credentials = _credentials(session, settings, url)
    opened = partial(_obstore, name, prefix, credentials, endpoint, _DEFAULT_REGION, disable_bulk_delete=True)
    plain = url.rstrip("/")
    return ObstoreEngine(opened(CLIENT_OPTIONS), plain, endpoint=endpoint, writer=opened, allowed=allowed)


def _obstore(
    bucket: str,
    prefix: str,
    credentials: Any,
    endpoint: str | None,
    region: str | None,
    client: "ClientConfig",
    **more: Any,
) -> "S3Store":
    """obstore's store of a bucket. `client`: options of its HTTP client; `more`: other settings of it.

    `credentials`: botocore's; None: requests are not signed. `endpoint`: None for Amazon's own.
    """
    from obstore.store import S3Store

    from diloco_orchestrator.store.s3_credentials import BotocoreCredentials

    where: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}  # obstore refuses None
    return S3Store(
        bucket,
        prefix=prefix or None,
        **where,
        region=region or _DEFAULT_REGION,
        skip_signature=credentials is None,
        unsigned_payload=_is_tls(endpoint),
        credential_provider=None if credentials is None else BotocoreCredentials(credentials),
        client_options={**client, "allow_http": not _is_tls(endpoint)},
        retry_config=NO_RETRIES,
        **more,
    )


def address_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Endpoint and region of S3 from this process's environment or profile, in the spelling of storage options.

    Replicas on other machines need both, because they lack this machine's environment and profile. Values that
    `options` set and Amazon's default endpoint are left out. Empty without boto3. Raises `ConfigError` for an unknown
    option or profile.
    """
    try:
        import boto3
    except ImportError:
        return {}
    settings = _settings(options)
    session = _session(boto3, settings)
    found = {"endpoint_url": _endpoint_of(session), "region_name": session.region_name}
    return {name: value for name, value in found.items() if value and not settings.get(name)}


def token_service(url: str, options: Mapping[str, Any]) -> Any:
    """boto3's client of the service that mints temporary credentials (STS) for the store at `url`, which gives up soon.

    `options`: of the store. An endpoint among them, other than Amazon's, is also that of the service. Raises
    `ConfigError` if boto3 is missing.
    """
    from botocore.config import Config  # type: ignore[import-untyped]

    session, settings = _session_of(url, options)
    region, endpoint = session.region_name or _DEFAULT_REGION, plain_endpoint(settings.get("endpoint_url") or "")
    config = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 2})
    return session.client("sts", region_name=region, endpoint_url=endpoint or None, config=config)


def keys_of_account(url: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The credentials with which this process opens the store at `url`: `key`, `secret` and `token`.

    The token is empty for credentials that never expire. `options`: of the store. Raises `ConfigError` where the store
    is opened anonymously, and as `open_s3` does.
    """
    session, settings = _session_of(url, options)
    credentials = _credentials(session, settings, url)
    if credentials is None:
        raise ConfigError(f"this process has no account for {url}: its requests go without a signature.")
    found = credentials.get_frozen_credentials()
    return {"key": found.access_key, "secret": found.secret_key, "token": found.token or ""}


class Signer:
    """Signs requests for the objects of the folder at `url`, for machines without credentials (`store.presigned`).

    Sends none itself. `options`: credentials and endpoint of the store. Raises `ConfigError` without an account, and as
    `open_s3` does.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        keys_of_account(url, options)
        session, settings = _session_of(url, options)
        endpoint = _endpoint(session, settings)
        self._client = _client(session, endpoint, False, signature_version="s3v4")
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")

    def url_of(self, operation: Literal["read", "create", "put"], key: str, lasts_s: float) -> str:
        """The URL by which anybody may read, create or overwrite the object at `key`, for `lasts_s` seconds.

        At most a week (of S3), and no longer than this process's own credentials. One that creates is valid with the
        header `If-None-Match: *` alone.
        """
        where = {"Bucket": self._bucket, "Key": f"{self._prefix}/{key}" if self._prefix else key}
        create = {"IfNoneMatch": "*"} if operation == "create" else {}
        method = "get_object" if operation == "read" else "put_object"
        return str(self._client.generate_presigned_url(method, Params={**where, **create}, ExpiresIn=int(lasts_s)))


def _is_tls(endpoint: str | None) -> bool:
    """Whether requests use TLS, so that the signature need not cover bodies: hashing costs more than sending."""
    return not (endpoint or "").startswith("http://")


def _client(session: Any, endpoint: str | None, anonymous: bool, **more: str) -> Any:
    """boto3's client for uploads in parts, and to sign requests. `endpoint`: None for Amazon's own; `anonymous`: sign
    no request. `more`: settings of botocore's.
    """
    from botocore import UNSIGNED  # type: ignore[import-untyped]
    from botocore.config import Config

    config = Config(
        connect_timeout=10,
        read_timeout=30,
        # Without them one lost part of a hundred would repeat the whole upload.
        retries={"mode": "standard", "total_max_attempts": 4},
        # Other checksums than the one of the signature are unknown to some S3-compatible servers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": not _is_tls(endpoint)},
        **({"signature_version": UNSIGNED} if anonymous else more),
    )
    # The file in which obstore looks for certificates; boto3 knows a name of its own alone.
    trusted = None if os.environ.get("AWS_CA_BUNDLE") else os.environ.get("SSL_CERT_FILE")
    region = session.region_name or _DEFAULT_REGION
    return session.client("s3", endpoint_url=endpoint, region_name=region, config=config, verify=trusted)


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as one dict, those of `client_kwargs` included. Raises `ConfigError` for an unknown option."""
    found = dict(options)
    inner = found.pop("client_kwargs", None) or {}
    for name, known in [*((n, OPTIONS) for n in found), *((n, _CLIENT_KWARGS) for n in inner)]:
        if name not in known:
            raise ConfigError(unknown_name("storage option", name, known))
    return {**inner, **found}


def _session_of(url: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """boto3's session for the options of a store, and those as one dict. Raises `ConfigError` as `open_s3` says."""
    try:
        import boto3
    except ImportError as error:
        raise ConfigError(f"{url} needs boto3 ({error}). Install diloco-orchestrator[s3].") from None
    settings = _settings(options)
    return _session(boto3, settings), settings


def _anonymous(settings: Mapping[str, Any]) -> bool:
    """Whether requests go without a signature, by option or environment."""
    return bool(settings.get("anon", is_anonymous()))


def _session(boto3: Any, settings: Mapping[str, Any]) -> Any:
    try:
        return boto3.Session(
            aws_access_key_id=settings.get("key"),
            aws_secret_access_key=settings.get("secret"),
            aws_session_token=settings.get("token"),
            # boto3 alone knows AWS_DEFAULT_REGION only; every other AWS SDK, and EKS's pods, say AWS_REGION.
            region_name=settings.get("region_name") or os.environ.get("AWS_REGION"),
            profile_name=settings.get("profile"),
        )
    except Exception as error:  # botocore's profile errors share no base with others
        raise ConfigError(f"cannot set up S3 access: {error}.") from error


def _credentials(session: Any, settings: Mapping[str, Any], url: str) -> Any:
    """botocore's credentials for the store at `url`; None if requests go without a signature, by option or environment.

    Raises `StoreDenied` if there are none, `StoreError` if they cannot be read.
    """
    if _anonymous(settings):
        return None
    try:
        found = session.get_credentials()
    except Exception as error:  # a file that is half written, a credential_process that fails
        raise StoreError(
            f"cannot get S3 credentials for {url}: {error}. Check the profile's files and what they name."
        ) from error
    if found is None:
        of_hf = "keys (HFAK…) are made from a token in the account's settings there; " if url.startswith("hf:") else ""
        raise StoreDenied(
            f"there are no S3 credentials for {url}: neither in the environment nor in a profile nor from a role. "
            f"Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or pass storage_options; {of_hf}to read "
            "a public bucket, AWS_SKIP_SIGNATURE=true."
        )
    return found


def _endpoint(session: Any, settings: Mapping[str, Any]) -> str | None:
    """The endpoint that options, AWS_ENDPOINT_URL or a profile set, or None for Amazon's own. Raises `ConfigError` if
    it is no address.
    """
    given = settings.get("endpoint_url")
    return checked_endpoint(given, _NAMES) if given else _endpoint_of(session)


def _endpoint_of(session: Any) -> str | None:
    """The endpoint that AWS_ENDPOINT_URL or a profile sets, or None for Amazon's own. Raises `ConfigError` if it is no
    address.
    """
    try:
        client = session.client("s3", region_name=session.region_name or _DEFAULT_REGION)
    except ValueError as error:  # of an endpoint, or a region, that botocore does not take
        raise ConfigError(
            f"cannot set up S3 access: {without_user(str(error))}. An endpoint ({_NAMES}) is http://host:port or "
            "https://host, a region (AWS_REGION) a name such as eu-central-1."
        ) from error
    found = plain_endpoint(str(client.meta.endpoint_url))
    return checked_endpoint(found, _NAMES) if found else None


def is_anonymous() -> bool:
    """Whether the environment asks for requests without a signature, by obstore's variable `AWS_SKIP_SIGNATURE`."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")


def pays_for_requests() -> bool:
    """Whether the environment offers to pay for reading a bucket whose requester pays (`AWS_REQUEST_PAYER`)."""
    return os.environ.get("AWS_REQUEST_PAYER", "").lower() in ("requester", "true")


def plain_endpoint(url: str) -> str:
    """The URL of an S3 endpoint without a slash at its end; empty for Amazon's own."""
    plain = url.rstrip("/")
    return "" if plain.endswith(".amazonaws.com") else plain
