"""Nested state (dicts and lists of tensors and scalars) as the bytes of one safetensors object, and back.

Nothing is pickled: tensors are named by number, the structure around them is JSON in the header. Equal states give
equal bytes. Which states are saved is decided in `checkpoint`.
"""

import json
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from diloco_orchestrator.errors import ConfigError, RecordInvalid

_TREE = "tree"


def pack(tree: Any) -> bytes:
    """Encode nested dicts, lists and tuples of tensors and JSON scalars as bytes.

    Raises `ConfigError` for anything else, naming its place in the tree.
    """
    tensors: list[torch.Tensor] = []
    shape = json.dumps(_encode(tree, tensors, "state"), separators=(",", ":"))
    # One header entry and numbered names: safetensors writes several entries in hash order.
    named = {f"{index:06d}": tensor for index, tensor in enumerate(tensors)}
    return save_tensors(named, metadata={_TREE: shape})


def unpack(data: bytes, where: str) -> Any:
    """Decode bytes of `pack` to the same nested state, tensors on the CPU. `where`: names the object in errors.

    Raises `RecordInvalid` for any other bytes.
    """
    try:
        tensors, metadata = _load(data)
        return _decode(json.loads(metadata[_TREE]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordInvalid(f"{where} is no state of a replica ({error}): was it put there by hand?") from None


def _load(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    size = int.from_bytes(data[:8], "little")
    return load_tensors(data), json.loads(data[8 : 8 + size]).get("__metadata__", {})


def _encode(value: Any, tensors: list[torch.Tensor], path: str) -> Any:
    match value:
        case torch.Tensor():
            tensors.append(value.detach().to("cpu", copy=True).contiguous())
            return {"tensor": f"{len(tensors) - 1:06d}"}
        case dict():
            return {"dict": [[_scalar(k, path), _encode(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()]}
        case list() | tuple():
            items = [_encode(each, tensors, f"{path}[{index}]") for index, each in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        case _:
            return _scalar(value, path)


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
