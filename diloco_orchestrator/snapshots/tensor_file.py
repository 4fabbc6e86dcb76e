"""Encoding and decoding of one safetensors file: its length before any tensor is read, its bytes in one allocation.

`encode` gives the bytes of `safetensors.torch.save`, which needs twice the memory. `snapshots.file_plan` assigns
tensors to files. torch is imported inside functions, because headers are read where it is not installed.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from diloco_orchestrator.allreduce.spool import held
from diloco_orchestrator.codecs.plain import tensor_over
from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.protocol.record_format import parse_json

if TYPE_CHECKING:
    import torch

# The order in which a file holds its tensors: by this table, then by name.
_DTYPES = (
    "uint64",
    "int64",
    "float64",
    "complex64",
    "float32",
    "uint32",
    "int32",
    "bfloat16",
    "float16",
    "uint16",
    "int16",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "float4_e2m1fn_x2",
    "bool",
)
_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
_BYTES = {  # of one element of torch
    dtype: max(1, int(bits[0]) // 8) if (bits := re.findall(r"\d+", dtype)) else 1 for dtype in _DTYPES
}
# The file's names of dtypes: those of torch in short, but for these.
_SPECIAL = {"float8_e8m0fnu": "F8_E8M0", "float8_e4m3fn": "F8_E4M3", "float4_e2m1fn_x2": "F4"}
_SHORT = (("uint", "U"), ("int", "I"), ("bfloat", "BF"), ("float", "F"), ("complex", "C"))
_PACKED = "float4_e2m1fn_x2"  # two numbers to an element of torch; the file counts numbers
_FORMAT = {"format": "pt"}  # one entry only: safetensors writes several in hash order, which differs between processes
_LENGTH = 8  # bytes before the header
_LONGEST_OFFSET = 13  # digits; a file of 10 TB


def _code(dtype: str) -> str:
    """The name of a dtype in safetensors files: "F32" for "float32"."""
    short = dtype
    for ours, theirs in _SHORT:
        short = short.replace(ours, theirs)
    return _SPECIAL.get(dtype, short.upper())


_NAME_OF = {_code(dtype): dtype for dtype in _DTYPES}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor; `dtype` in torch's spelling, "float32"."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: "torch.Tensor") -> "TensorSpec":
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


def file_size(specs: Mapping[str, TensorSpec]) -> int:
    """Length in bytes of the safetensors file with these tensors."""
    return len(_head(specs, _FORMAT)) + sum(spec.nbytes for spec in specs.values())


def largest_share(name: str, spec: TensorSpec) -> int:
    """Upper bound of the bytes that one tensor adds to a file: its numbers and its header entry."""
    return spec.nbytes + len(_entry(name, spec, 0)) + 2 * _LONGEST_OFFSET + 1


def empty_size() -> int:
    """Length in bytes of a file without tensors, padding included."""
    return len(_head({}, _FORMAT)) + _LENGTH


def encode(tensors: "Mapping[str, torch.Tensor]", metadata: Mapping[str, str] = _FORMAT) -> bytes:
    """The bytes of the safetensors file with these contiguous CPU tensors."""
    return b"".join(buffers(tensors, metadata))


def encode_each(specs: Mapping[str, TensorSpec], read: "Callable[[str], torch.Tensor]") -> bytes:
    """The safetensors file with these tensors; `read(name)` is called for one at a time."""
    file = io.BytesIO()  # gives its bytes away without a copy
    for piece in tensor_pieces(specs, read):
        file.write(piece)
    return file.getvalue()


def tensor_pieces(
    specs: Mapping[str, TensorSpec], read: "Callable[[str], torch.Tensor]"
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file in order: its header, then each tensor, read only when it is reached."""
    return file_pieces(specs, lambda name: [read(name)])


def file_pieces(
    specs: Mapping[str, TensorSpec], read: "Callable[[str], Iterable[torch.Tensor]]"
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file in order, as `tensor_pieces`; `read(name)` gives a tensor's numbers in parts."""
    yield _head(specs, _FORMAT)
    for name in _order(specs):
        yield from map(memory_of, read(name))


def buffers(tensors: "Mapping[str, torch.Tensor]", metadata: Mapping[str, str] = _FORMAT) -> list[bytes | memoryview]:
    """The bytes of a safetensors file in order: its header, then the memory of the tensors themselves, uncopied."""
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    return [_head(specs, metadata), *(memory_of(tensors[name]) for name in _order(specs))]


def header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, TensorSpec]]:
    """The header of the safetensors file with these tensors and metadata, and the tensors in the order of the file."""
    return _head(specs, metadata), {name: specs[name] for name in _order(specs)}


def memory_of(tensor: "torch.Tensor") -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _order(specs: Mapping[str, TensorSpec]) -> list[str]:
    for name, spec in specs.items():
        if spec.dtype not in _RANK:
            raise ConfigError(
                f"the model's tensor {name!r} is {spec.dtype}, which a safetensors file cannot hold. Convert it to "
                "another dtype before the model is attached."
            )
    return sorted(specs, key=lambda name: (_RANK[specs[name].dtype], name))


def _head(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries, start = [f'"__metadata__":{_json(dict(metadata))}'], 0
    for name in _order(specs):
        entries.append(_entry(name, specs[name], start))
        start += specs[name].nbytes
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text


def _entry(name: str, spec: TensorSpec, start: int) -> str:
    shape = list(spec.shape)
    if spec.dtype == _PACKED and shape:
        shape[-1] *= 2
    entry = {"dtype": _code(spec.dtype), "shape": shape, "data_offsets": [start, start + spec.nbytes]}
    return f"{_json(name)}:{_json(entry)}"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# -- what is written --------------------------------------------------------------------------------------------------


class TensorSource(Protocol):
    """Tensors by name, each read only when needed."""

    def specs(self) -> dict[str, TensorSpec]: ...

    def read(self, name: str) -> "torch.Tensor": ...


@dataclass(frozen=True)
class LiveTensors:
    """A `TensorSource` over tensors in memory, on any device."""

    tensors: "Mapping[str, torch.Tensor]"

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> "torch.Tensor":
        return self.tensors[name].detach().cpu().contiguous()


@dataclass(frozen=True)
class Overlaid:
    """The tensors of another source, of which those in `over` replace or complement some."""

    source: TensorSource
    over: "Mapping[str, torch.Tensor]"

    def specs(self) -> dict[str, TensorSpec]:
        return self.source.specs() | {name: TensorSpec.of(tensor) for name, tensor in self.over.items()}

    def read(self, name: str) -> "torch.Tensor":
        return self.over[name] if name in self.over else self.source.read(name)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: its tensors in file order, its metadata, and its own length."""

    specs: dict[str, TensorSpec]
    metadata: dict[str, str]
    size: int  # bytes of the header, after which the tensors begin


def read_header(read: Callable[[int, int], bytes], where: str) -> Header:
    """The header of a safetensors file. `read(start, end)` returns that range of its bytes.

    Raises `RecordInvalid`, naming `where`, if the bytes are no safetensors header: tensors must be adjacent, as the
    safetensors library demands.
    """
    try:
        end = _LENGTH + int.from_bytes(read(0, _LENGTH), "little")
        entries = parse_json(read(_LENGTH, end) if end <= _LARGEST_HEADER else b"")
        metadata = entries.pop("__metadata__", {})
        entries = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
        specs = {name: _spec(entry) for name, entry in entries.items()}
        _check_offsets(specs, {name: entry["data_offsets"] for name, entry in entries.items()})
        return Header(specs, metadata, end)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordInvalid(f"{where} is no safetensors file ({error!r}): it was not written by a replica.") from None


_LARGEST_HEADER = 100 * 2**20  # safetensors' own limit


def _spec(entry: dict[str, object]) -> TensorSpec:
    dtype, shape = _NAME_OF[str(entry["dtype"])], list(entry["shape"])  # type: ignore[call-overload]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape {str(shape)[:100]}")
    if dtype == _PACKED and shape:
        shape[-1] //= 2
    return TensorSpec(dtype, tuple(shape))


def _check_offsets(specs: Mapping[str, TensorSpec], offsets: Mapping[str, object]) -> None:
    """Raise `ValueError` unless each tensor, in file order, begins where the previous ends and fits its shape."""
    start = 0
    for name, spec in specs.items():
        expected = [start, start + spec.nbytes]
        if offsets[name] != expected or any(type(each) is not int for each in offsets[name]):  # type: ignore[attr-defined]
            raise ValueError(f"{name[:100]!r} has the offsets {str(offsets[name])[:100]}, where {expected} follow")
        start += spec.nbytes


def views(data: bytes, where: str) -> "dict[str, torch.Tensor]":
    """A file's tensors as read-only views. Raises `RecordInvalid`, naming `where`, for an incomplete file."""
    import torch

    header = read_header(lambda start, end: data[start:end], where)
    tensors, start = {}, header.size
    if start + sum(spec.nbytes for spec in header.specs.values()) != len(data):
        raise RecordInvalid(f"{where} is no safetensors file of its length: it was cut off or put there by hand.")
    for name, spec in header.specs.items():
        dtype: torch.dtype = getattr(torch, spec.dtype)
        body = memoryview(data)[start : start + spec.nbytes]
        flat = tensor_over(body).view(dtype) if spec.nbytes else torch.empty(0, dtype=dtype, device="cpu")
        tensors[name] = flat.view(spec.shape)
        start += spec.nbytes
    return tensors


def decode(pieces: Iterable[bytes], where: str) -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
    """Tensors (in new memory within the budget) and metadata of a file that comes in pieces, one in memory at a time.

    Raises `RecordInvalid`, naming `where`, if the pieces are no complete safetensors file.
    """
    import torch

    stream = _Stream(pieces, where)
    start = stream.take(_LENGTH)
    start += stream.take(min(int.from_bytes(start, "little"), _LARGEST_HEADER))
    header = read_header(lambda begin, end: start[begin:end], where)
    tensors = {}
    for name, spec in header.specs.items():
        tensors[name] = held(math.prod(spec.shape), where, getattr(torch, spec.dtype)).view(spec.shape)
        stream.fill(memory_of(tensors[name]))
    stream.close()
    return tensors, header.metadata


class _Stream:
    """Bytes that come in pieces, read one after another from their beginning."""

    def __init__(self, pieces: Iterable[bytes], where: str) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")
        self._where = where

    def take(self, size: int) -> bytes:
        taken = bytearray(size)
        self.fill(memoryview(taken))
        return bytes(taken)

    def fill(self, target: memoryview) -> None:
        """Overwrite all of `target` with the next bytes. Raises `RecordInvalid` if there are not enough."""
        while len(target):
            if not len(self._rest):
                self._rest = memoryview(self._next())
            count = min(len(target), len(self._rest))
            target[:count] = self._rest[:count]
            target, self._rest = target[count:], self._rest[count:]

    def close(self) -> None:
        """Raise `RecordInvalid` if bytes are left that nobody has read."""
        if len(self._rest) or any(self._pieces):
            raise RecordInvalid(f"{self._where} is longer than its header says: it was not written by a replica.")

    def _next(self) -> bytes:
        self._rest = memoryview(b"")  # so that two pieces are never in memory
        piece = next(self._pieces, None)
        if piece is None:
            raise RecordInvalid(f"{self._where} is no safetensors file: it ends before its header says.")
        return piece
