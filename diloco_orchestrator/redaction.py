"""Removes credentials from text for logs, records and messages, and decides which names hold credentials."""

import json
import re
from collections.abc import Mapping
from typing import Any

from diloco_orchestrator.executors.names import looks_secret as looks_secret
from diloco_orchestrator.protocol.process import ENV_SECRET_NAMES

_URL_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_URL_SIGNATURE = re.compile(
    r"((?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|sig|token)=)[^&\s\"']+", re.IGNORECASE
)


def _json_leaves(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, value) of every string inside variables that hold JSON objects, such as storage options."""
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


def redact(text: str, environ: Mapping[str, str]) -> str:
    """`text` with credentials replaced by the names of their variables.

    Credentials are the values in `environ` whose name looks secret or is listed in `DILOCO_SECRET_NAMES`, the user
    information in URLs, and the signatures of signed URLs. Values below 8 characters stay: they occur by chance.
    """
    listed = environ.get(ENV_SECRET_NAMES, "").split(",")
    for name, value in [*sorted(environ.items()), *_json_leaves(environ)]:
        if len(value) >= 8 and name != ENV_SECRET_NAMES and (looks_secret(name) or name in listed):
            text = text.replace(value, f"<{name} redacted>")
    return _URL_SIGNATURE.sub(r"\1<redacted>", _URL_USERINFO.sub("<redacted>@", text))
