"""Codecs whose groups of elements share one scale: int8 and int4, a group's largest absolute value over 127 and 7.

A group is its scale, little-endian fp32, then its whole numbers in order: a byte each (int8), or four bits each, of two
neighbours the first in the lower half of a byte, 8 added (int4). An element is decoded as whole number times scale, one
fp32 product, which has the same bits on every machine. Per-block absmax needs no error feedback at these widths
(arXiv 2505.23725, section 4). torch is imported inside functions, because the cost forecast needs only sizes.
"""

import math
from typing import TYPE_CHECKING

from diloco_orchestrator.codecs import plain
from diloco_orchestrator.codecs.plain import little_endian

if TYPE_CHECKING:
    import torch

GROUP = 128  # elements that share a scale, which so costs a quarter of a bit each
_SCALE = 4  # bytes of a scale
_LARGEST_SQUARES = 1e76  # the sum of squares of numbers of which none is near the largest fp32 number
_SMALLEST = 2.0**-126  # normal fp32 number: products with smaller scales depend on a CPU's flush-to-zero mode


def size_int8(numel: int) -> int:
    """Encoded size in bytes of `numel` elements from the beginning of a group on, with one scale per group."""
    return numel + _SCALE * -(-numel // GROUP)


def size_int4(numel: int) -> int:
    """Encoded size in bytes of `numel` elements from the beginning of a group on; half a byte each, rounded up."""
    return (numel + 1) // 2 + _SCALE * -(-numel // GROUP)


def pack_int8(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    if values.is_cpu and (fast := plain.compiled()) is not None:
        packed: torch.Tensor = fast.pack(values, 127)
        return packed[: size_int8(values.numel())]
    scales, whole = _quantized(values, 127)
    rows = torch.empty(len(scales), _SCALE + GROUP, dtype=torch.uint8, device=values.device)
    rows[:, :_SCALE] = _bytes_of(scales)
    rows[:, _SCALE:] = whole.view(torch.uint8)
    return rows.view(-1)[: size_int8(values.numel())]


def unpack_int8(body: "torch.Tensor", numel: int) -> "torch.Tensor":
    import torch

    if body.is_cpu and (fast := plain.compiled()) is not None:
        values: torch.Tensor = fast.unpack(body, numel, 127)
        return values
    scales, rows = _rows(body, GROUP, numel)
    return rows.view(torch.int8).to(torch.float32).mul_(scales).view(-1)[:numel]


def pack_int4(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    if values.is_cpu and (fast := plain.compiled()) is not None:
        found: torch.Tensor = fast.pack(values, 7)
    else:
        scales, whole = _quantized(values, 7)
        rows = torch.empty(len(scales), _SCALE + GROUP // 2, dtype=torch.uint8, device=values.device)
        rows[:, :_SCALE] = _bytes_of(scales)
        # Two neighbours are one number of 16 bits, whose bytes are joined all at once: strided views are slow.
        pairs = little_endian(whole.add_(8).view(torch.uint8).view(-1), torch.int16)
        rows[:, _SCALE:] = (pairs | pairs >> 4).to(torch.uint8).view(len(scales), GROUP // 2)
        found = rows.view(-1)
    found = found[: size_int4(values.numel())]
    if values.numel() % 2:
        found[-1] &= 15  # an element that is not there: one vector has one encoding
    return found


def unpack_int4(body: "torch.Tensor", numel: int) -> "torch.Tensor":
    import torch

    if body.is_cpu and (fast := plain.compiled()) is not None:
        values: torch.Tensor = fast.unpack(body, numel, 7)
        return values
    scales, rows = _rows(body, GROUP // 2, numel)
    pairs = rows.to(torch.int16)
    pairs = (pairs | pairs << 4) & 0x0F0F
    nibbles = little_endian(pairs.view(torch.uint8).view(-1), torch.int16).view(torch.int8).view(len(rows), GROUP)
    return nibbles.sub_(8).to(torch.float32).mul_(scales).view(-1)[:numel]


def add_int8(body: "torch.Tensor", weight: float, target: "torch.Tensor") -> None:
    _add(body, 127, weight, target)


def add_int4(body: "torch.Tensor", weight: float, target: "torch.Tensor") -> None:
    _add(body, 7, weight, target)


def _add(body: "torch.Tensor", levels: int, weight: float, target: "torch.Tensor") -> None:
    fast = plain.compiled()
    assert fast is not None, "`Encoded.adds` was asked"
    fast.add(body, levels, weight, target)


def squares_int8(body: "torch.Tensor", numel: int) -> float | None:
    return _squares(body, numel, 127)


def squares_int4(body: "torch.Tensor", numel: int) -> float | None:
    return _squares(body, numel, 7)


def _squares(body: "torch.Tensor", numel: int, levels: int) -> float | None:
    """The sum of squares of all elements, from the encoded form; None without numba, or if one may not be finite."""
    fast = plain.compiled()
    found = math.inf if fast is None else fast.squares(body, numel, levels)
    return found if found < _LARGEST_SQUARES else None


def _quantized(values: "torch.Tensor", levels: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Scales of the groups, (g,) fp32, and the quantised elements, (g, GROUP) int8 in -levels..levels, padded with 0.

    A group with NaN or infinity has a non-finite scale, so that all its elements are decoded as NaN.
    """
    import torch

    missing = -values.numel() % GROUP
    filled = torch.nn.functional.pad(values, (0, missing)) if missing else values
    groups = filled.view(filled.numel() // GROUP, GROUP)
    # Divided by a tensor: by a number, a GPU multiplies with its reciprocal, which rounds differently.
    scales = groups.abs().amax(1) / torch.tensor(float(levels), dtype=torch.float32, device=values.device)
    scales = torch.where(scales < _SMALLEST, 0.0, scales)
    factors = torch.where((scales > 0) & scales.isfinite(), scales.reciprocal(), 0.0)
    whole = (groups * factors.unsqueeze(1)).round_()
    return scales, (whole if scales.isfinite().all() else whole.nan_to_num_(0.0)).to(torch.int8)


def _bytes_of(scales: "torch.Tensor") -> "torch.Tensor":
    """The little-endian bytes of fp32 numbers: (g,) to (g, 4) uint8."""
    import torch

    return little_endian(scales.view(torch.uint8), torch.float32).view(torch.uint8).view(-1, _SCALE)


def _rows(body: "torch.Tensor", width: int, numel: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Scales, (g, 1) fp32, and packed elements, (g, width) uint8, of all groups; the last group is padded with 0."""
    import torch

    count = -(-numel // GROUP)
    missing = count * (_SCALE + width) - body.numel()
    rows = (torch.nn.functional.pad(body, (0, missing)) if missing else body).view(count, _SCALE + width)
    return little_endian(rows[:, :_SCALE].reshape(-1), torch.float32).unsqueeze(1), rows[:, _SCALE:]
