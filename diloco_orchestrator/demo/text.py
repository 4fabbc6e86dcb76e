"""Text for the demo: the source of the Python standard library, or a folder of the user's, split by file.

The hash of a file's content decides whether the file is held out or used for training, so that no text is in both sets,
whatever its name and folder. `demo.workload` trains on it.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from diloco_orchestrator.errors import ConfigError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings"}
_LARGEST_FILE = 2**20  # bytes; larger files are data rather than text
_ENOUGH = 16 * 2**20  # bytes; files beyond this total are skipped
_HELDOUT_PERMILLE = 60  # of files, by the hash of their content
_MINIMUM = 200_000  # bytes; less is too little for a held-out set and several replicas


@dataclass(frozen=True)
class Corpus:
    """The contents of the training files and of the held-out files, both in the order of their hashes."""

    training: tuple[bytes, ...]
    heldout: tuple[bytes, ...]

    def shard(self, replica_id: int, replicas: int) -> bytes:
        """The training text of one replica: every `replicas`-th file. No file belongs to two replicas."""
        return b"\n".join(self.training[replica_id::replicas])

    def heldout_items(self, count: int, size: int) -> list[str]:
        """`count` windows of `size` bytes, spread evenly over the held-out text, as str with one character per byte."""
        text = b"\n".join(self.heldout)
        stride = max(1, (len(text) - size) // count)
        return [text[start : start + size].decode("latin-1") for start in range(0, count * stride, stride)]


def load_corpus(folder: str | None = None) -> Corpus:
    """The text files below `folder`, by default the standard library's. Raises `ConfigError` for too little text."""
    root = Path(folder) if folder else Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise ConfigError(f"--text {folder}: there is no such folder.")
    by_hash = _read_files(root, "*" if folder else "*.py")
    ordered = [by_hash[digest] for digest in sorted(by_hash)]
    heldout = [text for digest, text in sorted(by_hash.items()) if int(digest[:8], 16) % 1000 < _HELDOUT_PERMILLE]
    if not heldout and len(ordered) > 1:
        heldout = ordered[:1]  # too few files for the hash to hold one out
    kept = set(heldout)
    training = [text for text in ordered if text not in kept]
    if sum(map(len, ordered)) < _MINIMUM or not training:
        raise ConfigError(
            f"{root} holds {sum(map(len, ordered))} bytes of text in {len(ordered)} files; the demo needs {_MINIMUM} "
            "bytes in at least two. Choose a larger folder, or leave --text out to use Python's own source."
        )
    return Corpus(tuple(training), tuple(heldout))


def _read_files(root: Path, pattern: str) -> dict[str, bytes]:
    """File contents by their sha256, so that copies of a file count once."""
    found: dict[str, bytes] = {}
    total = 0
    for path in sorted(root.rglob(pattern)):
        text = _text_of(path, root)
        if text is None or total + len(text) > _ENOUGH:
            continue
        total += len(text)
        found[hashlib.sha256(text).hexdigest()] = text
    return found


def _text_of(path: Path, root: Path) -> bytes | None:
    """The bytes of a file; None if it is no UTF-8 text, too large, or in a folder that is left out."""
    parts = path.relative_to(root).parts
    if any(part in _SKIPPED_FOLDERS or part.startswith((".", "config-")) for part in parts):
        return None
    try:
        if not path.is_file() or not 0 < path.stat().st_size <= _LARGEST_FILE:
            return None
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in data else data
