"""The table of S3 error codes for all engines: the error class for each code, and the remedy in its message.

`store.retrying` decides which classes are retried.
"""

from collections.abc import Mapping

from diloco_orchestrator.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable

_REGION = "The bucket lies in another region: set AWS_REGION to it."
_EXPIRED = "The session token has expired: sign in again."
NO_REASON = (
    "The server gives no reason: the session token may have expired, or may not allow this here, or this machine's "
    "clock is off: set it, or sign in again."
)
_TOO_LARGE = "The object is larger than this store takes in one request: keep this run in S3, GCS or a folder."
FOREIGN_404 = (
    "404 without an error code of the store. Something else answers there, such as a proxy whose server is away: check "
    "the endpoint if this stays."
)
THROTTLED = "The store asks for fewer requests."
BY_CODE: dict[str, tuple[type[StoreError], str]] = {
    "NoSuchBucket": (StoreError, "Check the bucket's name and the endpoint; a run needs a bucket that exists."),
    "ContainerNotFound": (StoreError, "Check the container's name and the account; a run needs one that exists."),
    "SignatureDoesNotMatch": (StoreDenied, "The secret key is wrong for this access key."),
    "InvalidAccessKeyId": (StoreDenied, "The access key is not known there: is it of another account or endpoint?"),
    "ExpiredToken": (StoreDenied, _EXPIRED),
    "TokenRefreshRequired": (StoreDenied, _EXPIRED),
    "InvalidToken": (StoreDenied, "The session token is not valid: sign in again."),
    "RequestExpired": (StoreDenied, "The request was signed too long ago: is this machine's clock right?"),
    "RequestTimeTooSkewed": (StoreDenied, "This machine's clock is too far off for signed requests: set it."),
    "AccessDenied": (StoreDenied, "Check what these credentials allow on this bucket and prefix."),
    "InvalidObjectState": (
        StoreError,
        "The object is archived, as by a lifecycle rule of the bucket: restore it, and let no rule archive a run.",
    ),
    # The answer to HEAD has no body, so that the status is all there is; an expired token is a 400.
    "400": (StoreDenied, NO_REASON),
    "401": (StoreDenied, NO_REASON),
    "403": (StoreDenied, NO_REASON),
    "PermanentRedirect": (StoreError, _REGION),
    "AuthorizationHeaderMalformed": (StoreError, _REGION),
    "IllegalLocationConstraintException": (StoreError, _REGION),
    "NotImplemented": (StoreError, "This store does not implement what a run needs, such as create-only writes."),
    "ConditionalRequestConflict": (StoreUnavailable, "Another writer wrote at the same time."),
    "OperationAborted": (StoreUnavailable, "Another writer wrote at the same time."),
    "SlowDown": (StoreUnavailable, THROTTLED),
    "RequestTimeout": (StoreUnavailable, "The request came in too slowly."),
    "InternalError": (StoreUnavailable, "The server failed."),
    "ServiceUnavailable": (StoreUnavailable, "The server is overloaded."),
    "NoSuchUpload": (StoreUnavailable, "The upload in parts was ended from elsewhere; it begins anew."),
    "EntityTooLarge": (StoreError, _TOO_LARGE),
    "RequestBodyTooLarge": (StoreError, _TOO_LARGE),  # Azure's
    "QuotaExceeded": (StoreFull, "The account's quota is used up."),
}


def store_error(kind: type[StoreError], message: str, after_s: float = 0.0) -> StoreError:
    """The error of this kind; a transient fault says after how many seconds the store may be asked again."""
    return StoreUnavailable(message, after_s) if kind is StoreUnavailable else kind(message)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds in a reply's Retry-After header; 0 without one, and for one that holds a date."""
    value = headers.get("Retry-After") or headers.get("retry-after") or ""
    return float(value) if value.isascii() and value.isdecimal() else 0.0
