"""Replies of another form than a provider's API gives, all with 200: a login page, `{"error": …}`, half a body.

Such a reply says nothing about attempts, so every adapter turns it into `Unavailable`, at the one place where it
translates replies.
"""

from collections.abc import Mapping
from typing import Any

from diloco_orchestrator.executors.contract import Unavailable

_FIELDS, _LETTERS = 5, 40  # of a reply's field names in an error
_ADVICE = "Something between here and the provider may have answered (a proxy, a login page); try again."


def odd_reply(what: str, form: str, reply: Any) -> Unavailable:
    """The error for a reply that is not `form`, such as "a job". `what`: the action, for the message.

    It shows names of the reply's fields and no value, because a reply may hold secrets.
    """
    return Unavailable(f"{what}: the answer is {_shape(reply)}, not {form}. {_ADVICE}")


def unreadable(what: str, error: Exception) -> Unavailable:
    """The error for a reply in which an SDK does not find what it reads; `error`: its own."""
    words = f"{type(error).__name__}: {str(error)[:200]}"
    return Unavailable(f"{what}: the SDK cannot read the answer ({words}). {_ADVICE}")


def _shape(reply: Any) -> str:
    if reply is None:
        return "null"
    if isinstance(reply, Mapping):
        names = ", ".join(str(name)[:_LETTERS] for name in list(reply)[:_FIELDS])
        return f"an object with other fields ({names or 'none'})"
    if isinstance(reply, list | tuple):
        return "a list of something else" if reply else "an empty list"
    if isinstance(reply, bytes | str):
        text = reply if isinstance(reply, str) else reply.decode(errors="replace")
        start = text.strip()[:1]
        return "an HTML page" if start == "<" else "text of another form" if start else "empty"
    return f"of the type {type(reply).__name__}"
