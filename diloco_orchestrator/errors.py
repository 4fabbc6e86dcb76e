"""Every error type that a caller may want to tell apart, and the two helpers that word them.

A new type exists only where a caller acts differently on it. Messages have three parts: what happened, to which
object, and what the reader can do now.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from diloco_orchestrator.executors.names import nearest as nearest
from diloco_orchestrator.executors.names import unknown_name as unknown_name
from diloco_orchestrator.protocol.process import ENV_SECRET_NAMES


class DilocoError(Exception):
    """Base of all errors raised by this project on purpose."""


# -- configuration and input ------------------------------------------------------------------------------------------


class ConfigError(DilocoError, ValueError):
    """A setting, option or argument that cannot be meant; nothing was started."""


class RunFolderTaken(DilocoError):
    """The folder of the new run already holds another run."""


class NoSuchRun(DilocoError):
    """The folder holds no run."""


# -- records ----------------------------------------------------------------------------------------------------------


class RecordInvalid(DilocoError):
    """An object in the bucket is not the record its name says."""


class RecordTooNew(RecordInvalid):
    """A record was written by a newer version of this package."""


# -- store ------------------------------------------------------------------------------------------------------------


class StoreError(DilocoError):
    """The object store answered with an error."""


class ObjectMissing(StoreError):
    """No object has this key."""


class StoreUnavailable(StoreError):
    """A transient fault (network, throttling, a server's 5xx): the same call may succeed later. The request may
    have taken effect all the same."""


class StoreDenied(StoreError):
    """The credentials do not allow this call, or the store is read-only."""


class StoreFull(StoreError):
    """There is no room left: disk full or quota reached."""


# -- rounds -----------------------------------------------------------------------------------------------------------


class RoundError(DilocoError):
    """A round could not be finished as planned."""


class PayloadCorrupt(RoundError):
    """Payload bytes do not match the digest, shape, codec or finiteness that their manifest promises."""


class RoundReused(RoundError):
    """A round id already holds another payload of the same rank."""


class AllReduceTimeout(RoundError, TimeoutError):
    """Peers did not deliver in time; `missing` names them."""

    def __init__(self, message: str, missing: Iterable[int]) -> None:
        super().__init__(message)
        self.missing = tuple(sorted(missing))


class QuorumLost(RoundError):
    """A round had no quorum for `round_timeout_s`; `missing` names who did not answer."""

    def __init__(self, message: str, missing: Iterable[int]) -> None:
        super().__init__(message)
        self.missing = tuple(sorted(missing))


class BaseDiverged(RoundError):
    """This replica computes other bits than the commits name. Permanent: it is not relaunched."""


class ModelMismatch(RoundError):
    """The workload's model differs in names, shapes or dtypes from the run's first base. Permanent."""


class Superseded(RoundError):
    """A newer attempt of the same replica is alive; this one must leave."""


class Preempted(RoundError):
    """The process was asked to leave (SIGTERM); whatever could be published is published."""


class WorkloadEndedEarly(RoundError):
    """The training function returned before the run's end."""


# -- outcome of a run -------------------------------------------------------------------------------------------------


class RunFailed(DilocoError):
    """The run ended without completing and without a verdict."""


_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|STORAGE_OPTIONS", re.IGNORECASE)
_URL_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_URL_SIGNATURE = re.compile(
    r"((?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|sig|token)=)[^&\s\"']+", re.IGNORECASE
)


def _json_leaves(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, value) of the strings inside variables that hold JSON objects, such as storage options."""
    found: list[tuple[str, str]] = []
    for name in sorted(environ):
        if environ[name].startswith("{"):
            try:
                _collect(json.loads(environ[name]), found)
            except ValueError:
                continue
    return found


def _collect(node: Any, found: list[tuple[str, str]]) -> None:
    for name, value in node.items():
        if isinstance(value, dict):
            _collect(value, found)
        elif isinstance(value, str):
            found.append((name, value))


def looks_secret(name: str) -> bool:
    """Whether a variable of this name holds something that must not be shown."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str, environ: Mapping[str, str]) -> str:
    """`text` without credentials: values of environment names that look secret or are listed as such in
    `DILOCO_SECRET_NAMES`, URL user info, URL signatures."""
    listed = environ.get(ENV_SECRET_NAMES, "").split(",")
    for name, value in [*sorted(environ.items()), *_json_leaves(environ)]:
        if len(value) >= 8 and name != ENV_SECRET_NAMES and (looks_secret(name) or name in listed):
            text = text.replace(value, f"<{name} redacted>")
    return _URL_SIGNATURE.sub(r"\1<redacted>", _URL_USERINFO.sub("<redacted>@", text))
