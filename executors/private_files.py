"""Folders and files that no other user of this machine can read, write, or have prepared.

A folder in a place where everybody may write, such as /tmp, can be made beforehand by somebody else, with links and
files in it that are then truncated, appended to or believed.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from diloco_orchestrator.executors.contract import ExecutorError

_OTHERS_WRITE = 0o022


def state_folder(environ: Mapping[str, str]) -> Path:
    """The folder for state of this user's local replicas: below $XDG_STATE_HOME, or ~/.local/state."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "diloco-orchestrator" / "local"


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, with the folders above it.

    Raises `ExecutorError` if it exists and is another user's, a link, or one that others may write to.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ExecutorError(f"{folder} cannot be made: {error}. Name another folder (directory=).") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_WRITE:
        raise ExecutorError(
            f"{folder} is another user's, a link, or writable for others, who could plant processes and files there. "
            "Name a folder of your own (directory=), or chmod 700 it."
        )


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file of this user, made with mode 600 if `flags` ask for it. No link is followed.

    Raises `ExecutorError` for a link or the file of another user.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ExecutorError(f"{path} cannot be opened: {error}. If it is a link, somebody planted it.") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise ExecutorError(f"{path} is no file of this user: somebody else planted it. Remove it.")
    return descriptor
