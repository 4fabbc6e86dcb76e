"""Limits of records: their bytes, by key, and the numbers and text in it.

These are limits for readers, against objects that no writer of ours made. Ours stay far below: the manifest of a model
of 70 billion parameters has 500 KiB, the start record of a model of 50,000 tensors 8 MiB.
"""

import json
import math
import re
from typing import Any

MIB = 2**20

# By key, the first that matches. Parsed, JSON takes up to ten times its bytes.
_MOST_BYTES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern, re.ASCII), most)
    for pattern, most in (
        (
            r"start\.json|start/takes/.*|snapshots/.*/snapshot\.json",
            16 * MIB,
        ),  # a line for every tensor, for every file
        (r"rounds/.*/(commit|contributions/\d+)\.json", 8 * MIB),
        (r"log/.*\.jsonl", 256 * MIB),  # 100 rounds of the line above, which are parsed one by one
        (r"replicas/.*/log\.txt", MIB),  # its end: 65,536 characters of it are written, redacted
        (r".*", MIB),
    )
)
# Beyond it sums of whole numbers do not fit into a float. A data cursor may hold the 128 bits of a random generator.
_WHOLE_NUMBERS = 10**100
_DIGITS = 101  # of such a number, sign included
# The largest norm of a pseudo-gradient: sums of fewer than 2**27 of them stay finite in fp32, momenta included.
MOST_NORM = 2.0**100
LONGEST_REASON = 300  # characters of what a commit quotes of a manifest or an error
MOST_COUNTED = 2**53  # steps, tokens or bytes that one manifest names: what is derived from them stays below the above


def most_bytes(key: str) -> int:
    """The most bytes that the record with this key may have."""
    return next(most for pattern, most in _MOST_BYTES if pattern.fullmatch(key))


def parse_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises `ValueError` for what is not JSON, and for what JSON allows and no record holds: whole numbers of more than
    100 digits, numbers that are not finite, nesting deeper than the interpreter follows, text that is not Unicode.
    """
    try:
        value = json.loads(data, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair, which cannot be written again
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(text: str) -> int:
    if len(text) > _DIGITS or not -_WHOLE_NUMBERS <= (number := int(text)) < _WHOLE_NUMBERS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is not finite")
    return number


def _refuse(text: str) -> float:
    raise ValueError(f"the number {text}")
