"""Reads `requirements=` and `--requirements FILE`: packages that replicas need beside ours, with hashes.

The text is sent unchanged, so that pip checks its hashes on the replica. If replicas share this machine, nothing is
installed; missing packages are reported instead. The file may be a lock of `diloco lock`, which has digests of
container images in lines that are comments to pip:

    # diloco: image python:3.11-slim sha256:…
"""

import codecs
import importlib.metadata
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import DIGEST_FORM, MOST_IMAGES, NAME_FORM
from diloco_orchestrator.redaction import redact

_SHA256 = re.compile(r"sha256:[0-9a-f]{64}|sha(384|512):[0-9a-f]+")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")  # pip fills in no other form
_COMMENT = re.compile(r"(^|\s+)#.*$")
_HTTP = re.compile(r"https?://\S+")
_CREDENTIALS = re.compile(r"://([^\s/?#:@]*):?([^\s/?#]*)@")  # user and password of a URL
_ENCODING = re.compile(r"\s*#.*coding[:=]\s*([-\w.]+)")
_FURTHER = ("--extra-index-url", "--find-links", "-f")
# Options of pip's that mean the same over there: those with a value, and those without.
_WITH_VALUE = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--no-binary", "--only-binary")
_WITHOUT_VALUE = ("--no-index", "--prefer-binary")


@dataclass(frozen=True)
class Requirements:
    """Packages that replicas need, as a requirements file. `hashed`: pip accepts only files with these hashes."""

    text: str
    packages: tuple[Requirement, ...]
    hashed: bool
    images: Mapping[str, str] = field(default_factory=dict)  # digests by name, of a file that `diloco lock` wrote

    @property
    def options(self) -> list[str]:
        """The lines of the requirements file that are options for pip, such as an index."""
        return [line for line in _lines_of(self.text) if line.startswith("-")]

    def missing_here(self) -> list[str]:
        """The packages in the requirements file that this machine lacks, or has in another version."""
        wanted = [each for each in self.packages if each.marker is None or each.marker.evaluate()]
        return [str(each) for each in wanted if not is_installed(each)]


@dataclass(frozen=True)
class MadeList(Requirements):
    """A list of packages with hashes that a launch made by itself; replicas install only those that their image lacks.

    `text` has one line for each of `packages`, in their order, after the lines with options.
    """

    asked: tuple[Requirement, ...] = ()  # what the user asked for, without hashes
    needed_by: tuple[tuple[str, ...], ...] = ()  # for each of `packages`: names of packages whose dependency it is


def read_requirements(given: Sequence[str] | str | Path | None) -> Requirements | None:
    """The requirements in a file, or in a list of lines; None for None or an empty list.

    Raises `ConfigError` for a file that cannot be read, a line that pip does not accept, a line with a local file,
    credentials in a URL (of a comment too), a package without a hash if others have one (pip refuses that too), and an
    invalid line of an image's digest.
    """
    if given is None or (not isinstance(given, str | Path) and not given):
        return None
    if isinstance(given, str | Path):
        try:
            text = _text_of(Path(given).read_bytes())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"requirements {str(given)!r} cannot be read: {error}. Name another file.") from None
    else:
        text = "".join(f"{line}\n" for line in given)
    _check_encoding(text)
    packages, hashes, indexes = [], [], 0
    for line in _lines_of(text):
        if line.startswith("-"):
            indexes += _check_option(line) in _FURTHER
            continue
        package, found = _package_and_hashes(line)
        packages.append(package)
        hashes.append(bool(found))
    for url in _HTTP.findall(text):  # of comments too, such as an index that is not used any more
        _check_urls(url)
    without = [each.name for each, has in zip(packages, hashes, strict=True) if not has]
    if any(hashes) and without:
        raise ConfigError(
            f"requirements: {', '.join(without)} have no hash, while others do, and pip then refuses all. Add one to "
            "each (pip-compile --generate-hashes, uv pip compile --generate-hashes)."
        )
    if indexes and not any(hashes):
        raise ConfigError(
            "requirements name a further package index, and pip takes the newest version that any index has: whoever "
            "may upload to one chooses what replicas run. Write one --index-url, or add a hash to each package "
            "(pip-compile --generate-hashes, uv pip compile --generate-hashes)."
        )
    return Requirements(text, tuple(packages), any(hashes), read_image_lines(text))


def _lines_of(text: str) -> list[str]:
    """The lines of a requirements file as pip reads them: a comment's last backslash joins it to no other line."""
    joined: list[str] = []
    begun: list[str] = []
    for line in text.splitlines():
        is_comment = _COMMENT.match(line) is not None
        if line.endswith("\\") and not is_comment:
            begun.append(line.strip("\\"))
        else:
            joined.append("".join([*begun, f" {line}" if is_comment else line]))
            begun = []
    lines = (_COMMENT.sub("", line).strip() for line in [*joined, "".join(begun)])
    return [line for line in lines if line]


def _text_of(data: bytes) -> str:
    """The text of a file in UTF-8 or, as PowerShell writes it, in UTF-16. Raises `UnicodeDecodeError` for another."""
    return data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")


def _check_encoding(text: str) -> None:
    """Raise `ConfigError` if pip would decode the file in another encoding than UTF-8."""
    for line in text.splitlines()[:2]:
        if (found := _ENCODING.match(line)) and found[1].lower().replace("_", "-") not in ("utf-8", "utf8", "ascii"):
            raise ConfigError(f"requirements: {line!r} names an encoding, and the file is sent as UTF-8. Remove it.")


def _check_option(line: str) -> str:
    """The name of a line's only option for pip. Raises `ConfigError` unless it is supported, without credentials."""
    name, value, *more = [*_words(line.replace("=", " ", 1)), "", ""][:3]
    known = name in _WITH_VALUE if value else name in _WITHOUT_VALUE
    if known and not more[0]:
        _check_urls(value)
        return name
    what = "has a second option" if known else "names a file of this machine, or is no option that travels"
    raise ConfigError(
        f"requirements: {_shown(line)!r} {what}. Write each option in a line of its own, and every package into one "
        "file (pip-compile, uv pip compile); a package of yours travels with code=."
    )


def _words(line: str) -> list[str]:
    """A line of options split into words as by pip. Raises `ConfigError` for an unclosed quote."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"requirements: {_shown(line)!r} cannot be read by pip: {error}.") from None


def _shown(line: str) -> str:
    """A requirement line as it is shown in an error message: without credentials in URLs."""
    return redact(line, {})


def _package_and_hashes(line: str) -> tuple[Requirement, list[str]]:
    """The package in a line of a requirements file, and its hashes. Raises `ConfigError` for any other option."""
    words = line.split(" ")
    end = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    package, options = package_of(" ".join(words[:end])), _words(" ".join(words[end:]))
    hashes = []
    while options:
        name, equals, value = options.pop(0).partition("=")
        value = value if equals else options.pop(0) if options else ""
        if name != "--hash":
            raise ConfigError(
                f"requirements: {_shown(line)!r} has the option {name}; of a package only --hash=… is taken."
            )
        if not _SHA256.fullmatch(value):
            raise ConfigError(f"requirements: {value!r} is no hash that pip takes, such as sha256:… of 64 digits.")
        hashes.append(value)
    return package, hashes


def package_of(line: str) -> Requirement:
    """A requirement parsed from pip's syntax. Raises `ConfigError` if invalid, a local path, or with a credential."""
    try:
        found = Requirement(line)
    except InvalidRequirement as error:
        raise ConfigError(
            f"requirement {_shown(line)!r} is none that pip takes: {_shown(str(error))}. Write name==1.2."
        ) from None
    if found.url:
        if found.url.removeprefix("git+").lower().startswith("file:"):
            raise ConfigError(f"requirement {line!r} lies on this machine. Hand the package over with code=.")
        _check_urls(found.url)
    return found


def _check_urls(text: str) -> None:
    """Raise `ConfigError` if a URL in this text has a user name or password other than a variable that pip fills in."""
    if not all(_VARIABLE.fullmatch(password or user) for user, password in _CREDENTIALS.findall(text)):
        raise ConfigError(
            "requirements hold a URL with a user name or password, which would be readable in the bucket. Write "
            "https://${TOKEN}@host/… and hand TOKEN over with secrets= (--secret TOKEN); pip fills it in over there."
        )


def is_installed(wanted: Requirement) -> bool:
    """Whether this machine has the package in a version that the requirement accepts."""
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return wanted.specifier.contains(version.partition("+")[0], prereleases=True)


def pin_of(requirement: Requirement) -> str:
    """The version that a requirement is pinned to with `==`; empty without one."""
    pins = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
    return pins[0] if pins else ""


def marker_of(requirement: Requirement) -> str:
    """The marker of a requirement, as text; empty without one, or for one that names an extra."""
    marker = str(requirement.marker or "")
    return "" if "extra" in marker else marker


def spec_of(requirement: Requirement) -> str:
    """A requirement in pip's syntax, without its marker."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    where = f" @ {requirement.url}" if requirement.url else ""
    return f"{requirement.name}{extras}{requirement.specifier}{where}"


# -- digests of images ------------------------------------------------------------------------------------------------

# A comment that begins as ours and is none of them is refused, since a pin that is not read is worse than none.
_IMAGE_COMMENT = re.compile(r"\s*#\s*diloco\s*:", re.IGNORECASE)
_IMAGE_LINE = re.compile(rf"# diloco: image ({NAME_FORM}) ({DIGEST_FORM})", re.ASCII)


def image_lines(digests: Mapping[str, str]) -> str:
    """Lines of a lock file with the digests of container images, by `digests` (name to digest), in order of names."""
    return "".join(f"# diloco: image {name} {digest}\n" for name, digest in sorted(digests.items()))


def read_image_lines(text: str) -> dict[str, str]:
    """Digests of container images by name, from the text of a lock file.

    Raises `ConfigError` for invalid, repeated or too many lines.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not _IMAGE_COMMENT.match(line):
            continue
        match = _IMAGE_LINE.fullmatch(line.rstrip())
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
