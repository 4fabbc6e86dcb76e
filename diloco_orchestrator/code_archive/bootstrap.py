"""The first program on another machine: fetches and unpacks the code archive, then replaces itself by the replica.

Executors send it as text (`program_text`), so it needs only the standard library, and any image with Python will do.
What the archive holds is in `code_archive.pack`. Environment:

  DILOCO_CODE_SHA256   sha256 of the archive that `code_archive.pack` made
  DILOCO_CODE_URL      where the archive is: a presigned https URL (a credential), or a path in a mounted bucket
  DILOCO_PROGRAM       the module to become; the replica's process by default
  MODAL_IDENTITY_TOKEN, AWS_ROLE_ARN    if both are set, the token is written to a file, where AWS's SDKs read it

Its arguments are those of the replica's process.
"""

import datetime
import hashlib
import http.client
import importlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from diloco_orchestrator.executors.process_contract import (
    ENV_CODE_FOLDER,
    EXIT_ERROR,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
    print_exit_line,
)

ENV_SHA256, ENV_URL, ENV_PROGRAM = "DILOCO_CODE_SHA256", "DILOCO_CODE_URL", "DILOCO_PROGRAM"
DETAILS = "delivery.json"  # a file of the archive; archives of older runs have it under this name
REQUIREMENTS = "requirements.txt"  # a file of the archive: what the user asks for, or the list that the launch made
OURS, USERS = "ours", "users"  # folders of the archive

_OTHER_WAYS = (
    'Use an image that has them, make a list for it with `diloco lock`, or launch with pin="given", which sends '
    "versions without hashes."
)
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)


class Stopped(Exception):
    """The replica cannot start on this machine. `code`: its exit code, which says whether a relaunch could help."""

    def __init__(self, words: str, code: int = EXIT_ERROR) -> None:
        super().__init__(words)
        self.code = code


def fetch(url: str) -> bytes:
    """The bytes of the archive at a URL or path. Transient errors are retried for 31 s.

    Raises `Stopped`, whose text never holds the URL, because a presigned URL is a credential.
    """
    if not url.startswith(("http://", "https://")):
        return _read(url)
    for pause in (*_PAUSES_S, None):
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                code = EXIT_PREEMPTED if has_expired(url, time.time()) else EXIT_ERROR
                raise Stopped(
                    f"the bucket refuses the code's presigned URL (HTTP {error.code}): it expired while this attempt "
                    "waited for a machine, or the credentials that signed it did. The next attempt gets a new one.",
                    code,
                ) from None
            if error.code in (404, 410):
                raise Stopped(
                    f"the run's code is not in the bucket any more (HTTP {error.code}): no attempt can start.",
                    EXIT_PERMANENT,
                ) from None
            words = f"HTTP {error.code}"
        except (OSError, EOFError, http.client.HTTPException) as error:
            words = str(getattr(error, "reason", error))
        if pause is None:
            break
        print(f"the run's code cannot be fetched yet ({words}); trying again in {pause:g} s", flush=True)
        time.sleep(pause)
    raise Stopped(f"the run's code could not be fetched: {words}. Check that this machine reaches the bucket.")


def has_expired(url: str, now: float) -> bool:
    """Whether a presigned URL has expired, by its own parameters. `now`: seconds since 1970."""
    told = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query))
    try:
        signed = datetime.datetime.strptime(told["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC)
        return now > signed.timestamp() + float(told["X-Amz-Expires"])
    except (KeyError, ValueError):
        return False


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Stopped(f"the run's code cannot be read: {error}. Is the bucket mounted here?", EXIT_PERMANENT) from None


def unpack(archive: bytes, sha256: str, folder: Path) -> None:
    """Unpack the archive into `folder`. Raises `Stopped` if its sha256 is not `sha256`."""
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise Stopped(f"the code's bytes have sha256 {found[:12]}, the run's have {sha256[:12]}: not running them.")
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        opened.extractall(folder)


def missing(requirements: list[dict[str, str]]) -> list[str]:
    """Requirements to install: those in `requirements` that are absent here or pinned to another version, in pip's
    syntax.

    `requirements`: name, spec, pin and perhaps a marker each, from the archive's details. One whose marker is false
    here is skipped.
    """
    return [each["spec"] for each in requirements if applies(each) and not _is_there(each)]


def applies(requirement: dict[str, str]) -> bool:
    """Whether a requirement's marker is true here; True without a marker, or if no library can evaluate it."""
    if not requirement.get("marker"):
        return True
    for parser in ("packaging.markers", "pip._vendor.packaging.markers"):
        try:
            return bool(importlib.import_module(parser).Marker(requirement["marker"]).evaluate())
        except ImportError:
            continue
    return True


def _is_there(requirement: dict[str, str]) -> bool:
    try:
        found = importlib.metadata.version(requirement["name"])
    except importlib.metadata.PackageNotFoundError:
        return False
    pin = requirement["pin"]
    return not pin or found == pin or found.partition("+")[0] == pin


def install_unhashed(details: dict[str, Any], folder: Path) -> None:
    """Install the requirements that the image lacks, in the versions that the launcher has. Raises `Stopped` if pip
    fails.

    `details`: from the code archive, unpacked in `folder`.
    """
    limits = folder / "constraints.txt"
    limits.write_text("".join(f"{line}\n" for line in details["constraints"]))
    if wanted := missing(details["requirements"]):
        print(f"installing {', '.join(wanted)} (no hashes are given; an image that has them starts faster)", flush=True)
        if not _pip(["-c", str(limits), *wanted]):
            raise Stopped(f"pip could not install {', '.join(wanted)} (see above). Use an image that has them.")
    if users := missing(details.get("users") or []):
        _install_file(len(users), ["-c", str(limits)], folder)


def install_hashed(details: dict[str, Any], folder: Path) -> None:
    """Install the user's requirements file, which has hashes, if the image lacks any of it or of what we need.

    Nothing is installed without a hash. `details`: from the code archive, unpacked in `folder`. Raises `Stopped` if a
    package that we need is neither in the image nor in the file, and if pip fails.
    """
    ours, users = details["requirements"], details.get("users") or []
    listed = {canonical(each["name"]) for each in users}
    if absent := missing([each for each in ours if canonical(each["name"]) not in listed]):
        raise Stopped(
            f"the image lacks {', '.join(absent)}, and the run's requirements, which have hashes, do not list them: "
            "nothing is installed without a hash. List them too (`diloco lock`), or use an image that has them.",
            EXIT_PERMANENT,
        )
    if wanted := missing([*ours, *users]):
        _install_file(len(wanted), ["--require-hashes"], folder)


def install_made(details: dict[str, Any], folder: Path) -> None:
    """Install packages that the image lacks from the list with hashes that the launch made by itself.

    First only packages that are absent here, or that the user pinned to another version: the image's packages stay,
    because pip accepts an installed package in any version that the others allow. If pip finds no solution, it gets all
    dependencies of the lacking packages too, in the versions of the list. Nothing is installed without a hash, or built
    here, because build dependencies have no hashes. Raises `Stopped` if pip fails twice, or the list lacks a package.
    """
    lacking = [each for each in (*details["requirements"], *details["asked"]) if applies(each) and not _is_there(each)]
    if not lacking:
        return
    lines = (folder / REQUIREMENTS).read_text().splitlines()
    options = [line for line in lines if line.startswith("-")]
    packages = [line for line in lines if not line.startswith("-")]
    for_here = {canonical(each["name"]) for each in details["users"] if applies(each)}
    if unlisted := [each["spec"] for each in lacking if canonical(each["name"]) not in for_here]:
        raise Stopped(
            f"the image lacks {', '.join(unlisted)}, and the list with hashes that the launch made has none of it for "
            f"this machine: nothing is installed without a hash. {_OTHER_WAYS}",
            EXIT_PERMANENT,
        )
    beside, replacing = (needed(details, {canonical(each["name"]) for each in lacking}, keep) for keep in (True, False))
    for chosen in (beside, replacing) if replacing != beside else (beside,):
        if chosen is replacing:
            print("pip cannot install them beside what the image has: now with what they depend on", flush=True)
        (folder / "chosen.txt").write_text("\n".join([*options, *(packages[i] for i in chosen)]) + "\n")
        print(f"installing {len(chosen)} packages by hash (an image that has them starts faster)", flush=True)
        if _pip(["--require-hashes", "--only-binary", ":all:", "-r", str(folder / "chosen.txt")]):
            return
    raise Stopped(f"pip could not install the packages by hash (see above). {_OTHER_WAYS}")


def needed(details: dict[str, Any], lacking: set[str], keep: bool) -> list[int]:
    """Indexes of the listed packages in `lacking` and of all their direct and indirect dependencies.

    `details`: from the code archive, with the list. `keep`: leave out packages that are installed here in any version,
    and their dependencies, unless in `lacking`.
    """
    found: set[str] = set(lacking)
    listed = [
        (i, canonical(each["name"]), {canonical(name) for name in parents})
        for i, (each, parents) in enumerate(zip(details["users"], details["needed_by"], strict=True))
        if applies(each) and not (keep and canonical(each["name"]) not in lacking and _is_there({**each, "pin": ""}))
    ]
    while new := {name for _, name, parents in listed if name not in found and parents & found}:
        found |= new
    return [i for i, name, _ in listed if name in found]


def canonical(name: str) -> str:
    """A distribution's normalised name, as defined by the packaging specifications."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _install_file(count: int, limits: list[str], folder: Path) -> None:
    print(f"installing {count} packages of requirements.txt (an image that has them starts faster)", flush=True)
    if not _pip([*limits, "-r", str(folder / REQUIREMENTS)]):
        raise Stopped("pip could not install the requirements (see above). Correct the file, or use an image.")


def _pip(arguments: list[str]) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*command, *arguments], check=False).returncode == 0


def web_identity(environ: dict[str, str], folder: Path) -> dict[str, str]:
    """Variables for AWS's SDKs to read a web identity token from a file; Modal passes the token in a variable.

    Writes that file into `folder`. Empty if there is no Modal token, no role, or a token file already.
    """
    token = environ.get("MODAL_IDENTITY_TOKEN")
    if not token or "AWS_ROLE_ARN" not in environ or "AWS_WEB_IDENTITY_TOKEN_FILE" in environ:
        return {}
    path = folder / "identity"
    path.touch(mode=0o600)
    path.write_text(token)
    return {"AWS_WEB_IDENTITY_TOKEN_FILE": str(path)}


def main() -> None:
    """Replace this process by the replica, or print the exit line and exit if the replica cannot start."""
    environ = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="diloco-"))
    try:
        unpack(fetch(environ.pop(ENV_URL)), environ[ENV_SHA256], folder)
        details = json.loads((folder / DETAILS).read_text())
        if "needed_by" in details:
            install_made(details, folder)
        elif details.get("hashed"):
            install_hashed(details, folder)
        else:
            install_unhashed(details, folder)
    except Stopped as reason:
        shutil.rmtree(folder, ignore_errors=True)
        print_exit_line(reason.code, error=str(reason))
        sys.exit(reason.code)
    # The user's code comes first, as in the launching process, so that its own modules named `executors` or `replica`
    # win over ours.
    path = [str(folder / USERS), str(folder / OURS), *filter(None, [environ.get("PYTHONPATH")])]
    environ.update(web_identity(environ, folder), PYTHONPATH=os.pathsep.join(path), PYTHONUNBUFFERED="1")
    environ[ENV_CODE_FOLDER] = str(folder)
    program = environ.pop(ENV_PROGRAM, "diloco_orchestrator.replica")
    os.execve(sys.executable, [sys.executable, "-P", "-m", program, *sys.argv[1:]], environ)


if __name__ == "__main__":
    main()
