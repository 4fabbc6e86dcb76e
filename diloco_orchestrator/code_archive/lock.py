"""Asks uv for every package that replicas install, with version and hashes; `diloco lock` writes the answer to a file.

What is needed, and what `launch` does with the file, is in `code_archive.pack`; the list that `launch` makes without a
file is in `code_archive.pinning`.
Digests of container images are written beside the packages; `image_digests` asks the registries.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from diloco_orchestrator.code_archive.bootstrap import canonical
from diloco_orchestrator.code_archive.locked_images import image_lines
from diloco_orchestrator.code_archive.pack import needed_there, spec_of
from diloco_orchestrator.code_archive.requirements import Requirements, is_installed, read_requirements
from diloco_orchestrator.errors import ConfigError

OLDEST_PYTHON = "3.11"  # of replicas; also that of the executors' default images
_UNIVERSAL = ("--universal", "--generate-hashes", "--no-header")


def write_lock(
    target: Path,
    *,
    extras: Sequence[str] = (),
    requirements: Sequence[str] | str | Path | None = None,
    python: str = OLDEST_PYTHON,
    options: Sequence[str] = (),
    images: Mapping[str, str] | None = None,
) -> Requirements:
    """Write what replicas need, and all that these packages need, with hashes for every platform, to `target`.

    Versions are those of this machine, for what is installed here. Nothing is downloaded but lists and metadata of
    packages. Returns what the file holds. Raises `ConfigError` without uv, or if uv finds no such set of packages.

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
    """The end of `uv pip compile`, and the list that it wrote: all that `wanted` needs, within `limits`.

    `wanted`, `limits`: lines of a requirements file and of a constraints file. `process`: further arguments of
    `subprocess.run`. Raises `OSError` if uv cannot be run, and `TimeoutExpired` if it was killed at a `timeout` of
    `process`.
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
    """Name and version of each package that this machine has, one of each name, without local builds' suffixes."""
    found = {each.name.lower(): each.version.partition("+")[0] for each in importlib.metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def limits_beside(asked: Sequence[Requirement]) -> list[str]:
    """`installed_here` without the packages that `asked` wants in another version."""
    other = {canonical(each.name) for each in asked if not is_installed(each)}
    return [line for line in installed_here() if canonical(line.partition("==")[0]) not in other]


def uv_command() -> list[str] | None:
    """The command that runs uv: this environment's, else the one on PATH; None without either."""
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-P", "-m", "uv"]  # whatever is named uv in the current folder
    path = shutil.which("uv")
    return None if path is None else [path]
