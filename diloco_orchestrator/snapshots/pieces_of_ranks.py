"""`PiecesOfRanks`: tensors of which each rank of a replica holds a piece, sent to one rank part by part.

No file of a replica of several ranks is whole in one of them. This file moves numbers between ranks; `file_of_ranks`
makes files of snapshots of them, `state_file` writes a saved state, and `stored_state` reads one. In all four rank 0 is
asked, and has every rank run the same function at the same time (`Owners.each`). There each tensor is sent by the rank
that holds it and received by the one that reads it (`moved`): both have to come to it in the same order, and the other
ranks pass it by.
"""

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.protocol.digests import BulkDigest, BulkHasher
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, memory_of

_PART = 1 << 20  # elements of a tensor that a rank holds beside its own pieces


@dataclass(frozen=True)
class PiecesOfRanks:
    """Tensors of which every rank holds pieces, as one rank has them. None is whole in any rank.

    `ranges`: by tensor, in order and without overlap, elements [start, stop) of its flat numbers, the rank that holds
    them, and where they begin in its piece. `pieces`: this rank's, by tensor.
    """

    owners: Owners
    ranges: Mapping[str, Sequence[tuple[int, int, int, int]]]
    pieces: Mapping[str, torch.Tensor]

    def parts(self, name: str, reader: int, first: int = 0, last: int | None = None) -> Iterator[torch.Tensor]:
        """In the rank `reader`: the flat numbers of a tensor in order, on the CPU, in parts; elsewhere nothing.

        Every rank calls it at the same time, in a task of `Owners.each`, and iterates to the end. `first`, `last`: of
        the elements [first, last) alone.
        """
        ranges, dtype = self.ranges[name], self.pieces[name].dtype
        starts, numel = [each[0] for each in ranges], ranges[-1][1] if ranges else 0
        stop = numel if last is None else last
        for low in range(first, stop, _PART):
            high = min(low + _PART, stop)
            within = ranges[bisect.bisect_right(starts, low) - 1 : bisect.bisect_left(starts, high)]
            part = torch.empty(high - low if self.owners.rank == reader else 0, dtype=dtype, device="cpu")
            for holder in sorted({holder for _, _, holder, _ in within}):
                cut = [
                    (max(begin, low), min(end, high), at + max(low - begin, 0))
                    for begin, end, rank, at in within
                    if rank == holder
                ]
                count, at = sum(end - begin for begin, end, _ in cut), 0
                for values in moved(self.owners, holder, reader, count, dtype, partial(self._cut, name, cut)):
                    for begin, end, _ in cut:
                        part[begin - low : end - low] = values[at : at + end - begin]
                        at += end - begin
            if self.owners.rank == reader:
                yield part

    def _cut(self, name: str, cut: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        piece = self.pieces[name].reshape(-1)
        return torch.cat([piece[at : at + stop - start] for start, stop, at in cut]).cpu()

    def digests(self, names: Sequence[str]) -> dict[str, BulkDigest]:
        """In rank 0: the digests of the numbers of these tensors. Each is hashed by one rank; the ranks take turns."""
        found: dict[str, BulkDigest] = {}
        for each in self.owners.each(_digests, self, names):
            found |= each
        return found


def _digests(pieces: PiecesOfRanks, names: Sequence[str]) -> dict[str, BulkDigest]:
    found = {}
    for number, name in enumerate(names):
        reader, hasher = number % pieces.owners.ranks, BulkHasher()
        for part in pieces.parts(name, reader):
            hasher.update(memory_of(part))
        if reader == pieces.owners.rank:
            found[name] = hasher.digest()
    return found


@dataclass(frozen=True)
class TensorInRanks:
    """A tensor of which each rank holds a piece: its name in `pieces`, dtype and shape."""

    pieces: PiecesOfRanks
    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class InRanks:
    """The tensors of a snapshot's files that no rank has whole: their names in `pieces`, by name in files."""

    pieces: PiecesOfRanks | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)  # by name in files


def moved(
    owners: Owners, holder: int, reader: int, numel: int, dtype: torch.dtype, read: Callable[[], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """In the rank `reader`: yield the `numel` numbers that `read` returns in the rank `holder`; elsewhere nothing.

    Every rank iterates to the end, at the same place among its calls.
    """
    if owners.rank == holder:
        values = read().to(dtype)
        if holder == reader:
            yield values
        else:
            owners.send(values.view(torch.uint8), reader)
    elif owners.rank == reader:
        values = torch.empty(numel, dtype=dtype, device="cpu")
        owners.receive(values.view(torch.uint8), holder)
        yield values
