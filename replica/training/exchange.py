"""`exchange_plan`: which parts of which tensors the ranks of a replica send each other to form the shards of a base.

The base is cut into shards, each of which one rank owns; the model is in the ranks as whole tensors (plain modules,
DDP) or pieces of them (DTensors of FSDP2 and of tensor parallelism). Pure arithmetic on shapes; `ranks` moves the
bytes.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diloco_orchestrator.allreduce.owners import owner_of
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer.base import BaseLayout


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a tensor, flat in row-major order, held by a rank's piece from its element `at` on."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Move:
    """A transfer of elements [start, stop) of the tensor `name` from one rank to another, perhaps the same.

    They begin at element `at` of the piece that the rank `holder` holds. The rank `owner` owns the range.
    """

    name: str
    start: int
    stop: int
    holder: int
    at: int
    owner: int


@dataclass(frozen=True)
class Split:
    """A cut of dimension `dim` of a tensor into `parts` by one dimension of a device mesh; this rank has part `index`.

    `strided`: whether the cut applies to what the other cuts leave, as FSDP2's does after tensor parallelism
    (`_StridedShard`).
    """

    dim: int
    parts: int
    index: int
    strided: bool = False


Pieces = Mapping[str, Sequence[Range]]  # by tensor: what one rank holds of it, in the order of its piece
Owned = Mapping[str, Sequence[tuple[int, int, int]]]  # by tensor: [start, stop) and the owner of its ranges, in order


@dataclass(frozen=True)
class ExchangePlan:
    """The transfers between the ranks that hold pieces of tensors and the ranks that own ranges of them.

    `gathered`: to the owners, so that each gets every element of its ranges once. `scattered`: from the owners, all
    that each rank holds.
    """

    gathered: Sequence[Move]
    scattered: Sequence[Move]


def owned_by_shard(layout: BaseLayout, ranks: int) -> Owned:
    """The rank that owns each range of a base's parameters: the owner of the shard in which the range lies."""
    found = {}
    for fragment, names in enumerate(layout.fragments):
        shards = [(*each, owner_of(fragment, index, ranks)) for index, each in enumerate(layout.shards(fragment))]
        first = 0
        for name in names:
            last = first + layout.shapes[name].numel()
            found[name] = [
                (max(start, first) - first, min(stop, last) - first, owner)
                for start, stop, owner in shards
                if start < last and first < stop
            ]
            first = last
    return found


def exchange_plan(pieces: Sequence[Pieces], owned: Owned) -> ExchangePlan:
    """The transfers for tensors of which rank r holds `pieces[r]`, and whose ranges have the owners `owned`.

    An owner takes elements that it holds from itself, others from the lowest rank that holds them. Tensors are in the
    order of `owned`. Raises `ConfigError`, naming the tensor, if an element is held by no rank.
    """
    gathered: list[Move] = []
    scattered: list[Move] = []
    for name, ranges in owned.items():
        covered: list[tuple[int, int]] = []
        for low, high, owner in ranges:
            within: list[tuple[int, int]] = []
            for rank in sorted(range(len(pieces)), key=lambda each: (each != owner, each)):
                held = _within(pieces[rank].get(name, ()), low, high)
                scattered += [Move(name, each.start, each.stop, rank, each.at, owner) for each in held]
                new = [part for each in held for part in _without(each, within)]
                gathered += [Move(name, each.start, each.stop, rank, each.at, owner) for each in new]
                within = _united([*within, *((each.start, each.stop) for each in new)])
            covered = _united([*covered, *within])
        numel = ranges[-1][1] if ranges else 0
        if covered != ([(0, numel)] if numel else []):
            raise ConfigError(
                f"the ranks together hold the elements {covered} of {name!r}, which has {numel}: a part of it is on no "
                "rank. Shard the model over all ranks of the replica, with fully_shard or parallelize_module."
            )
    return ExchangePlan(gathered, scattered)


def _within(held: Sequence[Range], low: int, high: int) -> list[Range]:
    """The parts within elements [low, high) of ascending ranges, which may be as many as a tensor has rows."""
    found = []
    for index in range(bisect_right(held, low, key=lambda each: each.stop), len(held)):
        start, stop = max(held[index].start, low), min(held[index].stop, high)
        if start >= high:
            break
        found.append(Range(start, stop, held[index].at + start - held[index].start))
    return found


def _without(held: Range, covered: Sequence[tuple[int, int]]) -> Iterator[Range]:
    """The parts of the range `held` outside of `covered`, disjoint intervals in order."""
    at = held.start
    for index in range(bisect_right(covered, at, key=lambda each: each[1]), len(covered)):
        low, high = covered[index]
        if low >= held.stop:
            break
        if low > at:
            yield Range(at, low, held.at + at - held.start)
        at = max(at, high)
    if at < held.stop:
        yield Range(at, held.stop, held.at + at - held.start)


def _united(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same elements as disjoint intervals in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def messages(moves: Sequence[Move], sizes: Mapping[str, int], most: int) -> Iterator[list[Move]]:
    """The transfers in order, grouped into messages of at most `most` bytes, or of one transfer.

    `sizes`: bytes of an element by tensor name.
    """
    message, size = list[Move](), 0
    for move in moves:
        bytes_ = (move.stop - move.start) * sizes[move.name]
        if message and size + bytes_ > most:
            yield message
            message, size = [], 0
        message.append(move)
        size += bytes_
    if message:
        yield message


# -- what one rank holds ---------------------------------------------------------------------------------------------


def held_ranges(shape: Sequence[int], splits: Sequence[Split]) -> list[Range]:
    """The ranges of a tensor's flat elements that a rank holds, in the order of its piece; empty for an empty piece.

    Each split cuts as `torch.chunk` does, so that later parts may be shorter or empty.
    """
    box = [(0, size) for size in shape]
    for split in sorted(splits, key=lambda each: each.strided):
        start, size = box[split.dim]
        part = -(-size // split.parts)
        first = min(split.index * part, size)
        box[split.dim] = start + first, min(part, size - first)
    if not math.prod(size for _, size in box):
        return []
    # Dimensions after the last one that is cut are whole: there a row of the piece is one range.
    whole = len(shape)
    while whole and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    run = math.prod(shape[whole:])
    if not whole:
        return [Range(0, run, 0)]
    start, size = box[whole - 1]
    found = []
    for number, row in enumerate(_rows(box[: whole - 1], shape)):
        first = (row * shape[whole - 1] + start) * run
        found.append(Range(first, first + size * run, number * size * run))
    return found


def _rows(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> Iterator[int]:
    """The flat indices of the elements of `box` within the leading dimensions of `shape`, in order."""
    if not box:
        yield 0
        return
    start, size = box[-1]
    for row in _rows(box[:-1], shape):
        for index in range(start, start + size):
            yield row * shape[len(box) - 1] + index


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of FSDP2's `fully_shard` or of tensor parallelism."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor, sharing its memory: the piece of a DTensor, a plain tensor itself."""
    whole: Any = tensor.detach()
    part: torch.Tensor = whole.to_local() if is_sharded(tensor) else whole
    return part


def ranges_in(tensor: torch.Tensor, name: str) -> list[Range]:
    """The ranges of a tensor that this rank holds. Raises `ConfigError` for a placement that is not a part of it."""
    if not is_sharded(tensor):
        return [Range(0, tensor.numel(), 0)]
    mesh, placements = _mesh_of(tensor)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        return []
    splits = []
    for placement, parts, index in zip(placements, mesh.shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise ConfigError(
                f"{name!r} is placed as {placement} on a mesh dimension of {parts} ranks: a sum that is not taken yet "
                "cannot be averaged. Use Shard or Replicate for parameters."
            )
        dim = placement.dim % max(1, tensor.ndim)
        splits.append(Split(dim, parts, index, strided=hasattr(placement, "split_factor")))
    found = held_ranges(tuple(tensor.shape), splits)
    held, expected = local_part(tensor).numel(), sum(each.stop - each.start for each in found)
    if held != expected:
        raise ConfigError(
            f"this rank holds {held} elements of {name!r}, where {placements} over a mesh of {tuple(mesh.shape)} gives "
            f"{expected}: this way to shard is not supported. Use fully_shard with its default placement."
        )
    return found


def ranks_on_one_batch(model: torch.nn.Module, rank: int) -> tuple[int, ...]:
    """The ranks that must compute on the same batches as this one, in order: those between which tensors are parallel.

    A mesh dimension over which FSDP shards has other batches in each rank; any other dimension that cuts a DTensor of
    the model is one of tensor parallelism. Raises `ConfigError` if parameters are tensor-parallel in different groups.
    """
    found: set[tuple[int, ...]] = set()
    sharded_by = _meshes_of_fsdp(model)
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            continue
        mesh, placements = _mesh_of(parameter)
        names, where = mesh.mesh_dim_names or (None,) * mesh.ndim, mesh.get_coordinate()
        cuts = [
            not each.is_replicate() and label not in sharded_by for each, label in zip(placements, names, strict=True)
        ]
        if any(cuts) and where is not None:
            index = tuple(slice(None) if cut else at for cut, at in zip(cuts, where, strict=True))
            found.add(tuple(sorted(mesh.mesh[index].flatten().tolist())))
        if len(found) > 1:
            raise ConfigError(
                f"parameter {name!r} is tensor-parallel over the ranks {max(found)}, others over {min(found)}: which "
                "ranks train on the same batch is not clear. Use one tensor-parallel mesh for the whole model."
            )
    return found.pop() if found else (rank,)


def _meshes_of_fsdp(model: torch.nn.Module) -> set[str | None]:
    """The names of the mesh dimensions over which `fully_shard` shards a model; None for a mesh without names."""
    names: set[str | None] = set()
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)  # one for each mesh on which it has parameters
            if groups is None:  # before torch 2.13
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            for group in groups:
                names.update(group.mesh_info.mesh.mesh_dim_names or (None,))
    return names


def _mesh_of(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements
