"""Packs the code archive of a run: our own package, the user's code, and the list of packages that both need.

The archive is content-addressed: equal files give equal bytes. Files that git ignores are left out. Files that look
like secrets are refused, because everybody who can read the bucket can read the archive.
"""

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from pathspec import GitIgnoreSpec

from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.code_archive.entrypoint import check_defined
from diloco_orchestrator.code_archive.requirements import (
    MadeList,
    Requirements,
    marker_of,
    package_of,
    pin_of,
    spec_of,
)
from diloco_orchestrator.code_archive.secret_files import suspicious_files
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.import_names import SHORT_NAMES

LOCK_NAME = "diloco-lock.txt"  # what `diloco lock` writes, and `launch` takes where it lies beside the code
_DISTRIBUTION = "diloco-orchestrator"
# `.git` is a file in worktrees and submodules.
_NEVER = GitIgnoreSpec.from_lines([".git", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", "*.egg-info/"])
_MOST_PACKED = 20  # times smaller than before: no code is packed to less
_EPOCH = (1980, 1, 1, 0, 0, 0)  # every file's modification time: the archive's bytes must not depend on it


@dataclass(frozen=True)
class CodeBundle:
    """The user's code that replicas on other machines import.

    Args:
        paths: modules, packages (folders with `__init__.py`), or folders, whose content can then be imported.
        include_secrets: file name patterns; matching files are sent although they look like secrets.
        requirements: packages to install on these machines beside ours, as pip spells them.
        largest_mib: largest size of the packed archive in MiB; every attempt fetches it.
    """

    paths: Sequence[str | Path]
    include_secrets: Sequence[str] = ()
    requirements: Sequence[str] = ()
    largest_mib: int = 64


@dataclass(frozen=True)
class Archive:
    """The packed code of a run. Equal files give equal bytes."""

    data: bytes = field(repr=False)
    sha256: str
    users: Mapping[str, int]  # the user's files by name in the archive, with their sizes in bytes
    hashed: int = 0  # packages of the requirements file if it has hashes, without which nothing is then installed
    unhashed: tuple[str, ...] = ()  # names of packages that a replica needs and that no hash is given for
    note: str = ""  # where the hashes are from, or why there are none

    def words(self) -> str:
        """The archive in one line for the log: digest, number of files, sizes."""
        size, packed = sum(self.users.values()) / 1024, len(self.data) / 1024
        return f"code {self.sha256[:12]}: {len(self.users)} files of {size:.1f} KiB; {packed:.0f} KiB packed, with ours"

    def package_words(self) -> str:
        """A line for the log: the packages that replicas check by hash, and those that they do not."""
        named, note = ", ".join(self.unhashed), f" ({self.note})" if self.note else ""
        if not self.hashed:
            return (
                f"without hashes{note}: replicas take any file that the index offers for {named}. "
                "`diloco lock` pins them"
            )
        if self.unhashed:
            return (
                f"{self.hashed} by hash, and nothing is installed without one: the image must have {named}. "
                "`diloco lock` pins them too"
            )
        return f"{self.hashed} by hash{note}; nothing is installed without one"


def pack(
    code: CodeBundle | str | Path | None,
    entrypoint: str,
    extras: Sequence[str] = (),
    requirements: Requirements | None = None,
    args: Collection[str] = (),
) -> Archive:
    """Pack the code archive of a run.

    Raises `ConfigError` if there is nothing to send, the entrypoint is not among the files, files look like secrets, or
    the archive is larger than `largest_mib`; the text names the files.

    Args:
        code: what to send; None for the package or module that holds `entrypoint`, as this process finds it.
        entrypoint: the training function, "package.module:function".
        extras: extras of our own distribution to install on replicas, such as the SDK that the store needs.
        requirements: packages to install on replicas, as the user's file lists them.
        args: names of the run's arguments, which the training function reads from its context.
    """
    code = _code_of(code, entrypoint)
    users = _distinct(_users_files(code))
    if not users:
        raise ConfigError(
            f"nothing is there to send in {', '.join(map(str, code.paths))}. Is all of it ignored by git, there "
            "or in a folder above?"
        )
    sizes = {name: path.stat().st_size for name, path in sorted(users.items())}
    if (size := sum(sizes.values())) > _MOST_PACKED * code.largest_mib * 2**20:  # data, which memory may not hold
        raise _too_large(f"{size / 2**20:.0f} MiB, packed surely", sizes, code)
    _check_entrypoint(entrypoint, users, args)
    _check_secrets(users, code)
    files = {f"{bootstrap.USERS}/{name}": path.read_bytes() for name, path in users.items()}
    files |= {f"{bootstrap.OURS}/{name}": data for name, data in our_files()}
    details = _details(extras, code.requirements)
    data = _zip(files | _list_files(details, requirements))
    if len(data) > code.largest_mib * 2**20:
        raise _too_large(f"{len(data) / 2**20:.0f} MiB packed,", sizes, code)
    hashed = len(details["users"]) if requirements is not None and requirements.hashed else 0
    return Archive(data, hashlib.sha256(data).hexdigest(), sizes, hashed, _unhashed(details))


def _too_large(size: str, sizes: Mapping[str, int], code: CodeBundle) -> ConfigError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    return ConfigError(
        f"the code is {size} more than {code.largest_mib} MiB. The largest files are {', '.join(largest)}: name them "
        "in .gitignore and read data from where it lies; or CodeBundle(largest_mib=…)."
    )


def pack_ours(extras: Sequence[str] = (), requirements: Requirements | None = None) -> Archive:
    """Pack an archive of our own package with these `extras` of it, and packages to install with it."""
    files = {f"{bootstrap.OURS}/{name}": data for name, data in our_files()}
    data = _zip(files | _list_files(_details(extras, ()), requirements))
    return Archive(data, hashlib.sha256(data).hexdigest(), {})


def _list_files(details: dict[str, Any], requirements: Requirements | None) -> dict[str, bytes]:
    """The archive's files with lists of packages, by name. Adds the contents of `requirements` to `details`."""
    files = {}
    if requirements is not None:
        files[bootstrap.REQUIREMENTS] = requirements.text.encode()
        details["users"] = [_wanted(each) for each in requirements.packages]
        details["hashed"] = requirements.hashed
    if isinstance(requirements, MadeList):
        details["asked"] = [_wanted(each) for each in requirements.asked]
        details["needed_by"] = requirements.needed_by
    return {**files, bootstrap.DETAILS: json.dumps(details, sort_keys=True).encode()}


def _distinct(files: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, path in files:
        if found.setdefault(name, path) != path:
            raise ConfigError(f"{found[name]} and {path} would both be {name} over there. Leave one of them out.")
    return found


def _code_of(code: CodeBundle | str | Path | None, entrypoint: str) -> CodeBundle:
    if isinstance(code, CodeBundle):
        return code
    return CodeBundle([code if code is not None else _home_of(entrypoint)])


def lock_file_of(code: CodeBundle | str | Path | None, entrypoint: str) -> Path | None:
    """The file `LOCK_NAME` beside the code to be sent, or None. Raises `ConfigError` if no code is found.

    `code`, `entrypoint`: as for `pack`.
    """
    given = [Path(path).resolve() for path in _code_of(code, entrypoint).paths]
    for path in given:
        for folder in (path, path.parent) if path.is_file() or (path / "__init__.py").exists() else (path,):
            if (folder / LOCK_NAME).is_file():
                return folder / LOCK_NAME
    return None


def folder_of(code: CodeBundle | str | Path | None, entrypoint: str) -> Path:
    """The folder of the code to be launched; the current folder if no file of that code is found.

    `code`, `entrypoint`: as for `pack`.
    """
    try:
        paths = _code_of(code, entrypoint).paths
    except ConfigError:
        paths = ()
    first = Path(paths[0]).resolve() if paths else Path.cwd()
    return first if first.is_dir() else first.parent


def needed_there(extras: Sequence[str], users: Sequence[str] = ()) -> list[Requirement]:
    """The requirements of a replica in pip's syntax: our dependencies with torch and transformers, those of the given
    extras, and `users`.
    """
    ours, wanted = importlib.metadata.requires(_DISTRIBUTION) or [], ("train", *extras)
    return [each for text in (*ours, *users) if _applies(each := package_of(text), wanted)]


def _home_of(entrypoint: str) -> Path:
    """The folder of the entrypoint's top-level package, or its module's file. Raises `ConfigError` if not found."""
    top = entrypoint.partition(":")[0].partition(".")[0]
    try:
        spec = None if top == "__main__" else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"entrypoint {entrypoint!r}: there is no module {top!r} here that could be packed. Put the function into a "
            "file of its own on sys.path, or name its folder with code=."
        )
    path = Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path


def _users_files(code: CodeBundle) -> Iterator[tuple[str, Path]]:
    for given in code.paths:
        path = Path(given).resolve()
        if path.is_file():
            yield path.name, path
        elif path.is_dir():
            below = path.parent if (path / "__init__.py").exists() else path
            for found in _not_ignored(path, _ignores_above(path)):
                _check_inside(found, path)
                yield found.relative_to(below).as_posix(), found
        else:
            raise ConfigError(f"code {str(given)!r} is neither a folder nor a file. Name what replicas should import.")


def _ignores_above(path: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    """The ignore rules of the folders above `path`, outermost first, from the top of its git repository on."""
    tops = [folder for folder in path.parents if (folder / ".git").exists()]
    if (path / ".git").exists() or not tops:
        return []
    between = [folder for folder in path.parents if folder == tops[0] or tops[0] in folder.parents]
    return [(folder, spec) for folder in reversed(between) if (spec := _ignores_in(folder)) is not None]


def _ignores_in(folder: Path) -> GitIgnoreSpec | None:
    path = folder / ".gitignore"
    return GitIgnoreSpec.from_lines(os.fsdecode(path.read_bytes()).splitlines()) if path.is_file() else None


def _not_ignored(folder: Path, rules: list[tuple[Path, GitIgnoreSpec]], above: Collection[Path] = ()) -> Iterator[Path]:
    """The files in `folder` and below that git does not ignore.

    `rules`: by folder. `above`: where the folders lie that led here, without links. Raises `ConfigError` for a link to
    a folder that leads to it.
    """
    above = (*above, folder.resolve())
    if (spec := _ignores_in(folder)) is not None:
        rules = [*rules, (folder, spec)]
    for path in sorted(folder.iterdir()):
        suffix = "/" if path.is_dir() else ""
        if _NEVER.match_file(path.name + suffix) or _is_ignored(path, suffix, rules):
            continue
        if path.is_dir():
            if path.is_symlink() and any(each.is_relative_to(path.resolve()) for each in above):
                raise ConfigError(f"{path} is a link to a folder that holds it. Name it in .gitignore.")
            yield from _not_ignored(path, rules, above)
        elif path.is_file():
            yield path


def _check_inside(path: Path, folder: Path) -> None:
    """Raise `ConfigError` for a file that a link places outside of the folder to be sent."""
    target = path.resolve()
    if not target.is_relative_to(folder):
        raise ConfigError(
            f"{path} leads to {target}, which is outside of {folder}. Copy it there, name it in .gitignore, or name it "
            "with CodeBundle(paths=[…]) if it has to travel."
        )


def _is_ignored(path: Path, suffix: str, rules: list[tuple[Path, GitIgnoreSpec]]) -> bool:
    """Whether git ignores `path`. The innermost folder above it whose .gitignore has a matching rule decides.

    `suffix`: "/" for a folder. `rules`: by folder.
    """
    for folder, spec in reversed(rules):
        said = spec.check_file(path.relative_to(folder).as_posix() + suffix).include
        if said is not None:
            return said
    return False


def _check_entrypoint(entrypoint: str, users: Mapping[str, Path], args: Collection[str]) -> None:
    """Raise `ConfigError` if the entrypoint's module is neither in the archive nor in an installed distribution."""
    module = entrypoint.partition(":")[0]
    base = module.replace(".", "/")
    found = next((users[name] for name in (f"{base}.py", f"{base}/__init__.py") if name in users), None)
    if found is not None:
        check_defined(entrypoint, found, args)
    else:
        top = module.partition(".")[0]
        if any(name == f"{top}.py" or name.startswith(f"{top}/") for name in users) or not _installed(top):
            raise ConfigError(
                f"entrypoint {entrypoint!r} is not among the {len(users)} files to be sent: there is no {base}.py. "
                "Is it ignored by .gitignore? Name the folder that holds it with code=."
            )


def _installed(top: str) -> bool:
    return top in importlib.metadata.packages_distributions()


def _check_secrets(users: Mapping[str, Path], code: CodeBundle) -> None:
    if found := suspicious_files(users, code.include_secrets):
        named = ", ".join(f"{name} ({why})" for name, why in found.items())
        raise ConfigError(
            f"these files look like secrets and would be readable in the bucket: {named}. Name them in "
            ".gitignore and hand secrets over with secrets=; or, if they are none, CodeBundle(…, include_secrets=[…])."
        )


def our_files() -> Iterator[tuple[str, bytes]]:
    """(name in the archive, bytes) of every file of our own package, which is on no package index."""
    top = Path(__file__).parents[1]
    for folder, _, names in os.walk(top, followlinks=True):  # in a checkout `executors` and `replica` are links
        for path in (Path(folder, name) for name in names):
            if path.suffix in (".py", ".pyi", ".typed"):
                yield f"{top.name}/{path.relative_to(top).as_posix()}", path.read_bytes()
    for short in SHORT_NAMES:
        for path in (top / short / name for name in ("__init__.py", "__init__.pyi", "py.typed")):
            if path.exists():
                yield f"{short}/{path.name}", path.read_bytes()
    ours = importlib.metadata.distribution(_DISTRIBUTION)
    metadata = ours.read_text("METADATA") or ours.read_text("PKG-INFO") or ""
    yield f"diloco_orchestrator-{ours.version}.dist-info/METADATA", metadata.encode()


def _details(extras: Sequence[str], users: Sequence[str]) -> dict[str, Any]:
    """The requirements of a replica, and the versions installed here, which become pip's constraints there.

    Args:
        extras: extras of our distribution.
        users: requirements of the user's code, as pip spells them.
    """
    wanted = needed_there(extras, users)
    constraints = []
    for each in wanted:
        try:
            version = importlib.metadata.version(each.name).partition("+")[0]  # a local build is on no index
        except importlib.metadata.PackageNotFoundError:
            continue
        constraints.append(f"{each.name}=={version}")
    requirements = [_wanted(each) for each in wanted]
    return {"requirements": requirements, "constraints": sorted(set(constraints))}


def _wanted(each: Requirement) -> dict[str, str]:
    marker = {"marker": text} if (text := marker_of(each)) else {}
    return {"name": each.name, "spec": spec_of(each), "pin": pin_of(each), **marker}


def _unhashed(details: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the packages in `details` that a replica needs and that have no hash."""
    users = details.get("users", [])
    hashed = {bootstrap.canonical(each["name"]) for each in users} if details.get("hashed") else set()
    needed = {bootstrap.canonical(each["name"]) for each in (*details["requirements"], *users)}
    return tuple(sorted(needed - hashed))


def _applies(requirement: Requirement, extras: Sequence[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _zip(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


_LONGEST_S = 5.0  # git may wait for a lock or a slow disk; a launch does not


def source_of(folder: Path) -> str:
    """The git commit checked out in `folder`, with "+changes" if tracked files differ; empty if unknown."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_LONGEST_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
