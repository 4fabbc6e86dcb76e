"""The codecs int8 and int4 compiled by numba, where it is installed (extra `[fast]`): the bytes of `scaled`, sooner.

One pass over the elements instead of some fifteen tensor operations. Imported only where numba is found, on
little-endian machines.
"""

from typing import Any

import numba
import numpy as np
import torch

_GROUP = 128  # as `scaled.GROUP`
_HALVED = 12582912.0  # 1.5 * 2^23: a float32 of at most 2^22 plus this and less this is rounded to the nearest integer
_FINITE = 0x7F7FFFFF  # bits of the largest finite float32
_SMALLEST = 2.0**-126


def pack(values: "torch.Tensor", levels: int) -> "torch.Tensor":
    """Encode (n,) float32 on the CPU: uint8, of whole groups, the last of which is padded with zeros."""
    groups = -(-values.numel() // _GROUP)
    words = 1 + _GROUP // (4 if levels == 127 else 8)
    found = np.zeros(groups * words, np.uint32)
    kernel = _pack_int8 if levels == 127 else _pack_int4
    kernel(values.contiguous().numpy(), np.float32(levels), words, found)
    return torch.from_numpy(found.view(np.uint8))


def unpack(body: "torch.Tensor", numel: int, levels: int) -> "torch.Tensor":
    """Decode (n,) float32 from uint8 on the CPU, as `pack` wrote them or without the end of the last group."""
    found = torch.empty(numel, dtype=torch.float32, device="cpu")
    (_unpack_int8 if levels == 127 else _unpack_int4)(body.numpy(), found.numpy())
    return found


def _compiled(function: Any) -> Any:
    """The function in machine code, kept on disk for the next process where that is possible."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can be written to
        return numba.njit(nogil=True)(function)


@_compiled
def _scale(x: Any, bits: Any, start: int, stop: int, levels: Any) -> tuple[Any, Any]:
    """(scale, factor) of elements [start, stop): as numbers of float32; factor 0 makes all of them 0."""
    largest = np.uint32(0)
    for i in range(start, stop):  # bits of |x| as whole numbers have the order of |x|, with NaN above all
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    one = np.empty(1, np.uint32)
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
    half = np.float32(_HALVED)
    for group in range(len(out) // words):
        start, stop = group * _GROUP, min(group * _GROUP + _GROUP, len(x))
        scale, factor = _scale(x, bits, start, stop, levels)
        scales[group * words] = scale
        if factor == np.float32(0.0):
            continue
        row = rows[4 * group * words + 4 :]
        for i in range(stop - start):
            row[i] = np.int8(np.int32((x[start + i] * factor + half) - half))


@_compiled
def _pack_int4(x: Any, levels: Any, words: int, out: Any) -> None:
    bits, rows, scales = x.view(np.uint32), out.view(np.uint8), out.view(np.float32)
    half, whole = np.float32(_HALVED), np.empty(_GROUP, np.uint8)
    for group in range(len(out) // words):
        start, stop = group * _GROUP, min(group * _GROUP + _GROUP, len(x))
        scale, factor = _scale(x, bits, start, stop, levels)
        scales[group * words] = scale
        whole[:] = np.uint8(8)
        if factor != np.float32(0.0):
            for i in range(stop - start):
                whole[i] = np.uint8(np.int32((x[start + i] * factor + half) - half) + np.int32(8))
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
    one = np.empty(1, np.uint32)
    for group in range((len(out) + _GROUP - 1) // _GROUP):
        start, place = group * _GROUP, group * (4 + _GROUP)
        scale, row = _read_scale(body, place, one), body[place + 4 :]
        for i in range(min(_GROUP, len(out) - start)):
            out[start + i] = np.float32(np.int8(row[i])) * scale


@_compiled
def _unpack_int4(body: Any, out: Any) -> None:
    one = np.empty(1, np.uint32)
    for group in range((len(out) + _GROUP - 1) // _GROUP):
        start, place = group * _GROUP, group * (4 + _GROUP // 2)
        scale, row, count = _read_scale(body, place, one), body[place + 4 :], min(_GROUP, len(out) - start)
        part = out[start : start + count]
        for i in range(count // 2):
            pair = np.int32(row[i])
            part[2 * i] = np.float32((pair & np.int32(15)) - np.int32(8)) * scale
            part[2 * i + 1] = np.float32((pair >> np.int32(4)) - np.int32(8)) * scale
        if count % 2:
            part[count - 1] = np.float32((np.int32(row[count // 2]) & np.int32(15)) - np.int32(8)) * scale
