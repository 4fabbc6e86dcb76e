"""Whether a folder lies on a disk of this machine, whose files can be mapped into memory without a risk to the process.

A file on a network may be gone, deleted by another machine, while it is mapped; reading it is then a signal (SIGBUS),
which ends the process, and not an error.
"""

import re
from pathlib import Path

_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
_MOUNTS = Path("/proc/self/mounts")


def is_on_local_disk(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether `folder`, which exists, lies on a disk or in the memory of this machine. False where that is unknown.

    `mounts`: the table of mounted file systems as Linux shows it.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False  # not Linux
    kinds = {Path(_unescaped(fields[1])): fields[2] for fields in map(str.split, lines) if len(fields) > 2}
    resolved = folder.resolve()
    return next((kinds[each] in _LOCAL for each in (resolved, *resolved.parents) if each in kinds), False)


def _unescaped(text: str) -> str:
    """A path of the table, in which spaces and backslashes are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
