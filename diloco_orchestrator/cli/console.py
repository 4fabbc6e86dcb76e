"""What the commands print goes through here: text of the bucket can neither move the terminal nor be taken for markup.

Whoever may write to the bucket chooses the reasons, host names and log lines that a reader sees.
"""

import re
from collections.abc import Iterable
from typing import Any

import click
import rich.console
from rich.segment import Segment

# C0 without tab and newline, DEL, C1, and what changes the direction of the text that follows; halves of surrogate
# pairs, which no terminal's encoding has.
_MOVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """`text` with a visible character in place of each that would move the terminal's cursor, change its colours or
    reorder the line. Tabs and newlines stay.
    """
    return _MOVES.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else "\ufffd", text)


def echo(text: str, *, err: bool = False) -> None:
    """Print text as `shown` returns it."""
    click.echo(shown(text), err=err)


class Console(rich.console.Console):
    """rich's console without markup and highlighting in strings, whose text is printed as `shown` returns it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are rich's own, such as those that redraw a live table.
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
