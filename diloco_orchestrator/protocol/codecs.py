"""Encodings of a flat fp32 tensor as bytes: fp32 and bf16, little-endian, behind a small header.

Golden bytes pin the format. Digests are the manifest's business; the header only says what the bytes are.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, unknown_name

_HEADER = struct.Struct("<4sHHQ")  # magic, format version, codec number, element count
_MAGIC = b"DLCO"
_VERSION = 1


@dataclass(frozen=True)
class Codec:
    """A named encoding; `pack` and `unpack` work on flat CPU fp32 tensors."""

    name: str
    number: int  # in the header; never reused
    bytes_per_element: int
    pack: Callable[[torch.Tensor], bytes]
    unpack: Callable[[memoryview], torch.Tensor]


def _pack_fp32(flat: torch.Tensor) -> bytes:
    return flat.numpy().astype("<f4", copy=False).tobytes()


def _unpack_fp32(body: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(body, dtype="<f4").astype(np.float32))  # astype: a writable copy


def _pack_bf16(flat: torch.Tensor) -> bytes:
    return flat.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False).tobytes()


def _unpack_bf16(body: memoryview) -> torch.Tensor:
    bits = torch.from_numpy(np.frombuffer(body, dtype="<i2").astype(np.int16))
    return bits.view(torch.bfloat16).to(torch.float32)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 1, 4, _pack_fp32, _unpack_fp32),
        Codec("bf16", 2, 2, _pack_bf16, _unpack_bf16),
    )
}


def get_codec(name: str) -> Codec:
    if name not in CODECS:
        raise ConfigError(unknown_name("codec", name, CODECS))
    return CODECS[name]


def encode(flat: torch.Tensor, codec: str) -> bytes:
    """Bytes of `flat`  # (numel,), float32, CPU."""
    found = get_codec(codec)
    return _HEADER.pack(_MAGIC, _VERSION, found.number, flat.numel()) + found.pack(flat.contiguous())


def decode(data: bytes, codec: str, numel: int) -> torch.Tensor:
    """The tensor  # (numel,), float32, CPU. Raises `PayloadCorrupt` unless the bytes are exactly that."""
    found = get_codec(codec)
    expected = _HEADER.pack(_MAGIC, _VERSION, found.number, numel)
    if data[: _HEADER.size] != expected or len(data) != _HEADER.size + numel * found.bytes_per_element:
        raise PayloadCorrupt(f"the bytes are not {numel} elements encoded as {codec} (format version {_VERSION}).")
    return found.unpack(memoryview(data)[_HEADER.size :])
