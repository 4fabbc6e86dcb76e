"""Identity of items: their normal form and its hash, and the Merkle root of a set of hashes.

Held-out and training items are compared by these hashes, which ignore white space. `guard.shares`, which assigns
held-out items to replicas, distinguishes items by white space.
"""

import hashlib
import json
import math
import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any, Literal, NoReturn

from diloco_orchestrator.guard.shares import canonical

ItemHash = bytes  # 32

Form = Literal[1, 2]  # 1: NFC and white space, of manifests that earlier versions wrote; 2: `normal_form`
NEWEST_FORM: Form = 2

_DEEPEST = 100  # levels of JSON in a text
_QUOTES = "\"'`"
_ENDS = ".,;:!?。、" + _QUOTES  # what may follow a text without making it another


def item_hash(item: Any, form: Form = NEWEST_FORM) -> ItemHash:
    """The sha256 of an item's content in normal form, the same on every machine.

    Form 2 compares text by `normal_form`; JSON, whether it is parsed or text that holds an object or a list, by sorted
    keys, with its texts in normal form and 1.0 as 1. Form 1 brings text, also within JSON values, to Unicode form NFC
    and its runs of white space to one space. Bytes, tensors and arrays are compared exactly. Raises `TypeError` for
    anything else.
    """
    if form == 1:
        item = _composed(item)
    else:
        parsed = json_in(item) if isinstance(item, str) else None
        item = _normal(item if parsed is None else parsed)
    if isinstance(item, str):  # `canonical` would bring it to NFC once more
        return hashlib.sha256(b"text\0" + item.encode(errors="surrogatepass")).digest()
    kind, data = canonical(item)
    return hashlib.sha256(kind.encode() + b"\0" + data).digest()


def kind_of(item: Any) -> str:
    """The kind of the item: "text", "bytes", "array" or "json". Only items of one kind are compared."""
    if isinstance(item, str):
        return "text"
    if isinstance(item, bytes | bytearray | memoryview):
        return "bytes"
    return "array" if hasattr(item, "detach") or hasattr(item, "tobytes") else "json"


def normal_form(text: str) -> str:
    """The text without differences of spelling alone, so that texts which differ in nothing else become equal.

    Unicode form NFKC with letters case-folded (fullwidth letters, ligatures and accents written in two characters are
    one way of writing), without invisible characters (format characters such as the soft hyphen, variation selectors),
    decimal digits of all scripts as 0 to 9, quotation marks and dashes as ', " and -, runs of white space as one space,
    and without quotation marks around the text or punctuation at its end.
    """
    if text.isascii():
        folded = text.lower()
    else:
        folded = unicodedata.normalize("NFKC", text).casefold()
        for character in set(folded):
            if (written := _written(character)) != character:
                folded = folded.replace(character, written)
        # Again: case folding may decompose, and the characters on both sides of an invisible one may compose.
        folded = unicodedata.normalize("NFKC", folded)
    line = " ".join(folded.split())
    return line.rstrip(_ENDS + " ").lstrip(_QUOTES + " ") or line


def json_in(text: str) -> Any:
    """The parsed text, if the whole of it (without white space around it) is one JSON object or list; else None.

    None also for JSON with NaN or Infinity, or a number beyond float64 (1e999), or nested in more than 100 levels.
    """
    bare = text.strip()
    if (bare[:1], bare[-1:]) not in {("{", "}"), ("[", "]")}:
        return None
    try:
        found = json.loads(bare, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    level = [found]
    for _ in range(_DEEPEST):  # what is deeper would exceed Python's recursion limit where values are normalised
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inside:
            return found
        level = list(chain.from_iterable(inside))
    return None


def merkle_root(hashes: Iterable[ItemHash]) -> str:
    """The Merkle tree hash of RFC 6962 (section 2.1) over the sorted distinct hashes, as 64 hex digits."""
    level = [hashlib.sha256(b"\0" + each).digest() for each in sorted(set(hashes))]
    if not level:
        return hashlib.sha256(b"").hexdigest()
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        # An odd node moves up as it is: for n leaves this is RFC 6962's tree, whose left part is a power of two.
        level = [hashlib.sha256(b"\1" + pair[0] + pair[1]).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].hex()


def _composed(item: Any) -> Any:
    """The item in form 1 of `item_hash`: text in Unicode form NFC with single spaces."""
    if isinstance(item, str):
        return " ".join((item if item.isascii() else unicodedata.normalize("NFC", item)).split())
    if isinstance(item, dict):
        return {_composed(name): _composed(value) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [_composed(each) for each in item]
    return item


def _normal(item: Any) -> Any:
    """The item in form 2 of `item_hash`: texts in normal form, JSON with sorted keys."""
    if isinstance(item, str):
        return normal_form(item)
    if isinstance(item, dict):
        return {_normal(name): _normal(value) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [_normal(each) for each in item]
    return int(item) if isinstance(item, float) and item.is_integer() else item


@cache
def _written(character: str) -> str:
    """The character that replaces this one in a text's normal form; empty for an invisible one."""
    category = unicodedata.category(character)
    if category == "Cf" or ord(character) in _IGNORED:
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category in ("Pi", "Pf") or character in "‚„":
        return "'" if character in "‘’‚‛‹›" else '"'
    return "-" if category == "Pd" or character == "−" else character  # the last is the minus sign


# Unicode's Default_Ignorable_Code_Point, without format characters and unassigned ones.
_IGNORED = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)}
_IGNORED |= {*range(0xE0100, 0xE01F0)}


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number} is too large")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
