"""The version of this package with the git commit that it is of: "0.3.0 (abc1234)"."""

from importlib.resources import files
from pathlib import Path

from diloco_orchestrator.protocol.version import VERSION

_SHOWN = 7  # characters of a commit


def installed_version() -> str:
    """The version and, in brackets, the commit, with "+changes" where tracked files differ from it.

    The commit is that of the wheel or the sdist that was installed, or the one that is checked out; without brackets
    where neither is known, as in a copy of the files.
    """
    commit, changes, _ = _source().partition("+changes")
    return f"{VERSION} ({commit[:_SHOWN]}{changes})" if commit else VERSION


def _source() -> str:
    written = files("diloco_orchestrator") / "COMMIT"
    if written.is_file():
        return written.read_text(encoding="utf-8").strip()
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # a folder above may be somebody else's checkout
        return ""
    from diloco_orchestrator.code_archive.pack import source_of

    return source_of(root)
