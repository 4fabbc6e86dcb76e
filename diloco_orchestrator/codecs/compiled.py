"""Codecs with few bits per element, compiled by numba where it is installed. They give the same bytes in less time.

One loop passes a few times over the elements of a group, which stay in a core's first cache; without numba fifteen to
sixty tensor operations pass over a block. Imported where numba is found, on little-endian machines; `scaled`, `means`
and `sparse` describe the encodings.
"""

import importlib
from typing import Any

import numpy as np
import torch

numba: Any = importlib.import_module("numba")  # whose types are not known where it is not installed

_GROUP = 128  # as `scaled.GROUP`
_HALVED = 12582912.0  # 1.5 * 2^23: a float32 of at most 2^22 plus this and less this is rounded to the nearest integer
_FINITE = 0x7F7FFFFF  # bits of the largest finite float32
_SMALLEST = 2.0**-126


def pack(values: "torch.Tensor", levels: int) -> "torch.Tensor":
    """The encoding, uint8, of `values`, (n,) float32 on the CPU. The last group is padded with zeros.

    `levels`: largest whole number of an element, 127 for int8 and 7 for int4.
    """
    groups = -(-values.numel() // _GROUP)
    words = 1 + _GROUP // (4 if levels == 127 else 8)
    found = np.zeros(groups * words, np.uint32)
    kernel = _pack_int8 if levels == 127 else _pack_int4
    kernel(values.contiguous().numpy(), np.float32(levels), words, found)
    return torch.from_numpy(found.view(np.uint8))


def unpack(body: "torch.Tensor", numel: int, levels: int) -> "torch.Tensor":
    """The decoded values, (numel,) float32, of `body`, uint8 on the CPU: `pack`'s result, or that without padding.

    `levels`: largest whole number of an element, 127 for int8 and 7 for int4.
    """
    found = torch.empty(numel, dtype=torch.float32, device="cpu")
    (_unpack_int8 if levels == 127 else _unpack_int4)(body.numpy(), found.numpy())
    return found


def add(body: "torch.Tensor", levels: int, weight: float, target: "torch.Tensor") -> None:
    """Add the decoded values of `body`, each times `weight`, to `target`, (n,) float32.

    The bits are those of a product and a sum one after the other, each rounded to float32. `levels`: largest whole
    number of an element, 127 for int8 and 7 for int4.
    """
    (_add_int8 if levels == 127 else _add_int4)(body.numpy(), np.float32(weight), target.numpy())


def squares(body: "torch.Tensor", numel: int, levels: int) -> float:
    """The sum of squares of the decoded values of `body`, of `numel` elements; not finite if one of them may not be.

    `levels`: largest whole number of an element, 127 for int8 and 7 for int4.
    """
    return float((_squares_int8 if levels == 127 else _squares_int4)(body.numpy(), numel))


def _compiled(function: Any) -> Any:
    """The function in machine code, kept on disk for the next process where that is possible."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can be written to
        return numba.njit(nogil=True)(function)


@_compiled
def _scale(largest: Any, levels: Any, one: Any) -> tuple[Any, Any]:
    """(scale, factor) of a group, float32, from the bits of its largest |x|; factor 0 makes all its elements 0."""
    one[0] = largest
    scale = one.view(np.float32)[0] / levels
    if largest > np.uint32(_FINITE):
        return scale, np.float32(0.0)
    if scale < np.float32(_SMALLEST):
        return np.float32(0.0), np.float32(0.0)
    return scale, np.float32(1.0) / scale


@_compiled
def _pack_int8(x: Any, levels: Any, words: int, out: Any) -> None:
    bits, rows, scales = x.view(np.uint32), out.view(np.int8), out.view(np.float32)
    half, one = np.float32(_HALVED), np.empty(1, np.uint32)
    for group in range(len(out) // words):
        part = x[group * _GROUP : group * _GROUP + _GROUP]
        sizes, largest = bits[group * _GROUP : group * _GROUP + _GROUP], np.uint32(0)
        for i in range(len(sizes)):  # bits of |x| as whole numbers have the order of |x|, with NaN above all
            size = np.uint32(sizes[i] & np.uint32(0x7FFFFFFF))
            largest = size if size > largest else largest
        scale, factor = _scale(largest, levels, one)
        scales[group * words] = scale
        if factor == np.float32(0.0):
            continue
        row = rows[4 * group * words + 4 :]
        for i in range(len(part)):
            row[i] = np.int8(np.int32((part[i] * factor + half) - half))


@_compiled
def _pack_int4(x: Any, levels: Any, words: int, out: Any) -> None:
    bits, rows, scales = x.view(np.uint32), out.view(np.uint8), out.view(np.float32)
    half, whole, one = np.float32(_HALVED), np.empty(_GROUP, np.uint8), np.empty(1, np.uint32)
    for group in range(len(out) // words):
        part = x[group * _GROUP : group * _GROUP + _GROUP]
        sizes, largest = bits[group * _GROUP : group * _GROUP + _GROUP], np.uint32(0)
        for i in range(len(sizes)):  # bits of |x| as whole numbers have the order of |x|, with NaN above all
            size = np.uint32(sizes[i] & np.uint32(0x7FFFFFFF))
            largest = size if size > largest else largest
        scale, factor = _scale(largest, levels, one)
        scales[group * words] = scale
        whole[:] = np.uint8(8)
        if factor != np.float32(0.0):
            for i in range(len(part)):
                whole[i] = np.uint8(np.int32((part[i] * factor + half) - half) + np.int32(8))
        row = rows[4 * group * words + 4 :]
        for i in range(_GROUP // 2):
            row[i] = whole[2 * i] | whole[2 * i + 1] << np.uint8(4)


@_compiled
def _read_scale(body: Any, place: int, one: Any) -> Any:
    one[0] = (
        np.uint32(body[place])
        | np.uint32(body[place + 1]) << np.uint32(8)
        | np.uint32(body[place + 2]) << np.uint32(16)
        | np.uint32(body[place + 3]) << np.uint32(24)
    )
    return one.view(np.float32)[0]


@_compiled
def _unpack_int8(body: Any, out: Any) -> None:
    one, bytes_ = np.empty(1, np.uint32), body.view(np.int8)
    for group in range((len(out) + _GROUP - 1) // _GROUP):
        place, part = group * (4 + _GROUP), out[group * _GROUP : group * _GROUP + _GROUP]
        scale, row = _read_scale(body, place, one), bytes_[place + 4 : place + 4 + _GROUP]
        for i in range(len(part)):
            part[i] = np.float32(row[i]) * scale


# The halves of a byte are taken in each of the kernels for int4: as a function of their own they take thrice as long.
@_compiled
def _unpack_int4(body: Any, out: Any) -> None:
    one, whole = np.empty(1, np.uint32), np.empty(_GROUP, np.int8)
    for group in range((len(out) + _GROUP - 1) // _GROUP):
        place, part = group * (4 + _GROUP // 2), out[group * _GROUP : group * _GROUP + _GROUP]
        scale = _read_scale(body, place, one)
        row = body[place + 4 : place + 4 + _GROUP // 2]
        for i in range(len(row)):
            whole[2 * i] = np.int8(row[i] & np.uint8(15)) - np.int8(8)
            whole[2 * i + 1] = np.int8(row[i] >> np.uint8(4)) - np.int8(8)
        for i in range(len(part)):
            part[i] = np.float32(whole[i]) * scale


@_compiled
def _add_int8(body: Any, weight: Any, out: Any) -> None:
    one, bytes_ = np.empty(1, np.uint32), body.view(np.int8)
    for group in range((len(out) + _GROUP - 1) // _GROUP):
        place, part = group * (4 + _GROUP), out[group * _GROUP : group * _GROUP + _GROUP]
        scale, row = _read_scale(body, place, one), bytes_[place + 4 : place + 4 + _GROUP]
        for i in range(len(part)):
            part[i] += np.float32(row[i]) * scale * weight


@_compiled
def _add_int4(body: Any, weight: Any, out: Any) -> None:
    one, whole = np.empty(1, np.uint32), np.empty(_GROUP, np.int8)
    for group in range((len(out) + _GROUP - 1) // _GROUP):
        place, part = group * (4 + _GROUP // 2), out[group * _GROUP : group * _GROUP + _GROUP]
        scale = _read_scale(body, place, one)
        row = body[place + 4 : place + 4 + _GROUP // 2]
        for i in range(len(row)):
            whole[2 * i] = np.int8(row[i] & np.uint8(15)) - np.int8(8)
            whole[2 * i + 1] = np.int8(row[i] >> np.uint8(4)) - np.int8(8)
        for i in range(len(part)):
            part[i] += np.float32(whole[i]) * scale * weight


@_compiled
def _squares_int8(body: Any, numel: int) -> Any:
    one, bytes_, total = np.empty(1, np.uint32), body.view(np.int8), np.float64(0.0)
    for group in range((numel + _GROUP - 1) // _GROUP):
        place, count, squares = group * (4 + _GROUP), min(_GROUP, numel - group * _GROUP), np.int64(0)
        scale, row = np.float64(_read_scale(body, place, one)), bytes_[place + 4 : place + 4 + count]
        for i in range(len(row)):
            squares += np.int32(row[i]) * np.int32(row[i])
        total += scale * scale * squares
    return total


@_compiled
def _squares_int4(body: Any, numel: int) -> Any:
    one, whole, total = np.empty(1, np.uint32), np.empty(_GROUP, np.int8), np.float64(0.0)
    for group in range((numel + _GROUP - 1) // _GROUP):
        place, count, squares = group * (4 + _GROUP // 2), min(_GROUP, numel - group * _GROUP), np.int64(0)
        scale = np.float64(_read_scale(body, place, one))
        row = body[place + 4 : place + 4 + _GROUP // 2]
        for i in range(len(row)):
            whole[2 * i] = np.int8(row[i] & np.uint8(15)) - np.int8(8)
            whole[2 * i + 1] = np.int8(row[i] >> np.uint8(4)) - np.int8(8)
        for i in range(count):
            squares += np.int32(whole[i]) * np.int32(whole[i])
        total += scale * scale * squares
    return total


# -- four means a group, and the largest of a chunk: `means` and `sparse` ----------------------------------------------


def pack_means(values: "torch.Tensor", group: int, large: float) -> "torch.Tensor | None":
    """The result of `means.pack_2bit` with its padding; None if a number is not finite: tensor operations then encode
    it.

    `group`: elements of a group. `large`: times the mean of |x|, above which an element is large.
    """
    groups = -(-values.numel() // group)
    found = np.empty((groups, 8 + group // 4), np.uint8)
    done = _pack_groups(values.contiguous().numpy(), group, np.float32(large), found)
    return torch.from_numpy(found.reshape(-1)) if done else None


def unpack_means(body: "torch.Tensor", numel: int, group: int) -> "torch.Tensor":
    """The result of `means.unpack_2bit`: the `numel` decoded values, float32.

    `group`: elements of a group of `body`, uint8.
    """
    found = torch.empty(numel, dtype=torch.float32, device="cpu")
    _unpack_groups(body.numpy(), group, found.numpy())
    return found


def pack_largest(chunks: "torch.Tensor", kept: int, large: float) -> "torch.Tensor | None":
    """The `kept` largest elements of each row of `chunks`, (g, n) float32, encoded (top-k); None if one is not finite.

    `large`: times the mean of |x|, above which an element counts as large.
    """
    found = np.zeros((len(chunks), 8 + (3 * kept + 1) // 2 + (kept + 3) // 4), np.uint8)
    done = _pack_chunks(chunks.contiguous().numpy(), kept, np.float32(large), found)
    return torch.from_numpy(found.reshape(-1)) if done else None


def unpack_largest(rows: "torch.Tensor", kept: int, values: "torch.Tensor") -> bool:
    """Decode a payload of the codec that keeps only the `kept` largest elements of each chunk (top-k).

    `rows`: (g, bytes of an encoded chunk). `values`: (g, n) zeros, into which the kept elements are written. Returns
    False if the stored places are out of range or not ascending.
    """
    return bool(_unpack_chunks(rows.numpy(), kept, values.numpy()))


@_compiled
def _classify(x: Any, count: int, large: Any, classes: Any, means: Any) -> bool:
    """Classes of x[:count], and the eight bytes of their means, as `means.classified`. False if one is not finite."""
    bits, one = x.view(np.uint32), np.empty(1, np.uint32)
    largest = np.uint32(0)
    for i in range(count):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    if largest > np.uint32(_FINITE):
        return False
    biased, factor, power = np.uint32(127), np.float32(0.0), np.float32(0.0)
    if largest >= np.uint32(27) << np.uint32(23):  # 2^-100
        biased = largest >> np.uint32(23)
        one[0] = (np.uint32(253 + 14) - biased) << np.uint32(23)
        factor = one.view(np.float32)[0]
    one[0] = (biased - np.uint32(13)) << np.uint32(23)
    power = one.view(np.float32)[0]
    half = np.float32(_HALVED)
    total = np.int64(0)
    for i in range(count):
        total += abs(np.int32((x[i] * factor + half) - half))
    limit = np.float32(np.float32(total) * large) / np.float32(count)
    sums, counts = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for i in range(count):
        whole = np.int32((x[i] * factor + half) - half)
        size = abs(whole)
        kind = (2 if whole < 0 else 0) + (1 if np.float32(size) > limit else 0)
        classes[i] = kind
        sums[kind] += size
        counts[kind] += 1
    for kind in range(4):
        mean = np.float32(sums[kind]) / np.float32(max(counts[kind], 1)) * power
        one.view(np.float32)[0] = (mean if kind < 2 else -mean) + np.float32(0.0)
        rounded = (one[0] + np.uint32(0x7FFF) + ((one[0] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        means[2 * kind] = rounded & np.uint32(255)
        means[2 * kind + 1] = rounded >> np.uint32(8)
    return True


@_compiled
def _read_means(row: Any, means: Any) -> None:
    """The four means of the eight bytes that a row begins with."""
    words = means.view(np.uint32)
    for kind in range(4):
        words[kind] = (np.uint32(row[2 * kind]) | np.uint32(row[2 * kind + 1]) << np.uint32(8)) << np.uint32(16)


@_compiled
def _pack_groups(x: Any, group: int, large: Any, out: Any) -> bool:
    classes = np.zeros(group, np.uint8)
    for index in range(len(out)):
        start = index * group
        count = min(group, len(x) - start)
        classes[count:] = 0
        if not _classify(x[start : start + count], count, large, classes, out[index]):
            return False
        for i in range(group // 4):
            out[index, 8 + i] = (
                classes[4 * i] | classes[4 * i + 1] << 2 | classes[4 * i + 2] << 4 | classes[4 * i + 3] << 6
            )
    return True


@_compiled
def _unpack_groups(body: Any, group: int, out: Any) -> None:
    means, width = np.empty(4, np.float32), 8 + group // 4
    for index in range((len(out) + group - 1) // group):
        row, start = body[index * width :], index * group
        _read_means(row, means)
        for i in range(min(group, len(out) - start)):
            out[start + i] = means[row[8 + i // 4] >> (2 * (i % 4)) & 3]


@_compiled
def _smallest_kept(bits: Any, kept: int, counts: Any) -> Any:
    """The `kept`-th largest of the lower 31 bits of numbers, digit by digit of 12, 12 and 7 bits from above."""
    prefix, left = np.uint32(0), kept
    for shift, width, mask in ((19, 12, np.uint32(0)), (7, 12, np.uint32(0x7FF80000)), (0, 7, np.uint32(0x7FFFFF80))):
        size = 1 << width
        counts[:size] = 0
        for i in range(len(bits)):
            word = bits[i] & np.uint32(0x7FFFFFFF)
            if word & mask == prefix:
                counts[(word >> np.uint32(shift)) & np.uint32(size - 1)] += 1
        digit = size - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
    return prefix, left  # and how many of the numbers that are equal to it are kept


@_compiled
def _pack_chunks(chunks: Any, kept: int, large: Any, out: Any) -> bool:
    counts, places = np.empty(4096, np.int32), np.empty(kept, np.int32)
    values, classes = np.empty(kept, np.float32), np.zeros(kept + 3, np.uint8)
    middle = 8 + (3 * kept + 1) // 2
    for index in range(len(chunks)):
        row, bytes_, bits = chunks[index], out[index], chunks[index].view(np.uint32)
        least, equal = _smallest_kept(bits, kept, counts)
        found = 0
        for i in range(len(row)):
            word = bits[i] & np.uint32(0x7FFFFFFF)
            if word > least or (word == least and equal > 0):
                equal -= 1 if word == least else 0
                places[found] = i
                values[found] = row[i]
                found += 1
        if not _classify(values, kept, large, classes, bytes_):
            return False
        for i in range(kept):
            place, start = places[i], 8 + 3 * (i // 2)
            if i % 2 == 0:
                bytes_[start] = place & 255
                bytes_[start + 1] |= place >> 8
            else:
                bytes_[start + 1] |= (place & 15) << 4
                bytes_[start + 2] = place >> 4
        for i in range((kept + 3) // 4):
            bytes_[middle + i] = (
                classes[4 * i] | classes[4 * i + 1] << 2 | classes[4 * i + 2] << 4 | classes[4 * i + 3] << 6
            )
    return True


@_compiled
def _unpack_chunks(rows: Any, kept: int, out: Any) -> bool:
    means, middle = np.empty(4, np.float32), 8 + (3 * kept + 1) // 2
    for index in range(len(rows)):
        row, before = rows[index], np.int32(-1)
        _read_means(row, means)
        for i in range(kept):
            start = 8 + 3 * (i // 2)
            first, second = np.int32(row[start]), np.int32(row[start + 1])
            place = first | (second & 15) << 8 if i % 2 == 0 else second >> 4 | np.int32(row[start + 2]) << 4
            if place <= before or place >= out.shape[1]:
                return False
            out[index, place] = means[row[middle + i // 4] >> (2 * (i % 4)) & 3]
            before = place
    return True
