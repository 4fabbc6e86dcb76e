"""`source_of`: which commit of the user's repository a launch ran, for readers of the run; git alone knows it."""

import subprocess
from pathlib import Path

_LONGEST_S = 5.0  # git may wait for a lock or a slow disk; a launch does not


def source_of(folder: Path) -> str:
    """The commit checked out in the repository that holds `folder`, "+changes" after it where tracked files differ.

    Empty where git is missing, fails or takes too long, and outside of a repository.
    """
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
