"""Checks that replicas on other machines have credentials for the run's bucket, before anything costs money.

A launcher's own credentials (profile, SSO, role of its machine) stay on its machine. Whether the store accepts the
replicas' credentials, only a replica can find out: `diloco doctor --executor … URL` starts one.
"""

from collections.abc import Collection, Mapping
from typing import Any

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.contract import (
    Identity,
    LaunchRequest,
    ServerlessExecutor,
)

# Sets of variables with which a store's SDK finds credentials, by scheme. One whole set is enough.
_VARIABLES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
        ("AWS_SHARED_CREDENTIALS_FILE",),
        ("AWS_CONFIG_FILE",),
    ),
    "hf": (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_SHARED_CREDENTIALS_FILE",)),
    "gs": (
        ("GOOGLE_APPLICATION_CREDENTIALS",),
        ("GOOGLE_SERVICE_ACCOUNT",),
        ("GOOGLE_SERVICE_ACCOUNT_PATH",),
        ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    ),
    "az": (
        ("AZURE_STORAGE_ACCOUNT_KEY",),
        ("AZURE_STORAGE_ACCESS_KEY",),
        ("AZURE_STORAGE_SAS_TOKEN",),
        ("AZURE_STORAGE_SAS_KEY",),
        ("AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET"),
        ("AZURE_FEDERATED_TOKEN_FILE",),
    ),
}
_SCHEMES = {"s3": "s3", "s3a": "s3", "hf": "hf", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_PROFILE_FILES = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")


def check_route(
    url: str, storage_options: Mapping[str, Any], request: LaunchRequest, executor: ServerlessExecutor
) -> None:
    """Raise `ConfigError` if a replica on another machine would have no credentials for the bucket of `url`.

    A profile counts as none, because it is a section of a file on this machine. Only S3, GCS, Azure and the storage
    buckets of Hugging Face are checked, and only executors that report which credentials their replicas have.

    Args:
        storage_options: as the user gave them.
        request: the replica's launch request.
        executor: of the run; of a mixed one the part that launches this replica.
    """
    scheme = _SCHEMES.get(url.removeprefix("fsspec+").partition("://")[0].lower()) if "://" in url else None
    launching = executor.part(request)
    if scheme is None or launching.shares_machine:
        return
    known = launching.identity()
    variables = {*request.env, *request.secrets, *(known.variables if known else ())}
    if scheme in ("s3", "hf"):
        _check_profile(storage_options, variables)
    if known is None or _has_route(scheme, storage_options, variables, known):
        return
    needs = f" ({known.source} is one only with the variable {known.needs})" if known.source else ""
    without_secret = "" if scheme == "hf" else known.advice  # it knows keys alone, and no cloud's identities
    needed = " and ".join(_VARIABLES[scheme][0])
    raise ConfigError(
        f"replica {request.replica_id} on {launching.name} would have no credentials for {url}: this machine's stay "
        f"here{needs}. Hand some over as secrets of the provider, {_options_advice(scheme)} or secrets={{…}} with "
        f"{needed} (--secret NAME)" + (f"; or without any secret: {without_secret}." if without_secret else ".")
    )


def _has_route(scheme: str, storage_options: Mapping[str, Any], variables: Collection[str], identity: Identity) -> bool:
    options = {*storage_options}
    if options & {"anon", "skip_signature"} or {"key", "secret"} <= options:
        return True
    if scheme in ("gs", "az") and storage_options:  # obstore's own settings, of which many are credentials
        return True
    if any(set(needed) <= set(variables) for needed in _VARIABLES[scheme]):
        return True
    return bool(identity.source) and (not identity.needs or identity.needs in variables)


def _check_profile(storage_options: Mapping[str, Any], variables: Collection[str]) -> None:
    if "profile" in storage_options:
        raise ConfigError(
            f"storage_options name the profile {storage_options['profile']!r}, a section of ~/.aws on this machine "
            "that replicas elsewhere do not have. Export AWS_PROFILE here instead, and hand replicas a key and secret "
            "or an identity of their own (secrets=, oidc=, a service account with IRSA)."
        )
    if "AWS_PROFILE" in variables and not {*_PROFILE_FILES} & set(variables):
        raise ConfigError(
            "AWS_PROFILE would be set in replicas elsewhere, whose images have no such profile. Leave it out; or, if "
            "the image brings one, name its file too: env={'AWS_CONFIG_FILE': …}."
        )


def _options_advice(scheme: str) -> str:
    return "storage_options={'key': …, 'secret': …}" if scheme in ("s3", "hf") else "storage_options={…}"
