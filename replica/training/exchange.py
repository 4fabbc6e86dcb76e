"""`exchange_plan`: which numbers of which tensors each rank of an island sends to rank 0, and receives from it.

An island is a replica of several processes (ranks). Rank 0 has the base; the ranks hold whole tensors (plain modules,
DDP) or pieces of them (DTensors of FSDP2 and of tensor parallelism). Pure arithmetic on shapes; `ranks` moves the
bytes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diloco_orchestrator.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a tensor, flat in row-major order, which begin at element `at` of a rank's piece."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Move:
    """Elements [start, stop) of the tensor `name` that go from or to one rank, where they begin at element `at`."""

    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Split:
    """One dimension of a device mesh that cuts dimension `dim` of a tensor into `parts`; this rank has part `index`.

    `strided`: whether the cut applies to what the other cuts leave, as FSDP2's does after tensor parallelism
    (`_StridedShard`).
    """

    dim: int
    parts: int
    index: int
    strided: bool = False


Pieces = Mapping[str, Sequence[Range]]  # by tensor: what one rank holds of it, in the order of its piece


@dataclass(frozen=True)
class ExchangePlan:
    """The moves between rank 0 and each rank. Rank 0's own are in it too: they are copies within its process.

    `gathered[r]`: from rank r, so that rank 0 gets every element once. `scattered[r]`: to rank r, all that it holds.
    """

    gathered: Sequence[Sequence[Move]]
    scattered: Sequence[Sequence[Move]]

    @property
    def is_local(self) -> bool:
        """Whether gathering needs no message: rank 0 holds every element, as with DDP, or is the only rank."""
        return not any(self.gathered[1:])


def exchange_plan(pieces: Sequence[Pieces], numels: Mapping[str, int]) -> ExchangePlan:
    """The plan for tensors of `numels` elements, of which rank r holds `pieces[r]`.

    An element that several ranks hold is taken from the lowest of them. Tensors are in the order of `numels`. Raises
    `ConfigError`, naming the tensor, if an element is held by no rank.
    """
    gathered: list[list[Move]] = [[] for _ in pieces]
    scattered: list[list[Move]] = [[] for _ in pieces]
    for name, numel in numels.items():
        covered: list[tuple[int, int]] = []
        for rank, held in enumerate(pieces):
            ranges = [each for each in held.get(name, ()) if each.stop > each.start]
            scattered[rank] += [Move(name, each.start, each.stop, each.at) for each in ranges]
            new = [move for each in ranges for move in _without(each, covered, name)]
            gathered[rank] += new
            covered = _united([*covered, *((move.start, move.stop) for move in new)])
        if covered != ([(0, numel)] if numel else []):
            raise ConfigError(
                f"the ranks together hold the elements {covered} of {name!r}, which has {numel}: a part of it is on no "
                "rank. Shard the model over all ranks of the replica, with fully_shard or parallelize_module."
            )
    return ExchangePlan(gathered, scattered)


def _without(held: Range, covered: Sequence[tuple[int, int]], name: str) -> Iterator[Move]:
    """The parts of a range outside of `covered`, disjoint intervals in order."""
    at = held.start
    for low, high in covered:
        if high <= at:
            continue
        if low >= held.stop:
            break
        if low > at:
            yield Move(name, at, low, held.at + at - held.start)
        at = max(at, high)
    if at < held.stop:
        yield Move(name, at, held.stop, held.at + at - held.start)


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
    """The moves in order, as messages of at most `most` bytes, or of one move. `sizes`: bytes of an element by name."""
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
    """The ranges of a tensor's flat numbers that a rank holds, in the order of its piece; empty for an empty piece.

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
    """The flat indices of a box within the leading dimensions of a shape, in order."""
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
    """This rank's numbers of a tensor, sharing its memory: the piece of a DTensor, a plain tensor itself."""
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


def _mesh_of(tensor: Any) -> tuple[Any, Any]:
    """The device mesh and the placements of a DTensor."""
    return tensor.device_mesh, tensor.placements
