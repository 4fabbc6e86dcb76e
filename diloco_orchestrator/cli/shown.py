"""Text of the bucket as it may be printed: it can neither move the terminal's cursor nor change its colours.

Whoever may write to the bucket chooses the reasons, host names and log lines that a reader sees.
"""

import re

import click

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
