"""Encodings of a flat fp32 tensor as bytes: fp32 and bf16, little-endian, behind a small header.

Golden bytes in `tests/protocol/test_codecs.py` pin the format. The header names format version, codec and element
count; digests are part of the manifest. A new codec is one row of `CODECS`. numpy and torch are imported inside
functions, because the cost forecast needs only sizes and must start fast.
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, unknown_name

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<4sHHQ")  # magic, format version, codec number, element count
_MAGIC = b"DLCO"
_VERSION = 1
_PIECE = 128 * 1024  # elements that are checked at once


@dataclass(frozen=True)
class Measure:
    """What one pass over the elements of a tensor finds."""

    nonfinite: int = 0  # elements that are NaN or infinity
    squares: float = 0.0  # the sum of all squares, to about six digits; infinity unless all are finite

    def __add__(self, other: "Measure") -> "Measure":
        return Measure(self.nonfinite + other.nonfinite, self.squares + other.squares)

    @property
    def norm(self) -> float:
        """The Euclidean norm, rounded to four digits: the rest depends on the CPU's order of sums."""
        return float(f"{math.sqrt(self.squares):.4g}")


@dataclass(frozen=True)
class Codec:
    """A named encoding of flat CPU fp32 tensors."""

    name: str
    number: int  # in the header; never reused
    body_size: Callable[[int], int]  # bytes behind the header, by number of elements
    lossy: bool
    needs_feedback: bool  # the encoding error must be added to the next tensor, or training suffers
    pack: "Callable[[torch.Tensor], memoryview]"  # may share memory with the tensor
    view: "Callable[[memoryview], torch.Tensor]"  # over the same memory; its values as fp32 are the decoded ones

    def encoded_size(self, numel: int) -> int:
        """The size in bytes of an encoded tensor of `numel` elements, header included."""
        return _HEADER.size + self.body_size(numel)


class _Unprotected:
    """Read-only memory as numpy sees writable one.

    torch has no read-only tensors and warns about each that is made of read-only memory.
    """

    def __init__(self, body: memoryview) -> None:
        import numpy as np

        array = np.frombuffer(body, dtype=np.uint8)
        self._body = body  # keeps the memory alive as long as a tensor shares it
        self.__array_interface__: dict[str, Any] = {
            **array.__array_interface__,
            "data": (array.__array_interface__["data"][0], False),
        }


def tensor_over(body: memoryview, dtype: "torch.dtype", little_endian: str) -> "torch.Tensor":
    """A tensor that shares memory with `body`, but on a big-endian machine, and must never be written to."""
    import numpy as np
    import torch

    numbers = np.asarray(_Unprotected(body)).view(little_endian)
    native: torch.Tensor = torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=False))
    return native.view(dtype)


def _pack_fp32(flat: "torch.Tensor") -> memoryview:
    return flat.numpy().astype("<f4", copy=False).view("u1").data


def _view_fp32(body: memoryview) -> "torch.Tensor":
    import torch

    return tensor_over(body, torch.float32, "<f4")


def _pack_bf16(flat: "torch.Tensor") -> memoryview:
    import torch

    return flat.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False).view("u1").data


def _view_bf16(body: memoryview) -> "torch.Tensor":
    import torch

    return tensor_over(body, torch.bfloat16, "<i2")


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 1, lambda n: 4 * n, lossy=False, needs_feedback=False, pack=_pack_fp32, view=_view_fp32),
        Codec("bf16", 2, lambda n: 2 * n, lossy=True, needs_feedback=False, pack=_pack_bf16, view=_view_bf16),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of this name. Raises `ConfigError` with the nearest known name for an unknown one."""
    if name not in CODECS:
        raise ConfigError(unknown_name("codec", name, CODECS))
    return CODECS[name]


def encode(flat: "torch.Tensor", codec: str) -> bytes:
    """Encode `flat`, (numel,) float32 on the CPU, as header and body. Raises `ConfigError` for an unknown codec."""
    return b"".join(data for data, _ in encode_blocks([flat.contiguous()], codec, flat.numel()))


def encode_blocks(
    blocks: "Iterable[torch.Tensor]", codec: str, numel: int
) -> Iterator[tuple[bytes | memoryview, Measure]]:
    """The bytes of `encode`, of a tensor that is given as flat blocks of `numel` elements together.

    Yields the header, then each block: its bytes, which may share memory with the block, and the measure of its
    elements once they are encoded. Raises `ConfigError` for an unknown codec.
    """
    found = get_codec(codec)
    yield _HEADER.pack(_MAGIC, _VERSION, found.number, numel), Measure()
    for block in blocks:
        body = found.pack(block)
        yield body, _measured(found.view(body))


def view(data: bytes | memoryview, codec: str, numel: int) -> "torch.Tensor":
    """The tensor that `data` encodes, of shape (numel,), on the CPU, in a dtype that fp32 holds exactly.

    Nothing is copied: the tensor shares memory with `data` and must never be written to. Raises `PayloadCorrupt` unless
    header and length are those of `numel` elements of this codec.
    """
    found = get_codec(codec)
    expected = _HEADER.pack(_MAGIC, _VERSION, found.number, numel)
    if data[: _HEADER.size] != expected or len(data) != found.encoded_size(numel):
        raise PayloadCorrupt(f"the bytes are not {numel} elements encoded as {codec} (format version {_VERSION}).")
    return found.view(memoryview(data)[_HEADER.size :])


def decode(data: bytes | memoryview, codec: str, numel: int) -> "torch.Tensor":
    """A copy, of shape (numel,), float32, on the CPU, of the tensor that `data` encodes. Raises what `view` raises."""
    import torch

    return view(data, codec, numel).to(torch.float32, copy=True)


def measure(
    data: bytes | memoryview,
    codec: str,
    numel: int,
    passing: Callable[[memoryview], object] = lambda piece: None,
) -> Measure:
    """The measure of the elements that `data` encodes, taken without decoding a copy. Raises what `view` raises.

    `passing` is called with all of `data`, piece by piece: whoever reads the bytes too finds each in a core's cache.
    """
    values, whole = view(data, codec, numel), memoryview(data)
    passing(whole[: _HEADER.size])
    found = Measure()
    for start in range(0, numel, _PIECE):
        piece, first = values[start : start + _PIECE], _HEADER.size + start * values.element_size()
        passing(whole[first : first + piece.numel() * values.element_size()])
        found += _measured(piece)
    return found


def _measured(values: "torch.Tensor") -> Measure:
    import torch

    # A norm is finite only if all elements are, so that one reduction answers both. In float32 it is the fastest, as
    # long as no square overflows and those that become zero do not count.
    norm = float(torch.linalg.vector_norm(values.to(torch.float32)))
    if 1e-14 < norm < 1e18:
        return Measure(0, norm * norm)
    if nonfinite := values.numel() - int(torch.isfinite(values).sum()):
        return Measure(nonfinite, math.inf)
    return Measure(0, float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2)
