"""Encodings of a flat fp32 tensor as bytes: fp32 and bf16, little-endian, behind a small header.

Golden bytes in `tests/protocol/test_codecs.py` pin the format. The header names format version, codec and element
count; digests are part of the manifest. A new codec is one row of `CODECS`. numpy and torch are imported inside
functions, because the cost forecast needs only sizes and must start fast.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, unknown_name

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<4sHHQ")  # magic, format version, codec number, element count
_MAGIC = b"DLCO"
_VERSION = 1


@dataclass(frozen=True)
class Codec:
    """A named encoding of flat CPU fp32 tensors.

    `unpack(pack(x))` must be monotonic in the elements: `allreduce.payload` encodes only the smallest and the largest
    element to decide whether all elements stay finite.
    """

    name: str
    number: int  # in the header; never reused
    body_size: Callable[[int], int]  # bytes behind the header, by number of elements
    lossy: bool
    needs_feedback: bool  # the encoding error must be added to the next tensor, or training suffers
    pack: "Callable[[torch.Tensor], bytes]"
    unpack: "Callable[[memoryview], torch.Tensor]"

    def encoded_size(self, numel: int) -> int:
        """The size in bytes of an encoded tensor of `numel` elements, header included."""
        return _HEADER.size + self.body_size(numel)


def _pack_fp32(flat: "torch.Tensor") -> bytes:
    return flat.numpy().astype("<f4", copy=False).tobytes()


def _unpack_fp32(body: memoryview) -> "torch.Tensor":
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(body, dtype="<f4").astype(np.float32))  # astype: a writable copy


def _pack_bf16(flat: "torch.Tensor") -> bytes:
    import torch

    return flat.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False).tobytes()


def _unpack_bf16(body: memoryview) -> "torch.Tensor":
    import numpy as np
    import torch

    bits = torch.from_numpy(np.frombuffer(body, dtype="<i2").astype(np.int16))
    return bits.view(torch.bfloat16).to(torch.float32)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 1, lambda n: 4 * n, lossy=False, needs_feedback=False, pack=_pack_fp32, unpack=_unpack_fp32),
        Codec("bf16", 2, lambda n: 2 * n, lossy=True, needs_feedback=False, pack=_pack_bf16, unpack=_unpack_bf16),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of this name. Raises `ConfigError` with the nearest known name for an unknown one."""
    if name not in CODECS:
        raise ConfigError(unknown_name("codec", name, CODECS))
    return CODECS[name]


def encode(flat: "torch.Tensor", codec: str) -> bytes:
    """Encode `flat`, (numel,) float32 on the CPU, as header and body. Raises `ConfigError` for an unknown codec."""
    found = get_codec(codec)
    return _HEADER.pack(_MAGIC, _VERSION, found.number, flat.numel()) + found.pack(flat.contiguous())


def decode(data: bytes, codec: str, numel: int) -> "torch.Tensor":
    """The tensor that `data` encodes, of shape (numel,), float32, on the CPU.

    Raises `PayloadCorrupt` unless header and length are those of `numel` elements of this codec.
    """
    found = get_codec(codec)
    expected = _HEADER.pack(_MAGIC, _VERSION, found.number, numel)
    if data[: _HEADER.size] != expected or len(data) != found.encoded_size(numel):
        raise PayloadCorrupt(f"the bytes are not {numel} elements encoded as {codec} (format version {_VERSION}).")
    return found.unpack(memoryview(data)[_HEADER.size :])
