"""Encodes nested state (dicts and lists of tensors and scalars) as one safetensors file, and decodes it.

Nothing is pickled: tensors are named by number, the structure around them is JSON in the header. Equal states give
equal bytes. `checkpoint` decides which states are saved.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from diloco_orchestrator.allreduce.owners import ALONE, Owners
from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.replica.training.exchange import is_sharded
from diloco_orchestrator.snapshots.pieces_of_ranks import TensorInRanks
from diloco_orchestrator.snapshots.state_file import StateFile
from diloco_orchestrator.snapshots.stored_state import StoredState, StoredTensor
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, decode, header
from diloco_orchestrator.store.base import OBJECT_LIMIT

_TREE = "tree"


def state_file(tree: Any, owners: Owners = ALONE, limit: int = OBJECT_LIMIT) -> StateFile:
    """The file of a training state: nested dicts, lists and tuples of JSON scalars and tensors.

    Tensors are read when the file is written; each may be in parts on several ranks of the replica. `limit`: bytes of a
    piece of the file, above which it is cut. Raises `ConfigError` for anything else, naming its place in the tree.
    """
    found: list[tuple[str, torch.Tensor | TensorInRanks]] = []
    shape = json.dumps(_encode(tree, found, "state"), separators=(",", ":"))
    named = {f"{index:06d}": each for index, (_, each) in enumerate(found)}
    specs = {n: each.spec if isinstance(each, TensorInRanks) else TensorSpec.of(each) for n, each in named.items()}
    head, in_order = header(specs, {_TREE: shape})
    return StateFile.of(owners, head, in_order, named, limit)


def pack(tree: Any) -> bytes:
    """The bytes of `state_file`, of a state that this process has whole."""
    return state_file(tree).whole()


def check_packable(tree: Any, where: str) -> None:
    """Raise `ConfigError` for a state that cannot be encoded. Copies nothing. `where`: names the state in errors."""
    _encode(tree, [], where)


def unpack(pieces: Iterable[bytes], where: str) -> Any:
    """Decode the bytes of `pack`, in any pieces, to the same nested state, tensors on the CPU.

    `where`: names the object in errors. Raises `RecordInvalid` for any other bytes.
    """
    tensors, metadata = decode(pieces, where)
    return _tree_of(metadata, tensors, where)


def stored_tree(stored: StoredState, where: str) -> Any:
    """In rank 0: the nested state in a stored file, with a `StoredTensor` for each tensor. Raises as `unpack` does."""
    metadata, tensors = stored.opened(where)
    return _tree_of(metadata, tensors, where)


def whole_tree(tree: Any) -> Any:
    """In rank 0: a nested state with whole tensors in place of stored ones, whose pieces are freed as they are read."""
    match tree:
        case StoredTensor():
            return tree.whole()
        case dict():
            return {key: whole_tree(each) for key, each in tree.items()}
        case list() | tuple():
            return type(tree)(map(whole_tree, tree))
    return tree


def _tree_of(metadata: Mapping[str, str], tensors: Mapping[str, Any], where: str) -> Any:
    try:
        return _decode(json.loads(metadata[_TREE]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordInvalid(f"{where} is no state of a replica ({error}): was it put there by hand?") from None


def _encode(value: Any, tensors: list[tuple[str, torch.Tensor | TensorInRanks]], path: str) -> Any:
    """The structure of a nested state as JSON; appends its tensors, each with its path in the state, to `tensors`."""
    match value:
        case torch.Tensor():
            if is_sharded(value):
                raise ConfigError(
                    f"{path} is sharded over the ranks (a DTensor). Such tensors are saved of parameters, and of the "
                    "state of each parameter in a torch.optim.Optimizer. Instead of an object that holds optimizers "
                    "attach those, as in attach(model, [one, other]); leave others, such as a moving average of the "
                    "model, out of stateful, so that they begin anew after a restart."
                )
            if type(value.detach()) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
                raise ConfigError(
                    f"{path} is a {type(value).__name__} of layout {value.layout}: only plain, dense tensors are saved "
                    "with their bits. Choose an optimizer, or a state_dict, that keeps its state in those."
                )
            tensors.append((path, value.detach()))
            return {"tensor": f"{len(tensors) - 1:06d}"}
        case TensorInRanks():
            tensors.append((path, value))
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


def _decode(node: Any, tensors: Mapping[str, Any]) -> Any:
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
