"""`CODECS`, the table of encodings, and the operations on all of them: encode blocks, measure and decode ranges.

An encoded vector is a small header, then its groups of elements one after another, so that a range can be decoded by
itself. Golden bytes in `tests/protocol/test_codecs.py` pin the format. The header has format version, codec and element
count; digests are in the manifest. torch is imported inside functions, because the cost forecast needs only sizes and
must start fast.
"""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco_orchestrator.codecs import plain, scaled
from diloco_orchestrator.codecs.plain import tensor_over
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, unknown_name

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<4sHHQ")  # magic, format version, codec number, element count
_MAGIC = b"DLCO"
_VERSION = 1
_PIECE = 128 * 1024  # elements that are checked at once
LARGEST_GROUP = 4096  # elements; blocks and shards of vectors are cut at multiples of it


@dataclass(frozen=True)
class Measure:
    """Number of non-finite elements and sum of squares of a tensor."""

    nonfinite: int = 0  # elements that are NaN or infinity
    squares: float = 0.0  # the sum of all squares, to about six digits; infinity unless all are finite

    def __add__(self, other: "Measure") -> "Measure":
        return Measure(self.nonfinite + other.nonfinite, self.squares + other.squares)

    @property
    def norm(self) -> float:
        """The Euclidean norm, rounded to four digits, because further ones depend on the CPU's order of sums."""
        return float(f"{math.sqrt(self.squares):.4g}")


@dataclass(frozen=True)
class EncodedBlock:
    """A block of a vector's elements in encoded form, with the values that they decode to."""

    data: bytes | memoryview  # may share memory with the tensor that was encoded
    values: "torch.Tensor"  # (n,) float32, decoded from `data`, whose memory they may share; not for writing
    measure: Measure  # of these values


@dataclass(frozen=True)
class Codec:
    """A named encoding of flat CPU fp32 tensors in groups of elements, whose bytes depend on no other group."""

    name: str
    number: int  # in the header; never reused
    group: int  # elements; it divides `LARGEST_GROUP`, and the last group of a vector may be shorter
    body_size: Callable[[int], int]  # bytes behind the header, by number of elements; of whole groups their sum
    pack: "Callable[[torch.Tensor], bytes | memoryview]"  # (n,) float32 -> bytes, perhaps over the same memory
    unpack: "Callable[[torch.Tensor, int], torch.Tensor]"  # uint8, n -> (n,) of a dtype that fp32 holds, likewise
    levels: int = 0  # steps from zero to a group's largest absolute value; 0: each number is rounded by itself

    def __post_init__(self) -> None:
        if LARGEST_GROUP % self.group:
            raise ValueError(f"groups of {self.group} do not fill {LARGEST_GROUP} elements.")

    def header(self, numel: int) -> bytes:
        """The header of an encoded vector of `numel` elements."""
        return _HEADER.pack(_MAGIC, _VERSION, self.number, numel)

    def encoded_size(self, numel: int) -> int:
        """The size in bytes of an encoded tensor of `numel` elements, header included."""
        return _HEADER.size + self.body_size(numel)

    def encode_block(self, values: "torch.Tensor") -> EncodedBlock:
        """Encode elements of a vector, (n,) float32 on the CPU: whole groups, except at the end of the vector."""
        import torch

        data = self.pack(values)
        decoded = self.unpack(tensor_over(memoryview(data)), values.numel()).to(torch.float32)
        return EncodedBlock(data, decoded, _measured(decoded))


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 1, 1, lambda n: 4 * n, plain.pack_fp32, plain.unpack_fp32),
        Codec("bf16", 2, 1, lambda n: 2 * n, plain.pack_bf16, plain.unpack_bf16),
        Codec("int8", 3, scaled.GROUP, scaled.size_int8, scaled.pack_int8, scaled.unpack_int8, 127),
        Codec("int4", 4, scaled.GROUP, scaled.size_int4, scaled.pack_int4, scaled.unpack_int4, 7),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of this name. Raises `ConfigError` with the nearest known name for an unknown one."""
    if name not in CODECS:
        raise ConfigError(unknown_name("codec", name, CODECS))
    return CODECS[name]


def encode(values: "torch.Tensor", codec: str) -> bytes:
    """Encode `values`, (numel,) float32 on the CPU, as header and body. Raises `ConfigError` for an unknown codec."""
    found = get_codec(codec)
    return found.header(values.numel()) + bytes(found.encode_block(values.contiguous()).data)


class Encoded:
    """A flat vector in encoded form, whose elements are decoded on demand.

    Raises `PayloadCorrupt` unless header and length of `data` are those of `numel` elements of this codec.
    """

    def __init__(self, data: bytes | memoryview, codec: str, numel: int) -> None:
        self.numel = numel
        self._codec = get_codec(codec)
        self._data = memoryview(data)
        if self._data[: _HEADER.size] != self._codec.header(numel) or len(data) != self._codec.encoded_size(numel):
            raise PayloadCorrupt(f"the bytes are not {numel} elements encoded as {codec} (format version {_VERSION}).")
        self._body = tensor_over(self._data[_HEADER.size :])

    def values(self, start: int = 0, stop: int | None = None) -> "torch.Tensor":
        """Elements [start, stop), (stop - start,) float32 on the CPU, not to be written to: memory may be shared."""
        import torch

        return self._unpacked(start, self.numel if stop is None else stop).to(torch.float32)

    def blocks(self, start: int, stop: int, longest: int) -> "Iterator[torch.Tensor]":
        """Elements [start, stop) in order, at most `longest` at a time, in a dtype whose values float32 holds exactly.

        They may share memory with the encoded bytes, and must never be written to.
        """
        # Single numbers are unpacked as a view, groups as a copy that fits a core's cache.
        together = stop - start if self._codec.group == 1 else longest * max(1, _PIECE // longest)
        for first in range(start, stop, max(1, together)):
            yield from self._unpacked(first, min(first + together, stop)).split(longest)

    def _unpacked(self, start: int, stop: int) -> "torch.Tensor":
        group, place = self._codec.group, self._codec.body_size
        first, last = start - start % group, min(stop + -stop % group, self.numel)
        unpacked = self._codec.unpack(self._body[place(first) : place(last)], last - first)
        return unpacked if (first, last) == (start, stop) else unpacked[start - first : stop - first]

    def step_norm(self) -> float:
        """The norm of the distances between neighbouring values of all elements; 0 where numbers are rounded alone."""
        import torch

        if not self._codec.levels or not self.numel:
            return 0.0
        missing = -self.numel % self._codec.group
        groups = torch.nn.functional.pad(self.values(), (0, missing)).view(-1, self._codec.group)
        squares = (groups.abs().amax(1).to(torch.float64) / self._codec.levels).square()
        return math.sqrt(float(squares.sum()) * self._codec.group - float(squares[-1]) * missing)

    def measure(self, passing: Callable[[memoryview], object] = lambda piece: None) -> Measure:
        """The measure of all elements, without a decoded copy of all.

        `passing` is called with all bytes, piece by piece, while each is in a core's cache, for example to hash them.
        """
        passing(self._data[: _HEADER.size])
        found, size = Measure(), self._codec.encoded_size
        for start in range(0, self.numel, _PIECE):
            stop = min(start + _PIECE, self.numel)
            passing(self._data[size(start) : size(stop)])
            found += _measured(self.values(start, stop))
        return found


def _measured(values: "torch.Tensor") -> Measure:
    import torch

    # A norm is finite only if all elements are, so that one reduction answers both. In float32 it is the fastest, as
    # long as no square overflows and those that become zero do not count.
    norm = float(torch.linalg.vector_norm(values))
    if 1e-14 < norm < 1e18:
        return Measure(0, norm * norm)
    if nonfinite := values.numel() - int(torch.isfinite(values).sum()):
        return Measure(nonfinite, math.inf)
    return Measure(0, float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2)
