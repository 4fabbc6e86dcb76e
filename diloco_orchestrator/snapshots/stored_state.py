"""`StoredState`: a saved state that was read from the bucket, of which each rank of a replica has some pieces.

Piece i is read by rank i modulo their number, whoever has written it. There is a `StoredTensor` for each tensor: rank 0
takes it whole, or each rank reads the elements that are in its own pieces (`owned`). Pieces are freed as tensors are
taken from them, so that a rank needs memory for its part of the state once.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.allreduce.shards import fetch_shard
from diloco_orchestrator.allreduce.spool import held
from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution, Shard
from diloco_orchestrator.snapshots.pieces_of_ranks import moved
from diloco_orchestrator.snapshots.saved_state import first_object
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, memory_of, read_header
from diloco_orchestrator.store.base import Store

_AT_ONCE = 2  # pieces that a rank reads at the same time
_ALIGNED = 8  # bytes: an element of any dtype begins at a multiple of its size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a stored file: dtype, shape, and where its bytes begin."""

    file: "StoredState"
    spec: TensorSpec
    start: int

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.spec.dtype)
        return found

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.shape)

    def whole(self) -> torch.Tensor:
        """The complete tensor, in the memory of rank 0, which calls this and collects the pieces of all ranks.

        The pieces are given up: the bytes of this tensor cannot be read from the file again.
        """
        data = self.file.taken(self.start, self.start + self.spec.nbytes)
        return data.view(self.dtype).view(self.shape)

    def owned(self) -> list[tuple[int, int, int]]:
        """Elements [start, stop) of the flat tensor, and the rank that has them, in order."""
        width, found = self.dtype.itemsize, list[tuple[int, int, int]]()
        for index, low, high in self.file.pieces_within(self.start, self.start + self.spec.nbytes):
            first, last, owner = (low - self.start) // width, (high - self.start) // width, self.file.owner(index)
            if found and found[-1][2] == owner:
                first = found.pop()[0]
            found.append((first, last, owner))
        return found

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop), flat on the CPU, of which this rank has the pieces."""
        width = self.dtype.itemsize
        found = self.file.own(self.start + start * width, self.start + stop * width)
        return (found.clone() if found.storage_offset() % width else found).view(self.dtype)

    def release(self) -> None:
        """Free the memory of this tensor in this rank's pieces: it will not be read again."""
        self.file.release(self.start, self.start + self.spec.nbytes)


class StoredState:
    """The pieces of a stored file that one rank has. Made in every rank at the same time."""

    def __init__(self, owners: Owners, sizes: Sequence[int], pieces: Mapping[int, torch.Tensor]) -> None:
        self._owners = owners
        self._starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self._own = dict(pieces)
        self._unread = {index: sizes[index] for index in pieces}  # bytes that nobody has taken yet

    @classmethod
    def read_from(cls, owners: Owners, store: Store, manifest: Contribution, background: Background) -> "StoredState":
        """In rank 0: read the state that a manifest names, each rank some of its pieces, and check their digests.

        Raises `PayloadCorrupt` for a deleted or changed object, `RecordInvalid` for an invalid index of pieces.
        """
        data, named = first_object(store, manifest)
        if not named:
            return cls.of(owners, data)
        if owners.ranks > 1 and any(shard.size % _ALIGNED for _, shard in named[:-1]):
            key = keys.state(manifest.replica_id, manifest.round, manifest.attempt)
            raise RecordInvalid(f"{key} names pieces that end within a number: several ranks cannot read them.")
        return owners.make(_fetched, owners, store, named, background)

    @classmethod
    def of(cls, owners: Owners, data: bytes) -> "StoredState":
        """In rank 0: a file of one piece, which this rank has."""
        made = owners.make(cls, owners, [len(data)], {})
        made._put(data)
        return made

    def _put(self, data: bytes) -> None:
        self._own[0], self._unread[0] = _copied(data), len(data)

    @property
    def held(self) -> int:
        """Bytes of the saved state that this rank holds in memory."""
        return sum(map(len, self._own.values()))

    def owner(self, index: int) -> int:
        """The rank that has piece `index`."""
        return index % self._owners.ranks

    def pieces_within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The pieces in which bytes [start, stop) are: number, and the bytes [low, high) of the file in each."""
        index = max(0, bisect.bisect_right(self._starts, start) - 1)
        while index < len(self._starts) - 1 and self._starts[index] < stop:
            low, high = max(self._starts[index], start), min(self._starts[index + 1], stop)
            if low < high:
                yield index, low, high
            index += 1

    # -- in rank 0 -------------------------------------------------------------------------------------------------

    def opened(self, where: str) -> tuple[Mapping[str, str], dict[str, StoredTensor]]:
        """The file's metadata, and its tensors by name.

        Raises `RecordInvalid`, naming `where`, if the bytes are no complete safetensors file.
        """
        size = self._starts[-1]
        header = read_header(lambda start, end: bytes(memory_of(self._sent_here(start, min(end, size)))), where)
        tensors, at = dict[str, StoredTensor](), header.size
        for name, spec in header.specs.items():
            tensors[name] = StoredTensor(self, spec, at)
            at += spec.nbytes
        if at != size:
            raise RecordInvalid(
                f"{where} has {size} bytes, where its header says {at}: it was not written by a replica."
            )
        self._owners.each(StoredState.release, self, 0, header.size)
        return header.metadata, tensors

    def taken(self, start: int, stop: int) -> torch.Tensor:
        """Bytes [start, stop), whose memory is freed here: they cannot be read again."""
        return self._sent_here(start, stop, last=True)

    def _sent_here(self, start: int, stop: int, last: bool = False) -> torch.Tensor:
        return self._owners.each(StoredState._sent, self, start, stop, last)[0]

    # -- in every rank ---------------------------------------------------------------------------------------------

    def _sent(self, start: int, stop: int, last: bool) -> torch.Tensor:
        """In rank 0: bytes [start, stop), of whichever ranks; elsewhere none. `last`: they are freed."""
        found = held(max(0, stop - start) if not self._owners.rank else 0, "a saved state", torch.uint8)
        for index, low, high in self.pieces_within(start, stop):
            read = partial(self.own, low, high)
            for part in moved(self._owners, self.owner(index), 0, high - low, torch.uint8, read):
                found[low - start : high - start] = part
        if last:
            self.release(start, stop)
        return found

    def own(self, start: int, stop: int) -> torch.Tensor:
        """Bytes [start, stop) of pieces that this rank has."""
        cut = [(i, low - self._starts[i], high - self._starts[i]) for i, low, high in self.pieces_within(start, stop)]
        parts = [self._own[index][low:high] for index, low, high in cut]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def release(self, start: int, stop: int) -> None:
        """Free this rank's pieces of which everything has been released, now that [start, stop) is."""
        for index, low, high in self.pieces_within(start, stop):
            if index in self._unread:
                self._unread[index] -= high - low
                if not self._unread[index]:
                    del self._own[index], self._unread[index]


def _fetched(owners: Owners, store: Store, named: Sequence[tuple[str, Shard]], background: Background) -> StoredState:
    own = range(owners.rank, len(named), owners.ranks)
    found = in_parallel(background, [partial(_read, store, *named[index]) for index in own], _AT_ONCE)
    return StoredState(owners, [shard.size for _, shard in named], dict(zip(own, found, strict=True)))


def _read(store: Store, key: str, shard: Shard) -> torch.Tensor:
    return _copied(fetch_shard(store, key, shard))


def _copied(data: bytes) -> torch.Tensor:
    room = held(len(data), "a saved state", torch.uint8)
    if data:
        memory_of(room)[:] = data
    return room
