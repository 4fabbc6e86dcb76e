"""The files of a store that is a folder: opens and lists them; whether they may be mapped into memory; the disk's room.

Others may write to the folder too. Only regular files are objects: opening a FIFO would block, and a link may point
anywhere.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from diloco_orchestrator.store.base import ObjectInfo

_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
_MOUNTS = Path("/proc/self/mounts")


def is_on_local_disk(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether `folder`, which exists, is on a disk or in the memory of this machine. False if unknown.

    A file on a network file system may be deleted by another machine while it is mapped; reading it then ends the
    process by a signal (SIGBUS) instead of an error.

    `mounts`: the table of mounted file systems in Linux's format.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False  # not Linux
    kinds = {Path(_unescaped(fields[1])): fields[2] for fields in map(str.split, lines) if len(fields) > 2}
    resolved = folder.resolve()
    return next((kinds[each] in _LOCAL for each in (resolved, *resolved.parents) if each in kinds), False)


def why_no_room(folder: Path, needed_bytes: int) -> str:
    """The reason that the disk of `folder` cannot take `needed_bytes` bytes more, with what to do; empty if it can.

    Also empty if `folder` does not exist. Quotas are not seen.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    if found.f_flag & os.ST_RDONLY:
        return f"the disk of {folder} is read-only: see why (dmesg), and mount it for writing again"
    left = found.f_bavail * found.f_frsize
    if found.f_blocks and left < max(needed_bytes, 1):
        sizes = f"{left / 1e6:.1f} MB left, a round writes {needed_bytes / 1e6:.1f} MB"
        return f"the disk of {folder} has {sizes}: free some space there"
    if found.f_files and not found.f_favail:
        return f"the disk of {folder} takes no further files (no inodes left): delete some there"
    return ""


def _unescaped(text: str) -> str:
    """A path of the mount table, with octal escapes of spaces and backslashes decoded."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def open_regular(path: Path) -> IO[bytes]:
    """A regular file, open for reading. Raises `OSError` at once for anything else, such as a FIFO."""
    # Without O_NONBLOCK, opening a FIFO waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")  # buffered: one read of the system ends after 2 GiB


def listed(root: Path, prefix: str, start_after: str) -> list[ObjectInfo]:
    """The regular files below a prefix whose names can be keys, as in `Store.list` but in any order."""
    found = (ObjectInfo(key, size) for key, size in _files(root / prefix, prefix.rstrip("/")))
    return [info for info in found if info.key > start_after]


def _files(folder: Path, key: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if not entry.name.isprintable():  # control characters, and bytes that are no text
            continue
        below = f"{key}/{entry.name}" if key else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), below)
        elif entry.is_file(follow_symlinks=False):
            yield below, entry.stat(follow_symlinks=False).st_size
