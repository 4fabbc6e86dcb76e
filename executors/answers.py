"""Errors for provider calls that gave no proper result: failures, malformed replies, and no reply at all.

Independent of any SDK: each adapter translates its own errors, through a table of `Failure` where the provider reports
text or HTTP statuses. Callers decide what is retried, and for how long.
"""

import errno
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

from diloco_orchestrator.executors.contract import ExecutorError, Unavailable

T = TypeVar("T")

# -- failures ---------------------------------------------------------------------------------------------------------

# HTTP statuses after which the same request may succeed later. 408, 425, 429, 500, 502, 503 and 504 are RFC 9110's,
# 8470's and 6585's; 520 to 524 and 530 are what Cloudflare answers for a server behind it; 529 means overloaded.
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529, 530})


class Failure(NamedTuple):
    """A row of a provider's error table: `error`, for a message with one of `parts` and a status in `statuses`."""

    error: type[ExecutorError]
    parts: Sequence[str]  # empty: any message
    words: str  # what happened and what to do now; {said} stands for what the provider said, {status} for its status
    statuses: Collection[int] = ()  # of HTTP; empty: any, or none


def error_of(
    what: str, said: str, failures: Sequence[Failure], status: int = 0, headers: Mapping[str, str] | None = None
) -> ExecutorError:
    """The error for a provider's failure, by the first matching row of `failures`; an `ExecutorError` if none matches.

    `what`: the action, for the message. `said`: the provider's message. `status`, `headers`: of an HTTP reply.
    """
    words = "; ".join(line.strip() for line in said.splitlines() if line.strip()) or "no message"
    for row in failures:
        if (not row.statuses or status in row.statuses) and (not row.parts or any(part in said for part in row.parts)):
            message = f"{what}: {row.words.format(said=words, status=status)}"
            return Unavailable(message, retry_after_s(headers)) if row.error is Unavailable else row.error(message)
    return ExecutorError(f"{what} failed: {words}.")


def retry_after_s(headers: Mapping[str, str] | None) -> float | None:
    """The seconds that a `Retry-After` header asks to wait, at least 0 (RFC 9110 section 10.2.3).

    A date is relative to the `Date` header, so that only the server's clock matters. None without the header, or if it
    is neither seconds nor a date.
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


# Errors of this machine that pass: no process, memory or file descriptor is left now, no room, a file server is away.
_PASSING = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
)


def failure_here(what: str, error: OSError) -> ExecutorError:
    """The error for a failure of this machine: `Unavailable` if the same call may succeed later. `what`: the action."""
    if error.errno in _PASSING:
        return Unavailable(f"{what}: this machine says {error}. It is short of something; try again.")
    return ExecutorError(f"{what}: this machine says {error}.")


# -- replies of another form ------------------------------------------------------------------------------------------

# All with HTTP 200: a login page, `{"error": …}`, half a body. Such a reply says nothing about attempts, so every
# adapter turns it into `Unavailable`, at the one place where it translates replies.
_FIELDS, _LETTERS = 5, 40  # of a reply's field names in an error
_ADVICE = "Something between here and the provider may have answered (a proxy, a login page); try again."


def odd_reply(what: str, form: str, reply: Any) -> Unavailable:
    """The error for a malformed reply. `form`: what was expected, such as "a job". `what`: the action, for the message.

    The message has names of the reply's fields and no value, because a reply may hold secrets.
    """
    return Unavailable(f"{what}: the answer is {_shape(reply)}, not {form}. {_ADVICE}")


def unreadable(what: str, error: Exception) -> Unavailable:
    """The error for a reply that a provider's SDK cannot parse, such as one without an expected field.

    `error`: what the SDK raised, quoted in the message. `what`: the action whose reply it was, for the message.
    """
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


# -- calls without a time limit of their own, such as over a connection that is half open -----------------------------


def answer_within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """The result of `call`, which runs in a thread of its own; its errors are raised here.

    Raises `Unavailable` after `limit_s` seconds without a result. The call cannot be cancelled: its thread, which does
    not keep the process alive, stays until it returns. So the caller must be able to repeat the call, whatever the
    first one did. `what`: the action, for the error.
    """
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:  # raised below, in the caller's thread
            answers.put((False, error))

    threading.Thread(target=run, daemon=True, name=f"call: {what}").start()
    try:
        returned, answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise Unavailable(f"{what}: no answer for {limit_s:g} s. The service may be down; try again.") from None
    if returned:
        result: T = answer
        return result
    try:
        raise answer
    finally:
        del answer  # the error's traceback holds this frame


def items_while(is_there: Callable[[], bool], silence_s: float, items: Iterable[T]) -> Iterator[T]:
    """The items of an iterable that may block for ever, read in a thread of its own.

    After every `silence_s` seconds without an item `is_there`, whether the source of the items still exists, is
    called. Once it returned False, the items end after `silence_s` more seconds without one. Errors of `items` and of
    `is_there` are raised here.
    """
    found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    abandoned = threading.Event()

    def run() -> None:
        try:
            for item in items:
                found.put(("item", item))
                if abandoned.is_set():
                    return
            found.put(("end", None))
        except BaseException as error:  # raised where the items are read
            found.put(("error", error))

    threading.Thread(target=run, daemon=True, name="items of a stream").start()
    last_wait = False
    try:
        while True:
            try:
                kind, value = found.get(timeout=silence_s)
            except queue.Empty:
                if last_wait:
                    return
                last_wait = not is_there()
                continue
            if kind == "item":
                yield value
            elif kind == "error":
                raise value
            else:
                return
    finally:
        abandoned.set()
