"""Signers of requests for machines without credentials (`store.presigned`), on Azure and GCS; S3's is in `store.s3`.

Each signature covers one object, one operation and an end. What creates overwrites nothing: on Azure by a permission
of its own, on GCS by a condition that is among the signed headers.
"""

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from diloco_orchestrator.clock import Clock, SystemClock
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.store.presigned import CREATES

Operation: TypeAlias = Literal["read", "create", "put"]

_SAS_VERSION = "2021-08-06"
_PERMISSIONS: dict[Operation, str] = {"read": "r", "create": "c", "put": "cw"}


class Signs(Protocol):
    """A signer of requests for the objects of one folder. It sends none itself."""

    def url_of(self, operation: Operation, key: str, lasts_s: float) -> str:
        """The URL by which anybody may read, create or overwrite the object at `key`, for `lasts_s` seconds."""
        ...


def signer_of(url: str, options: Mapping[str, Any]) -> Signs:
    """The signer for the folder at `url`. `options`: credentials and endpoint of the store, beside the environment.

    Raises `ConfigError` for a store whose requests cannot be signed, or without credentials that can sign.
    """
    scheme = url.partition("://")[0]
    if scheme in ("s3", "s3a"):
        from diloco_orchestrator.store.s3 import Signer

        return Signer(url, options)
    if scheme in ("gs", "gcs"):
        return GcsSigner(url, options)
    if scheme in ("az", "abfs", "abfss"):
        return AzureSigner(url, options)
    raise ConfigError(f"requests are signed for S3, GCS and Azure alone, and {url} is in another store.")


class AzureSigner:
    """Signs by the account's key, as a service SAS of one blob (Azure's shared access signature).

    Raises `ConfigError` without that key.
    """

    def __init__(self, url: str, options: Mapping[str, Any], clock: Clock | None = None) -> None:
        parts, self._clock = urlsplit(url), clock or SystemClock()
        self._account = str(options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", ""))
        self._container, self._prefix = parts.netloc, parts.path.strip("/")
        if "@" in parts.netloc:
            self._container, _, host = parts.netloc.partition("@")
            self._account = host.partition(".")[0]
        key = str(options.get("account_key") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY", ""))
        if not self._account or not key:
            raise ConfigError(
                f"requests for {url} are signed by the account's key alone: set AZURE_STORAGE_ACCOUNT_NAME and "
                "AZURE_STORAGE_ACCOUNT_KEY where the run is supervised and where the link is made."
            )
        try:
            self._key = base64.b64decode(key, validate=True)
        except ValueError:
            raise ConfigError("AZURE_STORAGE_ACCOUNT_KEY is not base64, as Azure shows account keys.") from None
        named = options.get("endpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT")
        self._endpoint = str(named or f"https://{self._account}.blob.core.windows.net").rstrip("/")

    def url_of(self, operation: Operation, key: str, lasts_s: float) -> str:
        """The URL by which anybody may read, create or overwrite a blob for `lasts_s` seconds, a service SAS."""
        name = f"{self._prefix}/{key}" if self._prefix else key
        ends = f"{datetime.fromtimestamp(self._clock.wall_time() + lasts_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
        protocol = "https" if self._endpoint.startswith("https://") else ""
        resource = f"/blob/{self._account}/{self._container}/{name}"
        fields = [_PERMISSIONS[operation], "", ends, resource, "", "", protocol, _SAS_VERSION, "b", *[""] * 7]
        signature = base64.b64encode(hmac.digest(self._key, "\n".join(fields).encode(), hashlib.sha256)).decode()
        query = {"sv": _SAS_VERSION, "sr": "b", "sp": _PERMISSIONS[operation], "se": ends, "sig": signature}
        query |= {"spr": protocol} if protocol else {}
        return f"{self._endpoint}/{self._container}/{quote(name)}?{urlencode(query)}"


class GcsSigner:
    """Signs by the private key of a service account (GOOG4-RSA-SHA256).

    Raises `ConfigError` without such a key: a machine's own identity has none.
    """

    def __init__(self, url: str, options: Mapping[str, Any], clock: Clock | None = None) -> None:
        parts, self._clock = urlsplit(url), clock or SystemClock()
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        account = _service_account(options)
        try:
            self._email = str(account["client_email"])
            key = load_pem_private_key(str(account["private_key"]).encode(), None)
        except (KeyError, ValueError):
            key = None
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError(
                f"requests for {url} are signed by the key of a service account alone: name its JSON file in "
                "GOOGLE_APPLICATION_CREDENTIALS where the run is supervised and where the link is made."
            )
        self._key = key
        named = options.get("base_url") or os.environ.get("GOOGLE_BASE_URL")
        self._endpoint = str(named or "https://storage.googleapis.com").rstrip("/")

    def url_of(self, operation: Operation, key: str, lasts_s: float) -> str:
        """The URL by which anybody may read, create or overwrite an object for `lasts_s` seconds, at most a week."""
        name = f"{self._prefix}/{key}" if self._prefix else key
        path = quote(f"/{self._bucket}/{name}", safe="/~")
        at = f"{datetime.fromtimestamp(self._clock.wall_time(), UTC):%Y%m%dT%H%M%SZ}"
        scope = f"{at[:8]}/auto/storage/goog4_request"
        headers = {"host": urlsplit(self._endpoint).netloc, **(CREATES["gs"] if operation == "create" else {})}
        query = {
            "X-Goog-Algorithm": "GOOG4-RSA-SHA256",
            "X-Goog-Credential": f"{self._email}/{scope}",
            "X-Goog-Date": at,
            "X-Goog-Expires": str(int(lasts_s)),
            "X-Goog-SignedHeaders": ";".join(headers),
        }
        encoded = urlencode(query, quote_via=quote, safe="~")
        lines = ["GET" if operation == "read" else "PUT", path, encoded, *(f"{n}:{v}" for n, v in headers.items())]
        request = "\n".join([*lines, "", ";".join(headers), "UNSIGNED-PAYLOAD"])
        text = "\n".join(["GOOG4-RSA-SHA256", at, scope, hashlib.sha256(request.encode()).hexdigest()])
        signature = self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()).hex()
        return f"{self._endpoint}{path}?{encoded}&X-Goog-Signature={signature}"


def _service_account(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON of a service account, from where obstore takes it; empty if there is none that can be read."""
    text = options.get("service_account_key") or os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY")
    names = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS")
    paths = [options.get("service_account"), options.get("application_credentials"), *map(os.environ.get, names)]
    try:
        found = json.loads(text or Path(next(filter(None, paths))).read_text())
    except (StopIteration, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
