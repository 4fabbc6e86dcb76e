"""`diloco lock`: lists every package that replicas install, with version and hashes, by asking uv once.

Digests of container images are written beside them; `image_digests` asks the registries.

What is needed, and what `launch` does with the file, is in `code_archive.pack`.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco_orchestrator.code_archive.locked_images import image_lines
from diloco_orchestrator.code_archive.pack import needed_there, spec_of
from diloco_orchestrator.code_archive.requirements import Requirements, read_requirements
from diloco_orchestrator.errors import ConfigError

OLDEST_PYTHON = "3.11"  # of replicas; also that of the executors' default images
_UNIVERSAL = ("--universal", "--generate-hashes", "--no-header", "--no-annotate")


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
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "wanted.in").write_text("\n".join([*wanted, users.text if users else ""]) + "\n")
        (folder / "installed.txt").write_text("".join(f"{line}\n" for line in installed_here()))
        (folder / "lock.txt").touch()  # an empty one: uv would keep the versions of the last one
        files = [str(folder / "wanted.in"), "-c", str(folder / "installed.txt"), "-o", str(folder / "lock.txt")]
        command = [*_uv(), "pip", "compile", "--quiet", *_UNIVERSAL, "--python-version", python, *options, *files]
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode != 0:
            raise ConfigError(
                "uv found no set of packages that replicas could install (see above). Where a version of this machine "
                f"needs a newer Python than {python}, name it: --python. Indexes are named by UV_DEFAULT_INDEX, a "
                "uv.toml, or options after --."
            )
        text = image_lines(images or {}) + (folder / "lock.txt").read_text()
    found = read_requirements(text.splitlines())
    if found is None or not found.hashed:
        raise ConfigError("uv wrote no hashes: the index has none for these packages. Name another index.")
    target.write_text(text)
    return found


def installed_here() -> list[str]:
    """Name and version of each package that this machine has, one of each name, without local builds' suffixes."""
    found = {each.name.lower(): each.version.partition("+")[0] for each in importlib.metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _uv() -> list[str]:
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    if (path := shutil.which("uv")) is not None:
        return [path]
    raise ConfigError("a lock is made by uv, which is not installed here. Install it: pip install uv.")
