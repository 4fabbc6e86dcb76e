"""`OutputTail`: keeps the end of this process's output, for the attempt's `log.txt`.

Output is printed as usual. Credentials are redacted later, where the text is written.
"""

import sys
from types import TracebackType
from typing import Any, Self, TextIO

TAIL_CHARACTERS = 65_536


class OutputTail:
    """While entered as a context, records text printed through sys.stdout and sys.stderr; `text()` returns its end."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        """Append printed text; older text is dropped."""
        self._pieces.append(text)
        self._size += len(text)
        if self._size > 2 * TAIL_CHARACTERS:
            self._pieces = [self.text()]
            self._size = len(self._pieces[0])

    def text(self) -> str:
        """The last 65,536 characters of the output."""
        return "".join(self._pieces)[-TAIL_CHARACTERS:]

    def __enter__(self) -> Self:
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(sys.stdout, self), _Tee(sys.stderr, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout, sys.stderr = self._streams


class _Tee:
    """A text stream that writes to another stream and adds the text to an `OutputTail`."""

    def __init__(self, stream: TextIO, tail: OutputTail) -> None:
        self._stream = stream
        self._tail = tail

    def write(self, text: str) -> int:
        self._tail.add(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
