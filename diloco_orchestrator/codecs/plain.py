"""Codecs that store each number by itself (fp32 as it is, bf16 rounded to nearest), and what all codecs share.

numpy and torch are imported inside functions, because the cost forecast needs only sizes and must start fast.
"""

import functools
import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    import torch

log = logging.getLogger(__name__)


class _Unprotected:
    """Read-only memory wrapped so that numpy treats it as writable and torch gives no warning."""

    def __init__(self, body: memoryview) -> None:
        import numpy as np

        self._array = np.frombuffer(body, dtype=np.uint8)  # keeps the memory alive as long as a tensor shares it
        interface: dict[str, Any] = self._array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def tensor_over(body: memoryview) -> "torch.Tensor":
    """A uint8 tensor that shares the memory of `body`; must not be written to."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(_Unprotected(body)))


def little_endian(body: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """The numbers of type `dtype` in the little-endian bytes `body`, (n,) uint8. Shares memory if possible."""
    if sys.byteorder == "big":
        body = body.view(-1, dtype.itemsize).flip(1).view(-1)
    if body.storage_offset() % dtype.itemsize:  # behind another span of an odd number of bytes
        body = body.clone()
    return body.view(dtype)


@functools.cache
def compiled() -> "ModuleType | None":
    """The module `codecs.compiled`, which gives the same bytes, where numba is installed; None elsewhere, and on
    big-endian machines.
    """
    if sys.byteorder == "big" or importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("diloco_orchestrator.codecs.compiled")
    except Exception as error:  # numba raises several types for a numpy that it does not know
        log.warning("payloads are encoded without numba, which cannot be imported: %s", error)
        return None


def pack_fp32(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    return little_endian(values.view(torch.uint8), torch.float32).view(torch.uint8)


def unpack_fp32(body: "torch.Tensor", numel: int) -> "torch.Tensor":
    import torch

    return little_endian(body, torch.float32)


def pack_bf16(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    return little_endian(values.to(torch.bfloat16).view(torch.uint8), torch.bfloat16).view(torch.uint8)


def unpack_bf16(body: "torch.Tensor", numel: int) -> "torch.Tensor":
    import torch

    return little_endian(body, torch.bfloat16)
