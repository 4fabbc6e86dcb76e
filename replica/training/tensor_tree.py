"""Encodes nested state (dicts and lists of tensors and scalars) as one safetensors file, and decodes it.

Nothing is pickled: tensors are named by number, the structure around them is JSON in the header. Equal states give
equal bytes. `checkpoint` decides which states are saved.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch

from diloco_orchestrator.allreduce.spool import held
from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.snapshots.saved_state import Buffers
from diloco_orchestrator.snapshots.tensor_file import buffers, decode

_TREE = "tree"


def pack(tree: Any) -> Buffers:
    """Encode nested dicts, lists and tuples of tensors and JSON scalars as bytes: a header, then copies of the tensors.

    Raises `ConfigError` for anything else, naming its place in the tree.
    """
    found: list[tuple[str, torch.Tensor]] = []
    shape = json.dumps(_encode(tree, found, "state"), separators=(",", ":"))
    named = {f"{index:06d}": _copied(tensor, path) for index, (path, tensor) in enumerate(found)}
    return buffers(named, metadata={_TREE: shape})


def check_packable(tree: Any, where: str) -> None:
    """Raise `ConfigError` for a state that `pack` cannot encode. Copies nothing. `where`: names the state in errors."""
    _encode(tree, [], where)


def unpack(pieces: Iterable[bytes], where: str) -> Any:
    """Decode the bytes of `pack`, in any pieces, to the same nested state, tensors on the CPU.

    `where`: names the object in errors. Raises `RecordInvalid` for any other bytes.
    """
    tensors, metadata = decode(pieces, where)
    try:
        return _decode(json.loads(metadata[_TREE]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordInvalid(f"{where} is no state of a replica ({error}): was it put there by hand?") from None


def _encode(value: Any, tensors: list[tuple[str, torch.Tensor]], path: str) -> Any:
    """The structure of a nested state as JSON; appends its tensors, each with its path in the state, to `tensors`."""
    match value:
        case torch.Tensor():
            if type(value.detach()) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
                raise ConfigError(
                    f"{path} is a {type(value).__name__} of layout {value.layout}: only plain, dense tensors are saved "
                    "with their bits. Choose an optimizer, or a state_dict, that keeps its state in those."
                )
            tensors.append((path, value.detach()))
            return {"tensor": f"{len(tensors) - 1:06d}"}
        case dict():
            return {"dict": [[_scalar(k, path), _encode(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()]}
        case list() | tuple():
            items = [_encode(each, tensors, f"{path}[{index}]") for index, each in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        case _:
            return _scalar(value, path)


def _copied(value: torch.Tensor, path: str) -> torch.Tensor:
    return held(value.numel(), path, value.dtype).view(value.shape).copy_(value)


def _scalar(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{path} is a {type(value).__name__}: a state_dict may hold tensors, numbers, texts, lists and dicts only, "
        "because nothing is pickled."
    )


def _decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, inner),) = node.items()
    match kind:
        case "tensor":
            return tensors[inner]
        case "dict":
            return {key: _decode(value, tensors) for key, value in inner}
        case "list":
            return [_decode(each, tensors) for each in inner]
        case "tuple":
            return tuple(_decode(each, tensors) for each in inner)
    raise ValueError(f"unknown node {kind!r}")
