"""Payload shards decoded by the words of docs/reference/protocol.md, with numpy alone, nothing of the product."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
CHUNK, GROUP, SCALED = 4096, 256, 128
KEPT = {6: 64, 7: 128}


@dataclass(frozen=True)
class Group:
    """Elements of a shard that were encoded together, and their classes (0 to 3); -1: of an element that was not kept.

    `large`: times the mean size of the kept elements, from which on one is large; 0: without classes.
    """

    values: Floats
    classes: NDArray[np.int64]
    large: float = 0.0


def groups(shard: bytes) -> Iterator[Group]:
    """The groups of a shard, in order."""
    magic, version, codec, count = struct.unpack("<4sHHQ", shard[:16])
    assert (magic, version) == (b"DLCO", 1)
    lengths, body = [count], shard[16:]
    if codec >= 5:
        (spans,) = struct.unpack("<Q", body[:8])
        lengths, body = list(struct.unpack(f"<{spans}Q", body[8 : 8 + 8 * spans])), body[8 + 8 * spans :]
    assert sum(lengths) == count
    for index, length in enumerate(lengths):
        its = 3 if index % 2 else codec
        widest = {3: SCALED, 4: SCALED, 5: GROUP, 6: CHUNK, 7: CHUNK}.get(its, max(1, length))
        for start in range(0, length, widest):
            size, found = _group(its, body, min(widest, length - start))
            body = body[size:]
            yield found
    assert not body


def decoded(shard: bytes) -> Floats:
    """All values of a shard."""
    return np.concatenate([np.zeros(0, np.float32), *(group.values for group in groups(shard))])


def _group(codec: int, body: bytes, count: int) -> tuple[int, Group]:
    """Size in bytes and content of the group that `body` begins with."""
    plain = np.full(count, -1)
    if codec == 1:
        return 4 * count, Group(np.frombuffer(body[: 4 * count], "<f4"), plain)
    if codec == 2:
        return 2 * count, Group(_bf16(body[: 2 * count]), plain)
    if codec in (3, 4):
        (scale,) = struct.unpack("<f", body[:4])
        size = count if codec == 3 else (count + 1) // 2
        whole = np.frombuffer(body[4 : 4 + size], np.int8) if codec == 3 else _packed(body[4 : 4 + size], 4, count) - 8
        return 4 + size, Group(whole.astype(np.float32) * np.float32(scale), plain)
    means = _bf16(body[:8])
    if codec == 5:
        size = 8 + (count + 3) // 4
        classes = _packed(body[8:size], 2, count)
        return size, Group(means[classes], classes, 1.25)
    kept = -(-KEPT[codec] * count // CHUNK)
    middle = 8 + (12 * kept + 7) // 8
    size = middle + (kept + 3) // 4
    places, of_kept = _packed(body[8:middle], 12, kept), _packed(body[middle:size], 2, kept)
    values, classes = np.zeros(count, np.float32), plain
    values[places], classes[places] = means[of_kept], of_kept
    return size, Group(values, classes, 1.0)


def _bf16(data: bytes) -> Floats:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _packed(data: bytes, bits: int, count: int) -> NDArray[np.int64]:
    """Whole numbers of `bits` bits one after another, from the lowest bit of the first byte on."""
    whole = int.from_bytes(data, "little")
    return np.array([whole >> bits * place & (1 << bits) - 1 for place in range(count)], dtype=np.int64)


def passed(values: Floats, codec: str | None) -> Floats:
    """The values that `values`, a shard, decode to after they were encoded in a codec; None changes nothing."""
    if codec is None:
        return values
    if codec == "bf16":
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint32) << 16).view(np.float32)
    levels = np.float32({"int8": 127, "int4": 7}[codec])
    found = np.empty_like(values)
    for start in range(0, len(values), SCALED):
        group = values[start : start + SCALED]
        scale = np.abs(group).max() / levels
        factor = np.float32(1) / scale if scale >= np.float32(2.0**-126) else np.float32(0)
        found[start : start + SCALED] = np.rint(group * factor) * (scale if factor else np.float32(0))
    return found


def sent(shard: bytes) -> Floats:
    """1 for each value that a shard holds, 0 for those that a sparse codec has left out."""
    held = (group.values != 0 if group.large == 1.0 else np.ones(len(group.values), bool) for group in groups(shard))
    return np.concatenate([np.zeros(0, np.float32), *held]).astype(np.float32)
