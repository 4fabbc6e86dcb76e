"""`StoredShards`: reads the base of a complete snapshot shard by shard, by byte ranges of its files.

`snapshots.stored` reads a whole base at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.allreduce.owners import ALONE, Owners, merged
from diloco_orchestrator.allreduce.vectors import empty
from diloco_orchestrator.codecs.plain import little_endian, tensor_over
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.outer.base import Base, BaseLayout, BaseShard
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.snapshots.file_plan import Naming
from diloco_orchestrator.snapshots.layout import BASE, MOMENTUM
from diloco_orchestrator.snapshots.stored import StoredSnapshot, dtypes_of, files_of_base
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, read_header
from diloco_orchestrator.store.base import Store

_GAP = 2**20  # bytes between two tensors that are read with them rather than by a request of its own


@dataclass(frozen=True)
class _Place:
    """The location of a stored tensor in the bucket: byte `start` of the object `key`."""

    key: str
    start: int
    spec: TensorSpec


@dataclass(frozen=True)
class _Piece:
    """Bytes [start, stop) of an object: the little-endian float32 numbers for the tensor `target`."""

    key: str
    start: int
    target: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + 4 * self.target.numel()


class StoredShards:
    """Reads the base of a snapshot shard by shard. Raises `RecordInvalid` if its files are of another model.

    Nothing is verified until `check`, with the digests of all shards. `start`: the run's start record; exact adapters
    are not supported.
    """

    def __init__(self, store: Store, snapshot: StoredSnapshot, start: Start) -> None:
        shapes = {parameter.name: torch.Size(parameter.shape) for parameter in start.parameters}
        self.layout = BaseLayout.of(shapes, start.fragments, start.shard_numel)
        self._store, self._snapshot = store, snapshot
        self._where = f"snapshot {snapshot.round} in {store.url}"
        dtypes, naming = dtypes_of(start.parameters), Naming.of(start)
        places: dict[str, _Place] = {}
        for file in files_of_base(snapshot.record.files, naming, dtypes, self._where):
            places |= self._places(keys.snapshot(snapshot.round, file, snapshot.take))
        stored = {
            name: naming.in_file(name) if dtype == torch.float32 else BASE + name for name, dtype in dtypes.items()
        }
        self._parameters = {name: self._found(places, stored[name], shapes[name]) for name in dtypes}
        with_momenta = any(name.startswith(MOMENTUM) for name in places)
        self._momenta = {name: self._found(places, MOMENTUM + name, shapes[name]) for name in dtypes if with_momenta}

    def read(self, fragment: int, index: int) -> BaseShard:
        """A new copy of one shard of the base.

        Raises `RecordInvalid` for a truncated file, `ObjectMissing` for a missing one.
        """
        start, stop = self.layout.shards(fragment)[index]
        shard = BaseShard(empty(stop - start), empty(stop - start) if self._momenta else None)
        pieces = list(self._pieces(self._parameters, fragment, start, shard.parameters))
        if shard.momenta is not None:
            pieces += self._pieces(self._momenta, fragment, start, shard.momenta)
        for group in _neighbours(pieces):
            self._fill(group)
        return shard

    def base(self, owners: Owners) -> Base:
        """The snapshot's base, of which this process, a rank of `owners`, holds its own shards. Nothing is verified.

        Raises as `read` does.
        """
        where = self.layout.shapes, self.layout.fragments, self.layout.shard_numel, owners
        base = Base.zeros(*where, momenta=bool(self._momenta))
        for fragment in range(len(self.layout.fragments)):
            for index, shard in base.own_shards(fragment):
                shard.copy_(self.read(fragment, index))
        return base

    def check(self, digests: Sequence[str]) -> None:
        """Raise `RecordInvalid` unless shards with these digests make up the base that `snapshot.json` names."""
        self.check_digest(self.layout.digest(digests))

    def check_digest(self, digest: str) -> None:
        """Raise `RecordInvalid` unless `snapshot.json` names a base with this digest."""
        if digest != (named := self._snapshot.record.base_digest):
            raise RecordInvalid(
                f"{self._where} holds base {digest[:12]}, its record names {named[:12]}. Use another snapshot."
            )

    def check_all(self, owners: Owners = ALONE) -> None:
        """Read all shards of the base; raise `RecordInvalid` unless their digests make up that of `snapshot.json`.

        `owners`: each rank reads those that it owns.
        """
        found = merged(owners.each(StoredShards.own_digests, self, owners))
        self.check([found[place] for place in sorted(found)])

    def own_digests(self, owners: Owners) -> dict[tuple[int, int], str]:
        """Read the shards that this process owns; returns their digests by (fragment, index). Raises as `read` does."""
        return {
            (each, index): self.read(each, index).digest()
            for each in range(len(self.layout.fragments))
            for index in range(len(self.layout.shards(each)))
            if owners.owns(each, index)
        }

    def _places(self, key: str) -> dict[str, _Place]:
        """The locations of an object's tensors, by their names in it. Raises `RecordInvalid` for a bad header."""
        header = read_header(lambda start, end: self._store.get(key, start, end), f"{key} in {self._store.url}")
        found, start = {}, header.size
        for name, spec in header.specs.items():
            found[name] = _Place(key, start, spec)
            start += spec.nbytes
        return found

    def _found(self, places: dict[str, _Place], name: str, shape: torch.Size) -> _Place:
        expected = TensorSpec("float32", tuple(shape))
        if name not in places or places[name].spec != expected:
            raise RecordInvalid(f"{self._where} does not hold {name!r} as {expected}. Use another snapshot.")
        return places[name]

    def _pieces(self, places: dict[str, _Place], fragment: int, start: int, target: torch.Tensor) -> Iterator[_Piece]:
        """The stored byte ranges of a fragment's vector from element `start` on, enough to fill `target`."""
        stop, begin = start + target.numel(), 0
        for name in self.layout.fragments[fragment]:
            end = begin + self.layout.shapes[name].numel()
            first, last = max(begin, start), min(end, stop)
            if first < last:
                place = places[name]
                yield _Piece(place.key, place.start + 4 * (first - begin), target[first - start : last - start])
            begin = end

    def _fill(self, group: Sequence[_Piece]) -> None:
        """Read nearby byte ranges of one object with one request, into the tensors that they belong to.

        Raises `RecordInvalid` if the object ends before the last range does.
        """
        start, stop = group[0].start, group[-1].stop
        data = memoryview(self._store.get(group[0].key, start, stop))
        if len(data) != stop - start:
            raise RecordInvalid(
                f"{group[0].key} in {self._store.url} ends before its header says. Use another snapshot."
            )
        for piece in group:
            body = data[piece.start - start : piece.stop - start]
            piece.target.copy_(little_endian(tensor_over(body), torch.float32))


def _neighbours(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """The pieces in groups close enough to be read with one request each."""
    group: list[_Piece] = []
    for piece in sorted(pieces, key=lambda each: (each.key, each.start)):
        if group and (piece.key != group[-1].key or piece.start - group[-1].stop > _GAP):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
