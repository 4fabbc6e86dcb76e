"""Which failures of a provider pass by themselves, and how long it asks to wait: one table for all executors.

Errors of SDKs are translated where each SDK is called; what is retried, and for how long, is decided by whoever calls.
"""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime

# HTTP statuses after which the same request may succeed later. 408, 425, 429, 500, 502, 503 and 504 are RFC 9110's,
# 8470's and 6585's; 520 to 524 and 530 are what Cloudflare answers for a server behind it; 529 means overloaded.
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529, 530})

# Names in `modal.exception`. ServiceError is gRPC's CANCELLED, UNKNOWN, DEADLINE_EXCEEDED and UNAVAILABLE,
# InternalError its INTERNAL, ConflictError its ABORTED. RESOURCE_EXHAUSTED (ResourceExhaustedError) is `NoCapacity`.
TRANSIENT_MODAL = (
    "ServiceError",
    "InternalError",
    "InternalFailure",
    "ConnectionError",
    "TimeoutError",
    "ConflictError",
    "ExecutionError",  # of the SDK itself: the service answered something that it does not expect
)

# Error codes with which AWS throttles, some of them with HTTP status 400.
TRANSIENT_AWS = frozenset({"Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded"})

# Parts of what Slurm's tools print while the controller, its database or the local munged is away or overloaded.
TRANSIENT_SLURM = (
    "Unable to contact slurm controller",
    "Communication connection failure",
    "Communication message send failure",
    "Communication shutdown failure",
    "Message receive failure",
    "Zero Bytes were transmitted or received",
    "Socket timed out",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "No route to host",
    "in standby mode",
    "temporarily un",  # Resource temporarily unavailable; Slurm temporarily unable to accept job
    "job queue full",
    "Did you start munged",
    "Problem talking to the database",
)


def retry_after_s(headers: Mapping[str, str] | None) -> float | None:
    """The seconds that a `Retry-After` header asks to wait, at least 0 (RFC 9110 section 10.2.3).

    A date counts from the `Date` header, so that no clock but the server's matters. None without the header, or with
    one that is neither seconds nor a date.
    """
    found = {name.lower(): value for name, value in (headers or {}).items()}
    value = found.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        later = parsedate_to_datetime(value) - parsedate_to_datetime(found.get("date", ""))
    except (ValueError, TypeError):  # TypeError: one of them names no time zone
        return None
    return max(0.0, later.total_seconds())
