"""Further valid Ed25519 signatures (RFC 8032) of one text: whoever holds the private key may choose any nonce."""

import hashlib

P, ORDER = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, P) % P
_BASE = (
    15112221349535400772501151409588531511454012693041857206046113283949847762202,
    46316835694926478169428394003475163141307993866256225615783033603165251855960,
)
Point = tuple[int, int]


def _added(a: Point, b: Point) -> Point:
    product = _D * a[0] * b[0] * a[1] * b[1]
    return (
        (a[0] * b[1] + b[0] * a[1]) * pow(1 + product, -1, P) % P,
        (a[1] * b[1] + a[0] * b[0]) * pow(1 - product, -1, P) % P,
    )


def _times(number: int, point: Point) -> bytes:
    """The encoding of `number` times a point."""
    found = 0, 1
    while number:
        if number & 1:
            found = _added(found, point)
        point, number = _added(point, point), number >> 1
    return (found[1] | (found[0] & 1) << 255).to_bytes(32, "little")


def other_signature(seed: bytes, text: bytes, nonce: int) -> bytes:
    """A valid signature of `text` by the private key `seed`, another one for each nonce than every library makes."""
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | 1 << 254
    public, commitment = _times(scalar, _BASE), _times(nonce, _BASE)
    challenge = int.from_bytes(hashlib.sha512(commitment + public + text).digest(), "little")
    return commitment + ((nonce + challenge * scalar) % ORDER).to_bytes(32, "little")
