"""`Base`: the global parameters and outer momenta between two rounds, as flat shards, and their digest.

`outer.outer_step` steps a base; `snapshots` stores it. No code outside this package depends on the shards.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from diloco_orchestrator.allreduce.owners import ALONE, Owners, merged
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.spool import check_fits, held
from diloco_orchestrator.allreduce.threads import RANGE, in_threads, workers
from diloco_orchestrator.allreduce.vectors import SHARD_NUMEL, FlatTensors, aligned
from diloco_orchestrator.clock import Background, NoBackground, in_parallel
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.protocol.digests import BulkDigest, BulkHasher, bulk_digest


class NamedVector(Mapping[str, torch.Tensor]):
    """Tensors by name, consecutive in one flat vector.

    A tensor that lies in one shard shares its memory, any other is a copy: neither may be written to.

    Args:
        shapes: of every tensor, in the order of the vector.
        shards: the vector, float32 on the CPU.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], shards: Sequence[torch.Tensor]) -> None:
        self.shapes = dict(shapes)
        self.shards = list(shards)
        self.vector = FlatTensors(shards)
        self._starts: dict[str, int] = {}
        start = 0
        for name, shape in self.shapes.items():
            self._starts[name] = start
            start += shape.numel()
        if start != self.vector.numel:
            raise ValueError(f"a vector of {self.vector.numel} elements cannot hold {start}.")

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A vector over the memory of `tensors`, or over copies of those that are not contiguous float32 on the CPU."""
        flat = [tensor.detach().to("cpu", torch.float32).contiguous() for tensor in tensors.values()]
        return cls({name: tensor.shape for name, tensor in tensors.items()}, flat)

    def at(self, name: str) -> tuple[FlatTensors, int]:
        """The flat vector, and the index at which the tensor `name` begins in it."""
        return self.vector, self._starts[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        start, numel = self._starts[name], self.shapes[name].numel()
        pieces = [view for (view,) in aligned(numel, self.at(name), longest=SHARD_NUMEL)]
        flat = pieces[0] if len(pieces) == 1 else self.vector.read(start, start + numel)
        return flat.view(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True)
class BaseShard:
    """Views of the parameters and momenta of one shard of a base. Writing to them changes the base."""

    parameters: torch.Tensor  # (n,) float32
    momenta: torch.Tensor | None  # (n,) float32; None if the outer optimizer has none

    def part(self, start: int, stop: int) -> "BaseShard":
        """Views of elements [start, stop) of this shard's parameters and momenta."""
        return BaseShard(self.parameters[start:stop], None if self.momenta is None else self.momenta[start:stop])

    def equals(self, other: Self) -> bool:
        """Whether both shards have the same bits."""
        if not _same_bits(self.parameters, other.parameters):
            return False
        if self.momenta is None or other.momenta is None:
            return self.momenta is other.momenta
        return _same_bits(self.momenta, other.momenta)

    def copy_(self, other: Self) -> None:
        """Copy the values of another shard of the same length into this one."""
        self.parameters.copy_(other.parameters)
        if self.momenta is not None and other.momenta is not None:
            self.momenta.copy_(other.momenta)

    def digest(self) -> BulkDigest:
        """The digest of the shard: of the parameters' little-endian bytes, then of the momenta's."""
        hasher = BulkHasher()
        for tensor in (self.parameters, self.momenta):
            if tensor is not None:
                hasher.update(tensor.numpy().astype("<f4", copy=False).view("u1").data)
        return hasher.digest()


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


class _ByName(Mapping[str, torch.Tensor]):
    """The tensors of several flat vectors in name order. `vectors`: tensor name -> the vector that holds it."""

    def __init__(self, vectors: Mapping[str, NamedVector]) -> None:
        self._vectors = vectors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._vectors[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._vectors))

    def __len__(self) -> int:
        return len(self._vectors)


@dataclass(frozen=True)
class BaseLayout:
    """The layout of a base: the parameters named in each fragment are one flat vector, cut into shards."""

    shapes: Mapping[str, torch.Size]
    fragments: tuple[tuple[str, ...], ...]
    shard_numel: int

    @classmethod
    def of(cls, shapes: Mapping[str, torch.Size], fragments: Sequence[Sequence[str]], shard_numel: int) -> Self:
        """The layout for parameters of these shapes. `fragments`: by default one with all names in order."""
        return cls(dict(shapes), tuple(tuple(names) for names in fragments) or (tuple(sorted(shapes)),), shard_numel)

    def shards(self, fragment: int) -> list[tuple[int, int]]:
        """[start, stop) of the shards of a fragment's vector, in order."""
        numel = sum(self.shapes[name].numel() for name in self.fragments[fragment])
        return shard_ranges(numel, self.shard_numel)

    def digest(self, shards: Sequence[BulkDigest]) -> BulkDigest:
        """The digest of a base: over the digest of its layout and `shards`, those of all its shards in order."""
        fragments = [[[name, list(self.shapes[name])] for name in names] for names in self.fragments]
        layout = {"fragments": fragments, "shard_numel": self.shard_numel}
        words = json.dumps(layout, sort_keys=True, separators=(",", ":"))
        return bulk_digest("\n".join([bulk_digest(words.encode()), *shards]).encode())


class Base:
    """The global model between two rounds: float32 on the CPU. Only an outer step changes it.

    Each fragment is a flat vector of its parameters in the given order, cut into shards, with a momentum shard beside
    each. In a replica of several ranks each has a `Base` of the same layout with the shards that it owns; those of
    other ranks are tensors on torch's meta device, of their length and without memory.

    Args:
        parameters: their values, any float dtype; they are copied.
        momenta: of every parameter; empty if the outer optimizer has no momentum.
        fragments: the parameter names of each; by default one fragment holds all, in name order.
        shard_numel: elements of a shard; the last one of a fragment may be shorter.
    """

    owners: Owners

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        momenta: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]] = (),
        shard_numel: int = SHARD_NUMEL,
    ) -> None:
        self._hold({name: tensor.shape for name, tensor in parameters.items()}, fragments, shard_numel)
        self.fill(parameters, momenta)

    @classmethod
    def zeros(
        cls,
        shapes: Mapping[str, torch.Size],
        fragments: Sequence[Sequence[str]] = (),
        shard_numel: int = SHARD_NUMEL,
        owners: Owners = ALONE,
        *,
        momenta: bool = False,
    ) -> Self:
        """A base to be filled: parameters of these shapes, all zero, and with `momenta` zero momenta.

        `owners`: the processes that hold its shards; this one holds its own.
        """
        base = cls.__new__(cls)
        base._hold(shapes, fragments, shard_numel, owners)
        if momenta:
            base._add_momenta()
        return base

    def _hold(
        self,
        shapes: Mapping[str, torch.Size],
        fragments: Sequence[Sequence[str]],
        shard_numel: int,
        owners: Owners = ALONE,
    ) -> None:
        self.owners = owners
        self.layout = BaseLayout.of(shapes, fragments, shard_numel)
        self.fragments, self.shard_numel = self.layout.fragments, shard_numel
        self._parameters = self._vectors(shapes, "the base's parameters")
        self._momenta: dict[str, NamedVector] = {}

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, torch.Tensor], momenta: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of any float dtype into the base's parameters and momenta of the same names, as fp32.

        Others keep their values, zero in a new base; with the first momenta given all others begin at zero. Raises
        `KeyError` for a name that the base lacks. Shapes are not checked: they must be those of the base.
        """
        if momenta and not self._momenta:
            self._add_momenta()
        for vectors, tensors in ((self._parameters, parameters), (self._momenta, momenta)):
            for name, tensor in tensors.items():
                theirs = FlatTensors([tensor.contiguous()])
                for ours, values in aligned(tensor.numel(), vectors[name].at(name), (theirs, 0), longest=SHARD_NUMEL):
                    ours.copy_(values)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Set elements [start, start + n) of a parameter to `values`, (n,) in any float dtype.

        Elements in shards that another rank holds are skipped.
        """
        vector, first = self.parameter_at(name)
        beside = (vector, first + start), (FlatTensors([values]), 0)
        for ours, theirs in aligned(values.numel(), *beside, longest=SHARD_NUMEL):
            if not ours.is_meta:
                ours.copy_(theirs)

    def _add_momenta(self) -> None:
        self._momenta = self._vectors(self.shapes(list(self._parameters)), "the base's momenta")

    @classmethod
    def fresh(
        cls,
        parameters: Mapping[str, torch.Tensor],
        outer: OuterConfig,
        fragments: Sequence[Sequence[str]] = (),
        shard_numel: int = SHARD_NUMEL,
    ) -> Self:
        """The first base of a run: copies of `parameters`, with zero momenta if `outer` has momentum."""
        base = cls(parameters, {}, fragments, shard_numel)
        if outer.momentum:
            base._add_momenta()
        return base

    def copy(self) -> "Base":
        """A new base with the same values in memory of its own, copied shard by shard."""
        base = Base.zeros(self.shapes(list(self._parameters)), self.fragments, self.shard_numel)
        if self._momenta:
            base._add_momenta()
        for fragment in range(len(self.fragments)):
            for ours, theirs in zip(base.shards(fragment), self.shards(fragment), strict=True):
                ours.copy_(theirs)
        return base

    def _vectors(self, shapes: Mapping[str, torch.Size], what: str) -> dict[str, NamedVector]:
        """A flat vector of zeros for each fragment, by parameter name. `what`: names the vectors in errors."""
        found: dict[str, NamedVector] = {}
        for fragment, names in enumerate(self.fragments):
            numels = [stop - start for start, stop in self.layout.shards(fragment)]
            check_fits(4 * max(numels, default=0), what)
            shards = [
                held(numel, what) if self.owners.owns(fragment, index) else torch.empty(numel, device="meta")
                for index, numel in enumerate(numels)
            ]
            found |= dict.fromkeys(names, NamedVector({name: shapes[name] for name in names}, shards))
        return found

    # -- by name -------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every trainable parameter by name, in name order: float32 on the CPU, not to be written to.

        One that lies in shards of other ranks, even in part, cannot be read.
        """
        return _ByName(self._parameters)

    @property
    def momenta(self) -> Mapping[str, torch.Tensor]:
        """The outer momentum of every parameter, by name, read as `parameters`; empty if the optimizer has none."""
        return _ByName(self._momenta)

    def shapes(self, names: Sequence[str]) -> dict[str, torch.Size]:
        """The shapes of these parameters, in the order of `names`."""
        return {name: self._parameters[name].shapes[name] for name in names}

    def numel(self, names: Sequence[str]) -> int:
        """The number of elements of the parameters `names` together."""
        return sum(shape.numel() for shape in self.shapes(names).values())

    def momentum(self, name: str) -> torch.Tensor | None:
        """A copy of the outer momentum of a parameter; None if the outer optimizer has none."""
        return self.momenta[name].clone() if self._momenta else None

    @torch.no_grad()
    def copy_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy each parameter into the tensor of its name, whose dtype and device may differ."""
        on_cpu: list[Callable[[], object]] = []
        for name, tensor in tensors.items():
            if tensor.is_contiguous():
                theirs, longest = FlatTensors([tensor]), RANGE if tensor.is_cpu else SHARD_NUMEL
                for ours, target in aligned(tensor.numel(), self.parameter_at(name), (theirs, 0), longest=longest):
                    if target.is_cpu:
                        on_cpu.append(partial(target.copy_, ours))
                    else:
                        target.copy_(ours)  # in this thread's stream
            else:
                tensor.copy_(self.parameters[name])
        in_threads(on_cpu)

    def holds(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether every parameter of the base equals the tensor of its name in `parameters`."""
        return all(
            torch.equal(ours, theirs)
            for name in self._parameters
            for ours, theirs in aligned(
                parameters[name].numel(), self.parameter_at(name), NamedVector.of({name: parameters[name]}).at(name)
            )
        )

    # -- as flat vectors -----------------------------------------------------------------------------------------

    def parameter_at(self, name: str) -> tuple[FlatTensors, int]:
        """The flat vector that holds a parameter, and the index at which the parameter begins."""
        return self._parameters[name].at(name)

    def momentum_at(self, name: str) -> tuple[FlatTensors, int] | None:
        """The flat vector that holds a momentum, and its first index; None if the outer optimizer has no momentum."""
        return self._momenta[name].at(name) if self._momenta else None

    # -- as shards -----------------------------------------------------------------------------------------------

    def own_shards(self, fragment: int) -> list[tuple[int, BaseShard]]:
        """The shards of a fragment that are held by this process, in order, each with its index."""
        return [pair for pair in enumerate(self.shards(fragment)) if self.owners.owns(fragment, pair[0])]

    def shards(self, fragment: int) -> list[BaseShard]:
        """The shards of a fragment, in order. Those of other ranks hold no numbers."""
        names = self.fragments[fragment]
        if not names:
            return []
        parameters = self._parameters[names[0]].shards
        momenta = self._momenta[names[0]].shards if self._momenta else [None] * len(parameters)
        return [BaseShard(*pair) for pair in zip(parameters, momenta, strict=True)]

    def digest(self, background: Background | None = None) -> BulkDigest:
        """The digest of the base: of its layout and of all its shards, each hashed by the rank that owns it.

        `background`: hashes several shards at once.
        """
        found = merged(self.owners.each(_own_digests, self, background or NoBackground()))
        return self.layout.digest([found[place] for place in sorted(found)])


def _own_digests(base: Base, background: Background) -> dict[tuple[int, int], BulkDigest]:
    """The digest of each shard of a base in this process, by (fragment, index)."""
    own = {
        (fragment, index): shard
        for fragment in range(len(base.fragments))
        for index, shard in base.own_shards(fragment)
    }
    return dict(zip(own, in_parallel(background, [each.digest for each in own.values()], workers()), strict=True))
