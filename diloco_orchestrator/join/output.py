"""The output of an attempt on a joined machine: written to the bucket in pieces, and read from there as lines."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.reader import read_optional, read_record
from diloco_orchestrator.store.base import Store

PIECE_BYTES = 64 * 1024
MOST_PIECES = 512  # of one attempt: 32 MiB; of what comes after them only the last piece is written

_PIECES_AT_ONCE = 16  # while the process runs


class OutputPieces:
    """Copies lines that a process appends to the file `source` to the bucket, in pieces.

    A piece has at most `PIECE_BYTES` (64 KiB) of the source, and an attempt at most `MOST_PIECES` (512) and a last one.

    Args:
        store: the run's folder.
        name: of the attempt, from `attempt_name`.
        source: exists, and is only appended to. Bytes that are not UTF-8 are replaced.
        clean: removes credentials from a text; it is given whole lines, or parts of lines longer than a piece.
    """

    def __init__(self, store: Store, name: str, source: Path, clean: Callable[[str], str]) -> None:
        self._store = store
        self._name = name
        self._source = source
        self._clean = clean
        self._offset = 0  # bytes of the file that are written
        self._pieces = 0
        # A piece and the offset after it, whose create has not returned: it may exist, so it must not grow any more.
        self._pending: tuple[bytes, int] | None = None

    def write(self, *, to_end: bool = False) -> None:
        """Write the new complete lines to the bucket. `to_end`: the process has ended, so also write an incomplete last
        line.

        Otherwise at most a MiB per call, because the caller must write its next sign of life. Safe to repeat after an
        error. Raises the store's errors.
        """
        most = self._pieces + _PIECES_AT_ONCE
        while (to_end or self._pieces < most) and (pending := self._pending or self._next(to_end)) is not None:
            self._pending = pending
            key = keys.join_piece(self._name, self._pieces)
            if self._store.create(key, pending[0]) or read_optional(self._store, key) == pending[0]:
                self._pending, self._offset = None, pending[1]
            self._pieces += 1  # past one that another attempt of this name has left in a folder that was emptied

    def _next(self, to_end: bool) -> tuple[bytes, int] | None:
        """The next piece of the output, whole lines or part of a long one, and the offset after it; None if none."""
        full = self._pieces >= MOST_PIECES
        if full and not to_end:
            return None
        with self._source.open("rb") as file:
            left = file.seek(0, os.SEEK_END) - self._offset
            skipped = max(0, left - PIECE_BYTES) if full else 0
            file.seek(self._offset + skipped)
            found = file.read(min(PIECE_BYTES, left - skipped))
        if not (to_end and len(found) == left - skipped):
            whole = found[: found.rfind(b"\n") + 1]
            found = whole or (found if len(found) == PIECE_BYTES else b"")
        if not found:
            return None
        text = self._clean(found.decode(errors="replace"))
        if skipped:
            text = f"[{skipped} bytes of output are missing here: it was too long]\n{text}"
        return text.encode(errors="replace"), self._offset + skipped + len(found)


def lines_of(store: Store, name: str, *, tail: int | None, passes: Iterator[bool]) -> Iterator[str]:
    """The lines of an attempt's output on a joined machine, read from the pieces in the bucket.

    `tail`: only this many of the last lines that exist now; None for all. `passes`: for each pass over the bucket,
    whether the attempt had ended before it; True is the last pass. Raises the store's errors.
    """
    last, rest = "", ""
    for number, ended in enumerate(passes):
        found = [info.key for info in store.list(keys.join_output(name), last) if keys.is_join_piece(info.key)]
        last = found[-1] if found else last
        if number == 0 and tail is not None:
            lines, rest = _split(_last_pieces(store, found, tail))
            ending = [rest] if ended and rest else []
            yield from [*lines, *ending][-tail:] if tail else []
            continue
        for key in found:
            lines, rest = _split(rest + _text(store, key))
            yield from lines
        if ended and rest:
            yield rest


def _split(text: str) -> tuple[list[str], str]:
    whole, _, rest = text.rpartition("\n")
    return (whole.split("\n") if len(rest) < len(text) else []), rest


def _last_pieces(store: Store, found: list[str], tail: int) -> str:
    """The text of the last pieces of an attempt's output, as many as contain `tail` lines."""
    text = ""
    for key in reversed(found):
        if text.count("\n") > tail:
            break
        text = _text(store, key) + text
    return text


def _text(store: Store, key: str) -> str:
    return read_record(store, key).decode(errors="replace")
