"""Lines of a lock file that give container images their digests. pip takes them for comments.

    # diloco: image python:3.11-slim sha256:…

`diloco lock` writes them above the packages; they are read with the requirements. A comment that begins as they do and
is none of them is refused, since a pin that is not read is worse than none.
"""

import re
from collections.abc import Mapping

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import DIGEST_FORM, MOST_IMAGES, NAME_FORM

_OURS = re.compile(r"\s*#\s*diloco\s*:", re.IGNORECASE)
_LINE = re.compile(rf"# diloco: image ({NAME_FORM}) ({DIGEST_FORM})", re.ASCII)


def image_lines(digests: Mapping[str, str]) -> str:
    """The lines that `read_image_lines` reads, in the order of the names; empty for no images."""
    return "".join(f"# diloco: image {name} {digest}\n" for name, digest in sorted(digests.items()))


def read_image_lines(text: str) -> dict[str, str]:
    """Digests of images by name, as a lock file's text gives them.

    Raises `ConfigError` for a line of ours in another form, a name with two digests, or more images than a run's record
    holds.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not _OURS.match(line):
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise ConfigError(
                f"requirements: {line.strip()[:200]!r} is no line that `diloco lock` writes, such as "
                "'# diloco: image python:3.11 sha256:…' with 64 hex digits. Make the lock again, or remove the line."
            )
        name, digest = match.groups()
        if found.setdefault(name, digest) != digest:
            raise ConfigError(f"requirements give image {name} two digests. Make the lock again, or remove one line.")
    if len(found) > MOST_IMAGES:
        raise ConfigError(
            f"requirements give digests of {len(found)} images, and a run has at most {MOST_IMAGES}. Lock those that "
            "it uses."
        )
    return found
