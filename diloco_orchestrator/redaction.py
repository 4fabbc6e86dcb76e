"""Removes credentials from text for logs, records and messages, and finds them in settings, by name and by shape.

A value that is known to be secret is found in every encoding that is likely to be printed; an unknown one only if it
has the shape of a known kind of token.
"""

import base64
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

from diloco_orchestrator.executors.names import looks_secret as looks_secret

T = TypeVar("T")

ENV_SECRET_NAMES = "DILOCO_SECRET_NAMES"  # of a replica: comma-separated names of variables to redact

_WHOLE = 8  # characters; a shorter value occurs by chance inside of words
_SHORTEST = 4  # characters of a declared secret that is replaced as a word of its own
_LONGEST = 4096  # characters; a longer value is looked for line by line

# Tokens of known kinds, anywhere in a text. Text of these prefixes and lengths is nothing else.
_TOKENS = (
    r"\bhf_[A-Za-z0-9]{20,}",  # Hugging Face
    r"\bapi_org_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bglpat-[A-Za-z0-9_.-]{16,}",  # GitLab
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS, the id; its secret is found by its name below
    r"\bk8s-aws-v1\.[A-Za-z0-9_-]{20,}",  # EKS
    r"\bsk-(?:[a-z0-9]+-)*[A-Za-z0-9_]{20,}[A-Za-z0-9_-]*",  # OpenAI, Anthropic
    r"\b(?:ak|as)-[A-Za-z0-9]{22}\b",  # Modal
    r"\bwandb_v\d_[A-Za-z0-9_]{20,}",
    r"\bxox[abeprs]-[A-Za-z0-9-]{20,}",  # Slack
    r"\bAIza[A-Za-z0-9_-]{35}",  # Google
    r"\bya29\.[A-Za-z0-9_-]{20,}",
    r"\b(?:pypi-AgEI|npm_|dckr_pat_)[A-Za-z0-9_-]{20,}",
    r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",  # JSON web token
    r"\bdiloco-(?:keys?|link)-[A-Za-z0-9_-]{43,}",  # of a signed run
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----)?",
)
_TOKEN = re.compile("|".join(_TOKENS))
# Tokens that only the words before them distinguish from other text; these words are kept.
_NAMED_TOKEN = re.compile(
    r"""((?:proxy-)?authorization["']?\s*[:=]\s*["']?(?:bearer|basic|token)\s+(?=[\w.~+/=-]{8})"""
    r"""|\bbearer\s+(?=[\w.~+/=-]{16})"""
    r"""|aws_?secret_?(?:access_?)?key["']?\s*[=:]\s*["']?(?=[A-Za-z0-9/+]{40})"""
    r"""|wandb[^\n]{0,40}?(?=\b[0-9a-f]{40}\b))[^\s"',;]+""",
    re.IGNORECASE,
)
# But no placeholders. A password may hold a "/" that nobody quoted; a port before a path with an "@" is none.
_URL_PASSWORD = re.compile(r"""://[^/@\s:{$<%]*:(?!\d{1,5}/)[^@\s{$<%"',;)]+@""")
_URL_USERINFO = re.compile(r"""(?<=://)(?:[^/@\s]+|[^/@\s:]*:[^@\s"'<>]+)@""")
# Also where the whole URL is quoted once or more, as a parameter of another.
_URL_SIGNATURE = re.compile(
    r"((?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|sig|token)"
    r"(?:=|(?P<quoted>%(?:25)*3D)))(?(quoted)(?:(?!%(?:25)*26)[^&\s\"'])+|[^&\s\"']+)",
    re.IGNORECASE,
)
_FIRST = 12  # characters of a long secret, which some programs show to say which one they use
_OPAQUE = re.compile(rf"(?![/~.])[\w+/=.~-]{{{_FIRST}}}")  # but no URL or path, of which other texts have the beginning
# Names of `args` that hold credentials. Stricter than `looks_secret`: pad_token, text_key and key_dim are none.
_SECRET_ARG = re.compile(
    r"(?:.*[._-])?(?:(?:api|access|account|auth|encryption|hf|private|secret|service|signing|ssh|storage|wandb)_?key"
    r"|(?<!pad[._-])(?<!eos[._-])(?<!bos[._-])(?<!unk[._-])(?<!sep[._-])(?<!cls[._-])(?<!mask[._-])(?<!stop[._-])"
    r"(?<!start[._-])(?<!image[._-])(?<!special[._-])token|\w*secrets?|passw(?:or)?d|pwd|passphrase|credentials?|dsn"
    r"|connection_?string|bearer|authorization)",
    re.IGNORECASE,
)


def has_token_shape(text: str) -> bool:
    """Whether a text holds a token of a known kind, or a URL with a password."""
    return bool(_TOKEN.search(text) or _NAMED_TOKEN.search(text) or _URL_PASSWORD.search(text))


def secret_settings(values: Mapping[str, Any], path: str) -> list[str]:
    """Names of the settings (JSON) below `path` that hold a credential, by name or by the shape of their text."""
    found: list[str] = []
    for name, value in values.items():
        if has_token_shape(name):
            found.append(f"{path}.<a name that is a credential>")
            continue
        where = f"{path}.{name}"
        if any(has_token_shape(text) or (text and _SECRET_ARG.fullmatch(name)) for text in _those(str, value)):
            found.append(where)
        else:
            for below in _those(dict, value):
                found += secret_settings(below, where)
    return found


def _those(kind: type[T], value: Any) -> list[T]:
    """All values of one type in a JSON value: the value itself, or those in its lists."""
    if isinstance(value, kind):
        return [value]
    return [found for each in value for found in _those(kind, each)] if isinstance(value, list | tuple) else []


def redact(text: str, environ: Mapping[str, str]) -> str:
    """`text` with credentials replaced by the names of their variables.

    Credentials are: values in `environ` whose name looks secret or is in `DILOCO_SECRET_NAMES`, in every encoding of
    `_forms`; tokens of known kinds; the user information in URLs; the signatures of signed URLs. A listed value of 4 to
    7 characters is replaced only as a whole word; shorter ones are kept, because they occur by chance.
    """
    listed = environ.get(ENV_SECRET_NAMES, "").split(",")
    names: dict[str, str] = {}  # variable's name by form of its value
    alone: dict[str, str] = {}
    long: list[tuple[str, str]] = []
    for name, value in [*sorted(environ.items()), *_json_leaves(environ)]:
        if name == ENV_SECRET_NAMES or not (looks_secret(name) or name in listed):
            continue
        if len(value) >= _WHOLE:
            long.append((name, value))
            for form in _forms(value):
                names.setdefault(form, name)
        elif len(value) >= _SHORTEST and name in listed:
            alone.setdefault(value, name)
    for name, value in sorted(long):
        text = _without_short_lines(text, value, f"<{name} redacted>")
    for form in sorted(names, key=lambda form: (-len(form), form)):  # the longest first, so that no part remains
        text = text.replace(form, f"<{names[form]} redacted>")
    for value, name in sorted(alone.items()):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", f"<{name} redacted>", text)
    text = _NAMED_TOKEN.sub(r"\1<token redacted>", _TOKEN.sub("<token redacted>", text))
    return _URL_SIGNATURE.sub(r"\1<redacted>", _URL_USERINFO.sub("<redacted>@", text))


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


def _collect(node: Mapping[str, Any], found: list[tuple[str, str]]) -> None:
    for name, value in node.items():
        found += [(name, text) for text in _those(str, value)]
        for below in _those(dict, value):
            _collect(below, found)


def _without_short_lines(text: str, secret: str, instead: str) -> str:
    """`text` without the short lines of a multi-line secret that directly follow its line before.

    The last line of a key may have three characters, which occur by chance elsewhere.
    """
    lines = [line.strip() for line in secret.splitlines() if line.strip()]
    for before, line in pairwise(lines):
        if len(line) < 2 * _WHOLE <= len(before) and not line.startswith("-----") and before in text:
            found = rf"({re.escape(before)}(?:\\+[nr]|[^\w+/=]){{1,32}}){re.escape(line)}(?![\w+/=])"
            text = re.sub(found, lambda match: match[1] + instead, text)
    return text


def _forms(value: str) -> Iterator[str]:
    """The forms in which a secret may be printed: as it is, encoded, and each long line of a multi-line one."""
    lines = [line.strip() for line in value.splitlines()] if "\n" in value else []
    secrets = [value] if len(value) <= _LONGEST else []
    secrets += [line for line in lines if len(line) >= 2 * _WHOLE and not line.startswith("-----")]
    yield value
    if len(value) >= 2 * _WHOLE and (first := _OPAQUE.match(value)):
        yield first[0]
    for secret in secrets:
        yield secret
        yield from _encoded(secret)


def _encoded(secret: str) -> Iterator[str]:
    """Encodings of a secret as they appear inside larger encoded texts."""
    escaped = json.dumps(secret)[1:-1]
    yield from (escaped, json.dumps(secret, ensure_ascii=False)[1:-1], json.dumps(escaped)[1:-1], repr(secret)[1:-1])
    yield from (shlex.quote(secret).removeprefix("'").removesuffix("'"), secret.replace('"', '\\"'))
    for quoted in (quote(secret, safe=""), quote(secret), quote_plus(secret)):
        yield quoted
        yield re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), quoted)
    raw = secret.encode(errors="surrogateescape")
    yield raw.hex()
    yield raw.hex().upper()
    for before in range(3):  # bytes before the secret in a group of three, which shift its digits
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            digits = encode(b"\0" * before + raw).decode().rstrip("=")
            # Without the first and the last digit where they depend on the neighbours too.
            inner = digits[-(-8 * before // 6) : 8 * (before + len(raw)) // 6]
            if len(inner) >= _WHOLE:
                yield inner


# -- text for a terminal ----------------------------------------------------------------------------------------------

# C0 without tab and newline, DEL, C1, and what changes the direction of the text that follows; halves of surrogate
# pairs, which no terminal's encoding has.
_MOVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """`text` where a visible character replaces each one that would control the terminal or reorder a line."""
    return _MOVES.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else "\ufffd", text)
