"""Mutations of bytes and of JSON: what an accident or a hostile writer may make of an object."""

import json
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320, "", "a", "\x00",
    "\x1b[31m\x1b]0;owned\x07", "[/x][bold]", "../../etc/passwd", "/etc/passwd", "a/../b", "..", ".", "\u0661", "007",
    "\ud800", "é" * 300, "9" * 5000, [], {}, [[]], [None], {"": None}, {"a": {"a": {"a": {}}}},
    "<script>alert(1)</script>", "NaN", "b3:" + "0" * 64, "0" * 64,
    "none", "completed", "halted", "replica 0, attempt 1", "coordinator",
)  # fmt: skip
_DEEP = b"[" * 100_000
_LONG = b"9" * 5000
_PIECES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"\x00" * 64,
    b"NaN",
    b"{",
    b'"',
    b"\n",
    b"\n\n",
    _DEEP,
    b"1e999",
    b"9" * 5000,
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to three mutations: of its JSON where it is JSON, of its bytes otherwise, or of both."""
    for _ in range(rng.randint(1, 3)):
        data = _json_mutated(data, rng) if rng.random() < 0.7 else _bytes_mutated(data, rng)
    return data


def _json_mutated(data: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes_mutated(data, rng)
    places = list(_places(value))
    if not places:
        return json.dumps(rng.choice(HOSTILE)).encode()
    holder, key = rng.choice(places)
    what = rng.randrange(5)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[rng.choice(["extra", "", "\x1b[0m", "__class__", key + "x"])] = holder[key]
    elif what == 2:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif what == 3 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        factor, shift = rng.choice([-1, 0, 2, 1000, 1e30]), rng.choice([-1, 0, 1])
        if abs(holder[key]) < 1e300:  # a larger whole number may have no float
            holder[key] = holder[key] * factor + shift
    else:
        holder[key] = rng.choice(HOSTILE)
    return json.dumps(value, sort_keys=rng.random() < 0.9, separators=(",", ":")).encode() + b"\n"


def _places(value: Any) -> "list[tuple[Any, Any]]":
    """(holder, key) of every value below, in order."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items: Any = sorted(value.items())
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return found
    for key, below in items:
        found.append((value, key))
        found.extend(_places(below))
    return found


def _bytes_mutated(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    what = rng.randrange(6)
    if what == 0 and data:
        flipped = bytearray(data)
        flipped[at % len(data)] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if what == 1:
        return data[:at]
    if what == 2:
        return data[:at] + data[min(len(data), at + rng.randint(1, 64)) :]
    if what == 3:
        return data[:at] + rng.choice(_PIECES) + data[at:]
    if what == 4:
        return data[:at] + data[: rng.randrange(len(data) + 1)] + data[at:]
    return rng.choice(_PIECES)
