"""Checks of names that people type: the nearest known name for a misspelt one, and the form of an entrypoint.

Standard library only. Functions return text or raise plain ValueError; callers raise their own error types.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

_SIMILAR = 0.5  # below difflib's default of 0.6, which finds nothing near a name of two letters such as "s4"
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_ENTRYPOINT = re.compile(rf"{_DOTTED}:{_DOTTED}")
_SECRET_NAME = re.compile(
    r"KEY|SECRET|TOKEN(?!IZ)|PASSWORD|PASSWD|PASSPHRASE|(?:^|_)PASS$|(?<!^)(?<!OLD)PWD|CREDENTIAL|STORAGE_OPTIONS|DSN"
    r"|CONNECTION_?STRING|CONN_?STR|BEARER|COOKIE|AUTHORIZATION|_AUTH$|(?:DATABASE|DB|REDIS|MONGO\w*|AMQP|BROKER)_UR[IL]$",
    re.IGNORECASE,
)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None if none is similar."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_SIMILAR)
    return found[0] if found else None


def hint(name: str, known: Iterable[str]) -> str:
    """The second half of an error about an unknown name: the nearest known name, or all names if none is similar."""
    known = sorted(known)
    close = nearest(name, known)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(known) or 'none'}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The text of an error about an unknown name, with the nearest in `known`. `kind`: such as "setting"."""
    return f"unknown {kind} {name!r}: {hint(name, known)}"


def words_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """`given`, which is one word, several or None, as a tuple of words."""
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def looks_secret(name: str) -> bool:
    """Whether a variable's name, such as API_KEY or one with PASSWORD, suggests that its value is a credential.

    PWD and OLDPWD, which are folders, do not.
    """
    return bool(_SECRET_NAME.search(name))


def check_entrypoint(entrypoint: str) -> None:
    """Raise ValueError unless `entrypoint` has the form "package.module:function". The error suggests a correct one."""
    if _ENTRYPOINT.fullmatch(entrypoint):
        return
    module, _, function = entrypoint.rpartition(".")
    guess = f"{entrypoint}:FUNCTION" if function == "py" else f"{module}:{function}"
    offer = guess if function == "py" or _ENTRYPOINT.fullmatch(guess) else "package.module:function"
    raise ValueError(f"entrypoint {entrypoint!r} is not of the form 'package.module:function'. Write {offer!r}.")
