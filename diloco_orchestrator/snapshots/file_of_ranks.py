"""`FileOfRanks`: a safetensors file of a snapshot, assembled in one rank from the shards of a base that all ranks hold.

`snapshots.layout` has the files of a base in one process.
"""

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from diloco_orchestrator.allreduce.owners import Owners, owner_of
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.snapshots.pieces_of_ranks import InRanks, moved
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, file_pieces


class _Rest:
    """Tensors of a file that are no parameter of the base. Only rank 0 reads them: in others `read` is never called."""

    read: Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class FileOfRanks:
    """The tensors of one file: parameters and momenta of the base, frozen ones in the ranks, others of rank 0."""

    base: Base
    names: Mapping[str, str]  # in the base, by stored name
    momenta: Collection[str]  # stored names of those that are momenta
    rest: _Rest
    frozen: InRanks
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)  # of the tensors in the file

    @classmethod
    def of(
        cls,
        base: Base,
        names: Mapping[str, str],
        momenta: Collection[str],
        frozen: InRanks,
        read: Callable[[str], torch.Tensor],
    ) -> "FileOfRanks":
        """A file to which no tensor has been added. `names`: parameter of the base by name in the file.

        `momenta`: names in the file that are momenta. `frozen`: those that no rank has whole. `read`: gives rank 0 any
        other tensor, by its name in the file.
        """
        rest = base.owners.make(_Rest)
        rest.read = read
        return cls(base, names, momenta, rest, frozen)

    def assembled(self, owners: Owners, writer: int) -> bytes | None:
        """The file's bytes in the rank `writer`; elsewhere None. Every rank calls it at the same time."""
        file = io.BytesIO()  # gives its bytes away without a copy
        for piece in file_pieces(self.specs, lambda stored: self._parts(stored, owners, writer)):
            if owners.rank == writer:
                file.write(piece)
        return file.getvalue() if owners.rank == writer else None

    def _parts(self, stored: str, owners: Owners, writer: int) -> Iterator[torch.Tensor]:
        """In the rank `writer`: the numbers of one tensor of the file in its stored dtype; elsewhere nothing."""
        spec = self.specs[stored]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if stored in self.frozen.names:
            assert self.frozen.pieces is not None, "it has their names"
            yield from self.frozen.pieces.parts(self.frozen.names[stored], writer)
            return
        if stored not in self.names:
            read = partial(self._read_rest, stored)
            yield from moved(owners, 0, writer, torch.Size(spec.shape).numel(), dtype, read)
            return
        name = self.names[stored]
        place = self.base.momentum_at(name) if stored in self.momenta else self.base.parameter_at(name)
        assert place is not None, "momenta are stored of a base that has some"
        (vector, first), fragment = place, next(i for i, names in enumerate(self.base.fragments) if name in names)
        last = first + torch.Size(spec.shape).numel()
        for index, (start, stop) in enumerate(self.base.layout.shards(fragment)):
            low, high = max(start, first), min(stop, last)
            if low < high:
                holder = owner_of(fragment, index, owners.ranks)
                yield from moved(owners, holder, writer, high - low, dtype, partial(vector.read, low, high))

    def _read_rest(self, stored: str) -> torch.Tensor:
        return self.rest.read(stored).reshape(-1)
