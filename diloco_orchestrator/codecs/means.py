"""The codec "2bit": two bits an element, which say which of its group's four means stands for the element.

The four classes of a group's elements x are by sign (x < 0 or not) and size (|x| above 1.25 times the mean of |x| in
the group or not); each class decodes to the mean of its elements (arXiv 2505.23725v2, with classes of equal width: 1.25
times the mean of |x| is the standard deviation of normal numbers, where four classes lose least). Before this, elements
become whole numbers: x times 2^(14 - e), rounded to nearest, where 2^e is the power of two above the group's largest
|x|. Sums of them are exact, in any order and on any CPU. A group is its four means, bf16, in the order of the classes
(not negative and small, not negative and large, negative and small, negative and large; 0 for an empty class), then the
classes of its elements, four a byte, the first in the lowest bits. torch is imported inside functions, because the cost
forecast needs only sizes.
"""

from typing import TYPE_CHECKING

from diloco_orchestrator.codecs import plain
from diloco_orchestrator.codecs.plain import little_endian

if TYPE_CHECKING:
    import torch

GROUP = 256  # elements that share four means, which so cost a quarter of a bit each
MEANS = 8  # bytes of four means
LARGE = 1.25  # times the mean of |x|
_BITS = 14  # of a whole number: 256 of them sum to less than 2^24, which float32 holds exactly
_SMALLEST = 2.0**-100  # groups of smaller numbers become zeros: the factor that makes them whole stays finite
# With b the exponent's bits of a group's largest |x|, those of 2^(14 - e) are _UP - b, of 2^(e - 14) b - _DOWN.
_UP, _DOWN = 253 + _BITS, _BITS - 1


def size_2bit(numel: int) -> int:
    """Encoded size in bytes of `numel` elements from a group's beginning on: a quarter of a byte each, and four means
    per group.
    """
    return (numel + 3) // 4 + MEANS * -(-numel // GROUP)


def pack_2bit(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    numel = values.numel()
    if values.is_cpu and (fast := plain.compiled()) is not None:
        packed: torch.Tensor | None = fast.pack_means(values, GROUP, LARGE)
        if packed is not None:
            return packed[: size_2bit(numel)]
    missing = -numel % GROUP
    groups = (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, GROUP)
    classes, means = classified(groups, LARGE, missing)
    rows = torch.empty(len(groups), MEANS + GROUP // 4, dtype=torch.uint8, device=values.device)
    rows[:, :MEANS] = means
    rows[:, MEANS:] = packed_pairs(classes)
    return rows.view(-1)[: size_2bit(numel)]


def unpack_2bit(body: "torch.Tensor", numel: int) -> "torch.Tensor":
    import torch

    if body.is_cpu and (fast := plain.compiled()) is not None:
        values: torch.Tensor = fast.unpack_means(body, numel, GROUP)
        return values
    count = -(-numel // GROUP)
    missing = count * (MEANS + GROUP // 4) - body.numel()
    rows = (torch.nn.functional.pad(body, (0, missing)) if missing else body).view(count, MEANS + GROUP // 4)
    return means_of(rows[:, :MEANS], unpacked_pairs(rows[:, MEANS:])).view(-1)[:numel]


def classified(groups: "torch.Tensor", large: float, missing: int = 0) -> "tuple[torch.Tensor, torch.Tensor]":
    """The class 0 to 3 of each element, (g, n) uint8, and the bytes of each group's four means, (g, 8) uint8.

    Class 0: small >= 0, 1: large >= 0, 2: small < 0, 3: large < 0. All means of a group with NaN or infinity are NaN.
    `groups`: (g, n) fp32, n a multiple of 4 and at most 512. `large`: times the mean of |x|, above which an element is
    large. `missing`: zeros at the end of the last group that are no elements.
    """
    import torch

    largest = groups.abs().amax(1, keepdim=True)
    is_finite = largest.isfinite()
    # Powers of two are made of their bits, because a power function may round.
    biased = torch.where(is_finite & (largest >= _SMALLEST), largest, 1.0).view(torch.int32) >> 23
    factors = torch.where(largest >= _SMALLEST, (_UP - biased << 23).view(torch.float32), 0.0)
    whole = (groups * factors).round_()
    if not bool(is_finite.all()):
        whole.nan_to_num_(0.0, 0.0, 0.0)
    sizes = whole.abs()
    numbers = torch.full_like(largest, groups.shape[1])
    if missing:
        numbers[-1] -= missing
    total, signed = sizes.sum(1, keepdim=True), whole.sum(1, keepdim=True)
    is_large, is_negative = sizes > total * large / numbers, whole < 0
    classes = is_negative.view(torch.uint8) * 2 + is_large.view(torch.uint8)
    # All sums are exact, so that what is left of them is the sum over the other elements. Memory is used again.
    ones = is_large.to(torch.float32)
    sizes.mul_(ones), whole.mul_(ones)
    of_large, of_large_signed = sizes.sum(1, keepdim=True), whole.sum(1, keepdim=True)
    sums = _by_class(total, of_large, (total - signed) / 2, (of_large - of_large_signed) / 2)
    negative = whole.copy_(is_negative)
    counted = [ones.sum(1, keepdim=True), negative.sum(1, keepdim=True), negative.mul_(ones).sum(1, keepdim=True)]
    counts = _by_class(numbers, *counted)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float32, device=groups.device)
    means = sums / counts.clamp_(min=1.0) * (biased - _DOWN << 23).view(torch.float32) * signs
    means = torch.where(is_finite, means + 0.0, torch.nan).to(torch.bfloat16)  # without -0.0
    return classes, little_endian(means.view(torch.uint8).view(-1), torch.bfloat16).view(torch.uint8).view(-1, MEANS)


def _by_class(
    total: "torch.Tensor", large: "torch.Tensor", negative: "torch.Tensor", both: "torch.Tensor"
) -> "torch.Tensor":
    """Sums over each group's elements by class, (g, 4): small >= 0, large >= 0, small < 0, large < 0; g groups.

    Computed from the sums over all, large, negative, and large negative elements, each (g, 1). An element is large if
    |x| exceeds a multiple of the group's mean |x|, as in `classified`.
    """
    import torch

    return torch.cat([total - large - negative + both, large - both, negative - both, both], 1)


def means_of(means: "torch.Tensor", classes: "torch.Tensor") -> "torch.Tensor":
    """The mean of each element's class, (g, n) fp32. `means`: (g, 8) uint8, four bf16. `classes`: (g, n) uint8."""
    import torch

    table = little_endian(means.reshape(-1), torch.bfloat16).to(torch.float32).view(-1, 4)
    return torch.gather(table, 1, classes.to(torch.int64))


def packed_pairs(pairs: "torch.Tensor") -> "torch.Tensor":
    """Numbers below 4, four in a byte: (g, n) to (g, n / 4) uint8, the first in the lowest bits."""
    import torch

    words = little_endian(pairs.reshape(-1), torch.int32)
    return ((words | words >> 6 | words >> 12 | words >> 18) & 255).to(torch.uint8).view(len(pairs), -1)


def unpacked_pairs(packed: "torch.Tensor") -> "torch.Tensor":
    """The numbers that `packed_pairs` packed: (g, n / 4) to (g, n) uint8."""
    import torch

    words = packed.to(torch.int32)
    pairs = (words | words << 6 | words << 12 | words << 18) & 0x03030303
    return little_endian(pairs.view(torch.uint8).view(-1), torch.int32).view(torch.uint8).view(len(packed), -1)
