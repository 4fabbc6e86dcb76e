"""`BotocoreCredentials`: credentials for obstore, asked of botocore again before half of their lifetime has passed.

botocore decides which credentials these are (profile, SSO, role), and renews them.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Credential

# The profile whose credentials write, where others read: a variable that a machine with a link sets for its replica.
ENV_WRITING_PROFILE = "DILOCO_WRITING_PROFILE"

# Seconds until botocore is asked again: the first that is at most half of what the credentials have left; in the last
# two seconds of their life every request asks. botocore renews what has less than 15 minutes left if it can, and below
# 10 it must; some sources hand out the next credentials only 5 minutes before the end of the last ones.
_PAUSES_S = tuple(600.0 * 0.5**halvings for halvings in range(10))


def pause_s(credentials: Any) -> float:
    """Seconds until botocore's credentials should be renewed, at most half of the time that they remain valid.

    0 shortly before and after they expire; a fixed pause for static credentials, whose expiry is not known.
    """
    refresh_needed: Callable[[float], bool] | None = getattr(credentials, "refresh_needed", None)
    if refresh_needed is None:  # static ones, without an end that this machine knows
        return _PAUSES_S[0]
    return next((pause for pause in _PAUSES_S if not refresh_needed(2 * pause)), 0.0)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class BotocoreCredentials:
    """obstore's credential provider over the `credentials` of a boto3 session.

    obstore's own provider assumes that all credentials live for another 30 minutes. Nothing else may use the session: a
    renewal by another thread between the reads of key and expiry would pair old credentials with the new expiry.
    """

    refresh_threshold = timedelta(0)  # obstore asks again once `expires_at` has passed; by default five minutes before

    def __init__(self, credentials: Any, now: Callable[[], datetime] = _utc_now) -> None:
        self.config: S3Config = {}  # obstore reads it
        self._credentials = credentials
        self._now = now

    def __call__(self) -> "S3Credential":
        """The current credentials, and when to ask again. Raises botocore's errors if they cannot be renewed."""
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": self._now() + timedelta(seconds=pause_s(self._credentials)),
        }
