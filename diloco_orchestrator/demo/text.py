"""Text for the demo: the Python standard library's own source, or a folder of the user's, split by file.

A file goes to the held-out set or to one replica's training shard by the hash of its content, so that no text is on
both sides, whatever the file is called and wherever it lies. Knows no model.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from diloco_orchestrator.errors import ConfigError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings"}
_LARGEST_FILE = 2**20  # bytes; larger ones are data rather than prose
_ENOUGH = 16 * 2**20  # bytes read at most
_HELDOUT_PERMILLE = 60  # of files, by hash
_MINIMUM = 200_000  # bytes; less cannot be dealt to replicas and a held-out set


@dataclass(frozen=True)
class Corpus:
    """File contents by side, each in the order of their hashes. `source` says where they are from."""

    source: str
    training: tuple[bytes, ...]
    heldout: tuple[bytes, ...]

    def shard(self, replica_id: int, replicas: int) -> bytes:
        """The training text of one replica: every `replicas`-th file, disjoint from all others'."""
        return b"\n".join(self.training[replica_id::replicas])

    def heldout_items(self, count: int, size: int) -> list[str]:
        """`count` windows of `size` bytes, spread evenly over the held-out text, as latin-1 strings (one byte each)."""
        text = b"\n".join(self.heldout)
        stride = max(1, (len(text) - size) // count)
        return [text[start : start + size].decode("latin-1") for start in range(0, count * stride, stride)]


def load_corpus(folder: str | None = None) -> Corpus:
    """The standard library's source, or every text file below `folder`. Raises `ConfigError` if there is too little."""
    root = Path(folder) if folder else Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise ConfigError(f"--text {folder}: there is no such folder.")
    by_hash = _read_files(root, "*" if folder else "*.py")
    ordered = [by_hash[digest] for digest in sorted(by_hash)]
    heldout = [text for digest, text in sorted(by_hash.items()) if int(digest[:8], 16) % 1000 < _HELDOUT_PERMILLE]
    if not heldout and len(ordered) > 1:
        heldout = ordered[:1]  # few files: the first by hash
    kept = set(heldout)
    training = [text for text in ordered if text not in kept]
    if sum(map(len, ordered)) < _MINIMUM or not training:
        raise ConfigError(
            f"{root} holds {sum(map(len, ordered))} bytes of text in {len(ordered)} files; the demo needs {_MINIMUM} "
            "bytes in at least two. Choose a larger folder, or leave --text out to use Python's own source."
        )
    return Corpus(str(root), tuple(training), tuple(heldout))


def _read_files(root: Path, pattern: str) -> dict[str, bytes]:
    """Contents by sha256: a file that is there twice counts once."""
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
    """The file's bytes if it is plain text of a reasonable size, else None."""
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
