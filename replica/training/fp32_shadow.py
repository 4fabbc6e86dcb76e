"""`Fp32View`: one fragment's parameters as fp32 numbers on the CPU, where the base and all averages are computed.

The base keeps fp32 precision, and an outer step has the same bits on every machine, whatever dtype and device the
model's parameters have.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from diloco_orchestrator.allreduce.vectors import FlatTensors, aligned, empty
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.replica.training.exchange import is_sharded
from diloco_orchestrator.replica.training.handover import Handover, handover_of
from diloco_orchestrator.snapshots.stored_state import StoredTensor


class Piece(NamedTuple):
    """Values of a part of a parameter, from its flat element `start` on; the first is element `at` of the fragment's
    vector.

    They have any shape, float dtype and device.
    """

    at: int
    name: str
    start: int
    values: torch.Tensor


class PseudoGradient:
    """The pseudo-gradient `base - local`: the change by training, with the sign of a gradient; computed when it is
    read.

    A local value in another dtype than float32 counts as the base plus the change by training, because the base has
    digits that the model's dtype cannot represent.

    Args:
        base: the base that training started from.
        local: the values of one fragment's parameters, as far as they lie in this process's shards of the base.
        numel: elements of the whole fragment.
    """

    def __init__(self, base: Base, local: Iterable[Piece], numel: int) -> None:
        self.numel = numel
        self._base = base
        self._local = sorted((each for each in local if each.values.numel()), key=lambda each: each.at)
        self._starts = [each.at for each in self._local]
        self._flat: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, base: Base, local: Mapping[str, torch.Tensor]) -> "PseudoGradient":
        """The pseudo-gradient of whole parameters by name, those of one fragment in its order."""
        pieces, numel = list[Piece](), 0
        for name, values in local.items():
            pieces.append(Piece(numel, name, 0, values))
            numel += values.numel()
        return cls(base, pieces, numel)

    @torch.no_grad()
    def read(self, start: int, stop: int) -> torch.Tensor:
        out, at = empty(stop - start), start
        index = bisect_right(self._starts, start) - 1
        while at < stop:
            piece = self._local[index]
            last = min(stop, piece.at + piece.values.numel())
            assert piece.at <= at < last, "only elements in this process's shards are read"
            self._subtract(piece, at - piece.at, last - piece.at, out[at - start : last - start])
            at, index = last, index + 1
        return out

    def close(self) -> None:
        """Free the local values that were copied, or received from other ranks. Nothing can be read any more."""
        self._local, self._starts, self._flat = [], [], None

    def _subtract(self, piece: Piece, first: int, last: int, out: torch.Tensor) -> None:
        """Write elements [first, last) of `base - local` to `out`. `piece`: a part of a parameter that contains
        them.
        """
        local = self._flattened(piece.values)[first:last].to("cpu")
        vector, start = self._base.parameter_at(piece.name)
        parts = ((FlatTensors([out]), 0), (vector, start + piece.start + first), (FlatTensors([local]), 0))
        for difference, base, values in aligned(out.numel(), *parts):
            if values.dtype != torch.float32:
                values = base + (values.to(torch.float32) - base.to(values.dtype).to(torch.float32))
            torch.sub(base, values, out=difference)

    def _flattened(self, values: torch.Tensor) -> torch.Tensor:
        if values.is_contiguous():
            return values.detach().view(-1)
        newest = self._flat  # of whichever thread
        if newest is None or newest[0] is not values:
            newest = self._flat = values, values.detach().contiguous().view(-1)
        return newest[1]


class Fp32View:
    """Access to one fragment's parameters that are whole tensors in this process, as float32 on the CPU.

    `mixes`: whether `install` may keep a share of the local values. If so, parameters that are not contiguous fp32 on
    the CPU get fp32 copies ("shadows") for the digits that their dtype cannot represent; otherwise the local value of
    such a parameter is the base plus the change by training. `handover`: copies the values of a round in the
    background.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], mixes: bool = False, handover: Handover | None = None
    ) -> None:
        self._parameters: dict[str, torch.Tensor] = dict(parameters)
        self._shadows = {name: _shadow(p) for name, p in self._parameters.items() if mixes and not _is_plain(p)}
        self._mixes = mixes
        self._handover = handover or Handover()
        self._set_staged: Callable[[], None] | None = None

    @torch.no_grad()
    def pseudo_gradient(self, base: Base) -> PseudoGradient:
        return self._pseudo_gradient(base, self._parameters)

    @torch.no_grad()
    def handed_over(self, base: Base) -> Callable[[], PseudoGradient]:
        """Copy the parameters now. The returned function forms `base - local` from the copies, in any thread."""
        wait = self._handover.take(self._parameters)
        return lambda: self._pseudo_gradient(base, wait())

    @torch.no_grad()
    def _pseudo_gradient(self, base: Base, values: Mapping[str, torch.Tensor]) -> PseudoGradient:
        self._update_shadows(values)
        return PseudoGradient.of(base, {**values, **self._shadows})

    @torch.no_grad()
    def stage(self, base: Base) -> None:
        if not self._mixes:
            self._set_staged = self._handover.stage(self._parameters, base.copy_into)

    @torch.no_grad()
    def install(self, base: Base, keep: float = 0.0) -> None:
        """Set the parameters to `(1 - keep) * base + keep * local`. Raises `ValueError` for `keep` without `mixes`."""
        staged, self._set_staged = self._set_staged, None
        if staged is not None and not keep:
            staged()
            return
        if not keep:
            base.copy_into(self._shadows)
            base.copy_into(self._parameters)
            return
        self._update_shadows(self._parameters)
        for name, parameter in self._parameters.items():
            if name not in self._shadows and not _is_plain(parameter):
                raise ValueError(f"a share of {name} cannot be kept: this view was made without `mixes`.")
            mixed = self._shadows.get(name, parameter)
            local = mixed.detach().clone()
            base.copy_into({name: mixed})
            # lerp, as torchft mixes. It may round otherwise on CPUs with fused multiply-add; only this replica's own
            # training depends on it, never the base.
            mixed.lerp_(local, keep)
            if mixed is not parameter:
                parameter.copy_(mixed)

    @contextmanager
    def holding(self, base: Base) -> Iterator[None]:
        """Context in which the model's parameters are those of a base; then restored. fp32 shadows stay unchanged."""
        local = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        with torch.no_grad():
            base.copy_into(self._parameters)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(local[name])

    def values(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def restore(self, values: Mapping[str, StoredTensor]) -> None:
        """Set the model's parameters to a saved result of `values`; shadows are not changed."""
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name].whole())

    def _update_shadows(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add to the fp32 copies of parameters the change by training since they were set. `values`: parameters now."""
        for name, shadow in self._shadows.items():
            parameter = values[name]
            if parameter.dtype == torch.float32:
                shadow.copy_(parameter)
            else:
                # Add only the change: the shadow keeps digits that the model's dtype cannot hold.
                shadow.add_(parameter.to("cpu", torch.float32) - shadow.to(parameter.dtype).to(torch.float32))


def views_of(
    parameters: Mapping[str, torch.nn.Parameter],
    fragments: Sequence[Sequence[str]],
    mixes: bool = False,
    in_background: bool = False,
) -> list[Fp32View]:
    """One `Fp32View` per fragment. `fragments`: the parameter names of each.

    `mixes`: whether `Fp32View.install`, which sets parameters to a new base, may keep a share of their local values; it
    costs an fp32 copy of each parameter that is not contiguous fp32 on the CPU. `in_background`: whether values are
    copied out of the model and back while it trains; those of one GPU then go through pinned memory.
    """
    parts = [{name: parameters[name] for name in names} for names in fragments]
    handover = handover_of(parts) if in_background else Handover()
    return [Fp32View(part, mixes, handover) for part in parts]


def check_whole(name: str, parameter: torch.nn.Parameter) -> None:
    """Raise `ConfigError` unless a parameter can be trained: a plain tensor with values, or a DTensor."""
    kind = type(parameter.data)
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"the model's parameter {name!r} has no shape yet (a Lazy module): call it once before it is attached."
        )
    if parameter.is_meta:
        raise ConfigError(
            f"the model's parameter {name!r} is on the meta device and has no values: load it before it is attached."
        )
    if parameter.is_complex():
        raise ConfigError(
            f"the model's parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: what is averaged are "
            "fp32 numbers, and its imaginary part would be lost. Hold real and imaginary part in one real parameter of "
            "shape (…, 2), nn.Parameter(torch.view_as_real(weight)), and use torch.view_as_complex(parameter) in "
            "forward."
        )
    if "FlatParameter" in (kind.__name__, type(parameter).__name__) or name.endswith("_flat_param"):
        raise ConfigError(
            f"the model's parameter {name!r} is a FlatParameter, of FullyShardedDataParallel (FSDP1), which hides the "
            "model's own parameters. Shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead, and remove the "
            "wrapper."
        )
    if is_sharded(parameter):
        return
    if kind is not torch.Tensor:
        raise ConfigError(
            f"the model's parameter {name!r} is a {kind.__name__}: a replica's trainable parameters must be plain "
            "tensors. Quantised weights can stay frozen beside adapters that are trained."
        )


def _is_plain(parameter: torch.Tensor) -> bool:
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()


def _shadow(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True).contiguous()
