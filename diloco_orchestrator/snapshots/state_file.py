"""`StateFile`: a replica's saved state as one safetensors file, which the ranks of the replica write in pieces.

Piece i of the file, one object in the bucket, is written by rank i modulo their number. A rank holds the pieces that it
is writing and its own tensors, never the whole file (`snapshots.pieces_of_ranks`). `snapshots.saved_state` has the
objects in the bucket, `snapshots.stored_state` reads them in ranks.
"""

import bisect
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from diloco_orchestrator.allreduce.owners import Owners, merged
from diloco_orchestrator.allreduce.spool import held
from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Shard
from diloco_orchestrator.snapshots.pieces_of_ranks import PiecesOfRanks, TensorInRanks
from diloco_orchestrator.snapshots.saved_state import PIECES
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, encode, memory_of
from diloco_orchestrator.store.base import Store

_AT_ONCE = 2  # pieces that a rank writes at the same time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that every operation supports


class StateFile:
    """The file of a saved state, as one rank of a replica has it; made in all ranks by `StateFile.of`.

    Tensors are read when pieces are written, so that training has to wait for `write`, unless `freeze` was called.
    """

    @classmethod
    def of(
        cls,
        owners: Owners,
        head: bytes,
        specs: Mapping[str, TensorSpec],
        tensors: Mapping[str, "torch.Tensor | TensorInRanks"],
        limit: int,
    ) -> "StateFile":
        """In rank 0: the file with this header and these tensors, `specs` in the order of the file, in every rank.

        `limit`: bytes of a piece.
        """
        in_ranks = {n: (each.pieces, each.name) for n, each in tensors.items() if isinstance(each, TensorInRanks)}
        made = owners.make(cls, owners, head, specs, in_ranks, limit)
        made._fill({name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)})
        return made

    def __init__(
        self,
        owners: Owners,
        head: bytes,
        specs: Mapping[str, TensorSpec],
        in_ranks: Mapping[str, tuple[PiecesOfRanks, str]],
        limit: int,
    ) -> None:
        self._owners = owners
        self._head = head
        self._specs = list(specs.items())
        self._starts = [len(head)]  # of the tensors in the file, and where it ends
        for _, spec in self._specs:
            self._starts.append(self._starts[-1] + spec.nbytes)
        self.size = self._starts[-1]
        self._ranges = [(start, min(start + limit, self.size)) for start in range(0, self.size, limit)]
        self._rooms: dict[int, torch.Tensor] = {}  # memory for bytes of the pieces that this rank will write
        self._is_frozen = False  # whether it holds those bytes
        ranges, pieces = dict[str, Sequence[tuple[int, int, int, int]]](), dict[str, torch.Tensor]()
        for name, spec in self._specs:
            if name in in_ranks:
                of, its = in_ranks[name]
                ranges[name], pieces[name] = of.ranges[its], _bits(of.pieces[its])
            else:  # whole in rank 0, which fills it in
                ranges[name] = [(0, torch.Size(spec.shape).numel(), 0, 0)]
                pieces[name] = _bits(torch.empty(0, dtype=getattr(torch, spec.dtype), device="cpu"))
        self._pieces = pieces
        self._tensors = PiecesOfRanks(owners, ranges, pieces)

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._pieces.update({name: _bits(each) for name, each in tensors.items()})

    # -- in rank 0 -------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Copy the file as it is now, each rank the pieces that it will write: training may go on before `write`."""
        self._owners.each(
            StateFile._allocate, self
        )  # beforehand: a rank that raises in the exchange leaves others waiting
        self._owners.each(StateFile._freeze, self)

    def write(self, store: Store, replica_id: int, round_: int, attempt: int, background: Background) -> Shard:
        """Create the objects of the file, a piece in each; returns digest and size for the manifest.

        A file of one piece is one object; one of several has an index beside them. A writer that dies halfway leaves
        pieces that no manifest names; retention deletes them with the round.
        """
        who, shards, count = (replica_id, round_, attempt), dict[int, Shard](), len(self._ranges)
        pieces = [keys.state(*who)] if count == 1 else [keys.state_piece(*who, index) for index in range(count)]
        for first in range(0, count, self._owners.ranks * _AT_ONCE):
            group = {index: pieces[index] for index in range(count)[first : first + self._owners.ranks * _AT_ONCE]}
            shards |= merged(self._owners.each(StateFile._write, self, group, store, background))
        if count == 1:
            return shards[0]
        listed = json.dumps([[shards[i].digest, shards[i].size] for i in range(count)], separators=(",", ":"))
        return _create(store, keys.state(*who), encode({}, {PIECES: listed}))

    def whole(self) -> bytes:
        """The bytes of the file, all in rank 0."""
        data = self._owners.each(StateFile._assembled, self, 0, self.size, 0)[0]
        assert data is not None, "rank 0 assembles it"
        return data

    # -- in every rank ---------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        own = range(self._owners.rank, len(self._ranges), self._owners.ranks)
        sizes = {index: self._ranges[index][1] - self._ranges[index][0] for index in own}
        self._rooms = {index: held(size, "a saved state", torch.uint8) for index, size in sizes.items()}

    def _freeze(self) -> None:
        for index, (start, stop) in enumerate(self._ranges):
            at = 0
            for part in self._parts(start, stop, index % self._owners.ranks):
                memory_of(self._rooms[index])[at : at + len(part)] = part
                at += len(part)
        self._is_frozen = True
        self._pieces.clear()

    def _write(self, group: Mapping[int, str], store: Store, background: Background) -> dict[int, Shard]:
        """Create this rank's objects among those of `group`, keys by number of the piece."""
        own: dict[int, bytes] = {}
        for index in group:
            data = self._assembled(*self._ranges[index], index % self._owners.ranks)
            if data is not None:
                own[index] = data
        calls = [partial(_create_of, own, index, store, group[index]) for index in list(own)]
        return dict(in_parallel(background, calls, _AT_ONCE))

    def _assembled(self, start: int, stop: int, writer: int) -> bytes | None:
        """Bytes [start, stop) of the file in the rank `writer`; elsewhere None. Every rank calls it at the same time.

        A frozen file gives the bytes of one piece, and keeps no copy of them.
        """
        if self._is_frozen:
            room = self._rooms.pop(self._ranges.index((start, stop)), None)
            return None if room is None else room.numpy().tobytes()
        file = io.BytesIO()  # gives its bytes away without a copy
        for part in self._parts(start, stop, writer):
            file.write(part)
        return file.getvalue() if self._owners.rank == writer else None

    def _parts(self, start: int, stop: int, writer: int) -> Iterator[bytes | memoryview]:
        """In the rank `writer`: bytes [start, stop) of the file in order; elsewhere nothing."""
        is_writer = self._owners.rank == writer
        if is_writer and start < len(self._head):
            yield self._head[start:stop]
        number = max(0, bisect.bisect_right(self._starts, start) - 1)
        while number < len(self._specs) and self._starts[number] < stop:
            (name, spec), at = self._specs[number], self._starts[number]
            low, high = max(start - at, 0), min(stop - at, spec.nbytes)
            number += 1
            if low >= high:
                continue
            width = spec.nbytes // torch.Size(spec.shape).numel()
            done = low // width * width
            for part in self._tensors.parts(name, writer, low // width, -(-high // width)):
                memory = memory_of(part)
                if is_writer:
                    yield memory[max(low - done, 0) : high - done]
                done += len(memory)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The flat numbers of a tensor as integers of the same bits, in its memory if they are adjacent there."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_BITS[flat.element_size()])


def _create_of(own: dict[int, bytes], index: int, store: Store, key: str) -> tuple[int, Shard]:
    return index, _create(store, key, own.pop(index))


def _create(store: Store, key: str, data: bytes) -> Shard:
    store.create(key, data)
    return Shard(digest=bulk_digest(data), size=len(data))
