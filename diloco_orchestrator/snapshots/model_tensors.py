"""The tensors of a model under the names used in records: trained, frozen (no gradient), and persistent buffers.

Frozen parameters are equal in every replica (`start.json` has their digest). Buffers such as BatchNorm's change in
training and are each replica's own; `snapshots.buffers` has those of a base.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from diloco_orchestrator.allreduce.threads import workers
from diloco_orchestrator.clock import Background, NoBackground, in_parallel
from diloco_orchestrator.protocol.digests import BulkDigest, BulkHasher, bulk_digest
from diloco_orchestrator.protocol.start_records import FrozenTensors
from diloco_orchestrator.snapshots.pieces_of_ranks import PiecesOfRanks
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, memory_of

_COMPILED = "_orig_mod"  # the name under which `torch.compile` holds the module that it wraps
_RECOMPUTED = "_checkpoint_wrapped_module"  # the same of torch's `checkpoint_wrapper`, which a `state_dict` leaves out


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers, which share its parameters: `torch.compile`, DistributedDataParallel, DataParallel."""
    while True:
        inner = getattr(model, _COMPILED, None)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def class_name(model: torch.nn.Module) -> str:
    """The name of a model's class, without the class that `fully_shard` derives from it."""
    kind = type(model)
    return (
        kind.__bases__[-1].__name__ if any(each.__name__ == "FSDPModule" for each in kind.__bases__) else kind.__name__
    )


def plain_name(name: str) -> str:
    """A parameter's name without the names of wrappers around parts of the model, of `torch.compile` and of activation
    checkpointing.
    """
    return name.replace(f"{_COMPILED}.", "").replace(f"{_RECOMPUTED}.", "")


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters by name, in name order; a tied parameter has one entry."""
    found = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    return {name: found[name] for name in sorted(found)}


class Untrained:
    """The frozen parameters and persistent buffers of one model, by state-dict name; a tied tensor has one name.

    Frozen parameters of which this process holds a piece are in `sharded`, with their whole shape; the others are in
    `frozen`.

    Args:
        trained: names of the trained parameters.
        first: values of frozen parameters that the model no longer holds.
        pieces: the sharded frozen parameters, in all ranks of the replica.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: set[str],
        first: Mapping[str, torch.Tensor] | None = None,
        pieces: PiecesOfRanks | None = None,
    ) -> None:
        state = {plain_name(name): each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
        buffers = {plain_name(name) for name, _ in model.named_buffers()} & state.keys()
        first_name = {address(state[name]): name for name in trained if state[name].numel()}
        self.tied: dict[str, str] = {}  # second names of tensors that have another one, which files hold
        self.frozen: dict[str, torch.Tensor] = {}
        self.sharded: dict[str, TensorSpec] = {}
        self.pieces = pieces
        for name, tensor in state.items():
            if name in trained:
                continue
            begin = address(tensor)
            if tensor.numel() and begin in first_name:
                self.tied[name] = first_name[begin]
                continue
            first_name[begin] = name
            if name in buffers:
                continue
            if (whole := whole_here(tensor)) is None:
                self.sharded[name] = TensorSpec.of(tensor)
            else:
                self.frozen[name] = (first or {}).get(name, whole)
        self.buffers = LiveBuffers(model, sorted(buffers - self.tied.keys()))
        self._described: FrozenTensors | None = None

    def describe_frozen(self, background: Background | None = None) -> FrozenTensors | None:
        """Digest, number and bytes of the frozen tensors, hashed at the first call, in parallel; None without any."""
        specs = self.sharded | {name: TensorSpec.of(tensor) for name, tensor in self.frozen.items()}
        if self._described is None and specs:
            size = sum(spec.nbytes for spec in specs.values())
            digest = digest_of(self.frozen, background, self._sharded_lines())
            self._described = FrozenTensors(digest=digest, tensors=len(specs), size=size)
        return self._described

    def _sharded_lines(self) -> dict[str, str]:
        if self.pieces is None or not self.sharded:
            return {}
        digests = self.pieces.digests(sorted(self.sharded))
        return {name: _line(name, spec, digests[name]) for name, spec in self.sharded.items()}


class LiveBuffers:
    """The persistent buffers of a model in training. `first`: copies of their values at the run's start, on the CPU."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        # Modules and not their names, which change when a part of the model is compiled later.
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {
            plain_name(f"{path}.{attribute}" if path else attribute): (module, attribute)
            for path, module in model.named_modules()
            for attribute, _ in module.named_buffers(recurse=False)
        }
        self.first = {name: _copied(self._get(name)) for name in names}

    def digest(self) -> BulkDigest | None:
        """The digest of the buffers' values at the run's start; None for a model without persistent buffers."""
        return digest_of(self.first) if self.first else None

    def adopt(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace the recorded first values of buffers by those that another replica wrote into the first snapshot."""
        for name in values.keys() & self.first.keys():
            self.first[name] = _copied(values[name])
        if values.keys() & self.first.keys():
            self.load({})

    def changed(self) -> dict[str, torch.Tensor]:
        """Copies, on the CPU, of the buffers whose bytes differ from the first values."""
        now = {name: _copied(self._get(name)) for name in self.first}
        return {name: value for name, value in now.items() if not same_bytes(value, self.first[name])}

    @torch.no_grad()
    def load(self, changed: Mapping[str, torch.Tensor]) -> None:
        """Set the model's buffers to `changed`, a result of `changed()`; the others get their first values."""
        for name, first in self.first.items():
            value, buffer = changed.get(name, first), self._get(name)
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:  # a buffer that grows in training
                owner, attribute = self._owners[name]
                setattr(owner, attribute, value.to(buffer.device, copy=True))

    def _get(self, name: str) -> torch.Tensor:
        owner, attribute = self._owners[name]
        return owner.get_buffer(attribute)


def digest_of(
    tensors: Mapping[str, torch.Tensor],
    background: Background | None = None,
    others: Mapping[str, str] | None = None,
) -> BulkDigest:
    """The digest over names, dtypes, shapes and bytes of tensors on any device, in name order.

    `others`: of further tensors, by name, the JSON list of name, dtype, shape and digest (`_line`).
    """

    def line(name: str) -> str:
        hasher = BulkHasher()
        for part in _plain(tensors[name]):
            hasher.update(memory_of(part.cpu()))
        return _line(name, TensorSpec.of(tensors[name]), hasher.digest())

    calls = [lambda name=name: line(name) for name in sorted(tensors)]
    found = dict(zip(sorted(tensors), in_parallel(background or NoBackground(), calls, workers()), strict=True))
    found |= others or {}
    return bulk_digest("\n".join(found[name] for name in sorted(found)).encode())


def _line(name: str, spec: TensorSpec, digest: BulkDigest) -> str:
    return json.dumps([name, spec.dtype, list(spec.shape), digest])


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors on the CPU have the same dtype, shape and bytes: NaN equals NaN, and 0 not -0."""
    return TensorSpec.of(ours) == TensorSpec.of(theirs) and memory_of(ours) == memory_of(theirs)


def address(tensor: Any) -> int:
    """The memory address where a tensor's numbers begin, of a DTensor this process's piece: the same for tied ones."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.data_ptr()) or -id(local)  # an empty piece is tied to nothing


def whole_here(tensor: Any) -> torch.Tensor | None:
    """A tensor itself, or that of a DTensor's numbers if this process holds all of them; None for a piece."""
    if not hasattr(tensor, "to_local"):
        found: torch.Tensor = tensor
        return found
    local: torch.Tensor = tensor.detach().to_local()
    return local.view(tensor.shape) if local.numel() == tensor.numel() else None


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the numbers of a tensor subclass, such as a quantised one; else the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
        return
    for name in flatten()[0]:
        yield from _plain(getattr(tensor, name))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
