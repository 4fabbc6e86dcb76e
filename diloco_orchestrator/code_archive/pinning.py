"""Has uv list every package that replicas install, with version and hashes: for `diloco lock`, and `pin=` of a launch.

`diloco lock` writes the list to a file, with digests of container images from `image_digests`; a launch without such a
file makes a list by itself. `code_archive.pack` determines the requirements and sends the list,
`code_archive.bootstrap` installs from it.
"""

import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from packaging.requirements import Requirement

from diloco_orchestrator.code_archive.bootstrap import canonical
from diloco_orchestrator.code_archive.pack import Archive, needed_there
from diloco_orchestrator.code_archive.requirements import (
    MadeList,
    Requirements,
    image_lines,
    is_installed,
    marker_of,
    pin_of,
    read_requirements,
    spec_of,
)
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.names import unknown_name
from diloco_orchestrator.redaction import ENV_SECRET_NAMES, looks_secret, redact

log = logging.getLogger(__name__)

Pin = Literal["auto", "require", "given"]

OLDEST_PYTHON = "3.11"  # of replicas; also that of the executors' default images
_UNIVERSAL = ("--universal", "--generate-hashes", "--no-header")
LIMIT_S = 120.0  # of one call of uv, which takes two seconds; its own patience with an index that is silent is 45 s
_NO_SUCH_SET = 1  # uv's exit code where the index has no set of packages that fit together
_INDEXES = {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONFIG_FILE"}
_LAST_LINES, _LONGEST = 3, 300  # lines and characters of uv's error that are shown

# No package's own code runs on the launcher's machine, because uv builds nothing. Its annotations name the packages
# that each is a dependency of.
_OPTIONS = ("--no-build", "--annotation-style", "split", "--color", "never", "--no-python-downloads")
_PIPES: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "errors": "replace"}


@dataclass(frozen=True)
class Pinned:
    """The requirements to send to replicas. `note`: where their hashes are from, or why there are none."""

    requirements: Requirements | None
    note: str = ""


class _NoList(Exception):
    """uv made no list of packages; the text is the reason, in one line."""


def pinned(
    pin: str,
    given: Requirements | None,
    shares_machine: bool,
    extras: Sequence[str],
    more: Sequence[str],
    secrets: Mapping[str, str],
    env: Collection[str] = (),
) -> Pinned:
    """The requirements of a launch, with hashes if the user gave some or uv can list them.

    Requirements given with hashes stay as they are. uv is not run if replicas share this machine, where nothing is
    installed, or with `pin="given"`. Raises `ConfigError` for an unknown `pin`.

    Args:
        given: requirements from the user's requirements or lock file.
        extras: extras of our distribution.
        more: requirements of a `CodeBundle`, in pip's syntax.
        secrets: variables of replicas, which are redacted from uv's errors.
        env: names of the other variables of replicas. No list is made if a variable names a package index for pip,
            which may have other files, or other packages, than uv's.
    """
    if pin not in get_args(Pin):
        raise ConfigError(unknown_name("pin", str(pin), get_args(Pin)))
    if shares_machine or pin == "given" or (given is not None and given.hashed):
        return Pinned(given)
    if named := sorted(_INDEXES & {*env, *secrets}):
        return Pinned(given, f"{named[0]} names an index over there that uv is not asked for")
    try:
        return Pinned(_listed(given, needed_there(extras, more), secrets), "listed by uv for this launch")
    except _NoList as reason:
        return Pinned(given, str(reason))


def check_pinned(archive: Archive, images: Sequence[str]) -> None:
    """Raise `ConfigError` if a package that replicas need has no hash, or an image no digest.

    `images`: the container images that the launch names by tag alone.
    """
    lacking = [f"packages without hashes: {', '.join(archive.unhashed)}"] if archive.unhashed else []
    if lacking and archive.note and not archive.hashed:
        lacking[0] += f" ({archive.note})"
    lacking += [f"images by tag: {', '.join(images)}"] if images else []
    if lacking:
        raise ConfigError(
            f'pin="require", and {"; ".join(lacking)}. List packages with `diloco lock`, images with '
            '`diloco lock --image NAME`, or launch with pin="auto", which takes them as they are.'
        )


def _listed(given: Requirements | None, needed: Sequence[Requirement], secrets: Mapping[str, str]) -> MadeList:
    """The list with hashes of all packages that replicas need, made by uv.

    Raises `_NoList` if a package is named by URL or is a local build, if uv is not installed or finds no solution, and
    if the index has no hashes. `given`: the user's requirements; `needed`: ours. `secrets`: redacted from uv's errors.
    """
    asked = () if given is None else given.packages
    if by_url := [each.name for each in (*needed, *asked) if each.url]:
        raise _NoList(f"{', '.join(by_url)} is named by URL, for which `launch` asks no hash")
    if (uv := uv_command()) is None:
        raise _NoList("uv, which lists them, is not installed here: pip install uv")
    log.info('uv lists the packages that replicas need, with their hashes (pin="given" leaves it out)')
    wanted = [f"{spec_of(each)}; {marker}" if (marker := marker_of(each)) else spec_of(each) for each in needed]
    wanted += given.text.splitlines() if given else []
    lines, needed_by = _parsed(_asked_of(uv, wanted, _limits(needed, asked), secrets))
    try:
        found = read_requirements([*(given.options if given else []), *lines])
    except ConfigError as error:
        raise _NoList(f"uv's list cannot be used: {error}") from None
    if found is None or not found.hashed:
        raise _NoList("the index that uv asks has no hashes for these packages")
    if local := [str(each) for each in found.packages if "+" in pin_of(each)]:
        raise _NoList(f"{', '.join(local)} is a local build, which the index over there may not have")
    return MadeList(text=found.text, packages=found.packages, hashed=True, asked=asked, needed_by=needed_by)


def _limits(needed: Sequence[Requirement], asked: Sequence[Requirement]) -> list[list[str]]:
    """Constraints for uv, in order of preference: all versions of this machine, then only those that a replica needs.

    Replicas without hashes use the latter for pip; it serves machines whose packages are inconsistent. `needed`: our
    packages; `asked`: the user's.
    """
    direct = {canonical(each.name) for each in needed if is_installed(each)}
    every = limits_beside([*needed, *asked])
    return [every, [line for line in every if canonical(line.partition("==")[0]) in direct]]


def _asked_of(
    uv: Sequence[str], wanted: Sequence[str], limits: Sequence[Sequence[str]], secrets: Mapping[str, str]
) -> str:
    """uv's list of the packages `wanted` and their dependencies, under the first of `limits` that has a solution.

    It is for the oldest Python with a solution. `uv`: the command. Raises `_NoList` if no combination has a solution,
    or uv fails or exceeds `LIMIT_S` seconds. `secrets`: redacted from uv's errors.
    """
    # Nobody asked for uv here, so that it gets no credentials but its own.
    environ = {name: value for name, value in os.environ.items() if name.startswith("UV_") or not looks_secret(name)}
    for within, python in product(limits, _pythons(sys.version_info.minor)):
        options = [*_OPTIONS, "--python-version", python]
        try:
            done, text = compiled(uv, wanted, within, options, env=environ, timeout=LIMIT_S, **_PIPES)
        except subprocess.TimeoutExpired:
            raise _NoList(f"uv had not listed them after {LIMIT_S:g} s") from None
        except OSError as error:
            raise _NoList(f"uv cannot be run: {error}") from None
        if done.returncode == 0:
            return text
        if done.returncode != _NO_SUCH_SET:
            break
    raise _NoList(_shown(done.stderr, secrets))


def _pythons(newest: int) -> list[str]:
    """Versions of Python 3 from the oldest supported on replicas to `newest`, this machine's."""
    oldest = int(OLDEST_PYTHON.partition(".")[2])
    return [f"3.{minor}" for minor in range(oldest, max(oldest, newest) + 1)]


def _shown(said: str, secrets: Mapping[str, str]) -> str:
    names = [*os.environ.get(ENV_SECRET_NAMES, "").split(","), *secrets]
    said = redact(said, {**os.environ, **secrets, ENV_SECRET_NAMES: ",".join(names)})
    lines = [" ".join("".join(c if c.isprintable() else " " for c in line).split()) for line in said.splitlines()]
    words = " ".join([line for line in lines if line][-_LAST_LINES:]) or "it ended without a word"
    return f"uv: {words if len(words) <= _LONGEST else f'{words[:_LONGEST]}…'}"


def _parsed(text: str) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
    """The packages in uv's list, one line each, and for each the names of the packages that depend on it."""
    lines: list[str] = []
    needed_by: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.fullmatch(r"\s*# (?:via ?|  )(.*)", line):
            if found[1] and not found[1].startswith("-") and needed_by:  # `-r wanted.in`: the user or we ask for it
                needed_by[-1].append(found[1])
        elif line.strip():
            lines.append(" ".join(line.split()))
            needed_by.append([])
    return lines, tuple(map(tuple, needed_by))


# -- lock files, and uv -----------------------------------------------------------------------------------------------


def write_lock(
    target: Path,
    *,
    extras: Sequence[str] = (),
    requirements: Sequence[str] | str | Path | None = None,
    python: str = OLDEST_PYTHON,
    options: Sequence[str] = (),
    images: Mapping[str, str] | None = None,
) -> Requirements:
    """Write the packages that replicas need, and all their dependencies, with hashes for every platform, to `target`.

    Packages installed here keep their versions. Only package lists and metadata are downloaded. Returns the file's
    contents. Raises `ConfigError` without uv, or if uv finds no solution.

    Args:
        extras: extras of our distribution, such as the SDK that the store needs.
        requirements: packages that replicas need beside ours: a file, or its lines. None may have a hash.
        python: oldest version of Python that replicas have.
        options: further options of `uv pip compile`, such as an index.
        images: digests of container images by name.
    """
    wanted = [spec_of(each) for each in needed_there(extras)]
    users = read_requirements(requirements)
    if (uv := uv_command()) is None:
        raise ConfigError("a lock is made by uv, which is not installed here. Install it: pip install uv.")
    wanted += users.text.splitlines() if users else []
    options = ["--no-annotate", "--python-version", python, *options]
    done, text = compiled(uv, wanted, limits_beside(users.packages if users else ()), options)
    if done.returncode != 0:
        raise ConfigError(
            "uv found no set of packages that replicas could install (see above). Where a version of this machine "
            f"needs a newer Python than {python}, name it: --python. Indexes are named by UV_DEFAULT_INDEX, a "
            "uv.toml, or options after --."
        )
    text = image_lines(images or {}) + text
    found = read_requirements(text.splitlines())
    if found is None or not found.hashed:
        raise ConfigError("uv wrote no hashes: the index has none for these packages. Name another index.")
    target.write_text(text)
    return found


def compiled(
    uv: Sequence[str],
    wanted: Sequence[str],
    limits: Sequence[str],
    options: Sequence[str],
    **process: Any,
) -> tuple["subprocess.CompletedProcess[str]", str]:
    """The finished process of `uv pip compile`, and its list of `wanted` and all dependencies, within `limits`.

    `wanted`, `limits`: lines of a requirements file and of a constraints file. `options`: more options of the command.
    `process`: further arguments of `subprocess.run`. Raises `OSError` if uv cannot be run, and `TimeoutExpired` at a
    `timeout` in `process`.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "wanted.in").write_text("\n".join(wanted) + "\n")
        (folder / "limits.txt").write_text("\n".join(limits) + "\n")
        (folder / "lock.txt").touch()  # an empty one: uv would keep the versions of the last one
        files = [str(folder / "wanted.in"), "-c", str(folder / "limits.txt"), "-o", str(folder / "lock.txt")]
        command = [*uv, "pip", "compile", "--quiet", *_UNIVERSAL, *options, *files]
        done = subprocess.run(command, check=False, text=True, stdout=subprocess.DEVNULL, **process)
        return done, (folder / "lock.txt").read_text()


def installed_here() -> list[str]:
    """Name and version of each package on this machine, each name once, without suffixes of local builds."""
    found = {each.name.lower(): each.version.partition("+")[0] for each in importlib.metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def limits_beside(asked: Sequence[Requirement]) -> list[str]:
    """Constraints: the versions of packages installed here, without those that `asked` wants in another version."""
    other = {canonical(each.name) for each in asked if not is_installed(each)}
    return [line for line in installed_here() if canonical(line.partition("==")[0]) not in other]


def uv_command() -> list[str] | None:
    """The command that runs uv: this environment's, else the one on PATH; None without either."""
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-P", "-m", "uv"]  # whatever is named uv in the current folder
    path = shutil.which("uv")
    return None if path is None else [path]
