"""The outer step: averages the contributions of a round and moves the base with Nesterov momentum.

Pure arithmetic on fp32 tensors on the CPU, with the same bits on every machine. Reading contributions and choosing
them is left to the callers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.spool import held
from diloco_orchestrator.allreduce.vectors import aligned
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.outer.base import Base, NamedVector
from diloco_orchestrator.protocol.records import Contribution

ReadShard = Callable[[Contribution, int], bytes]  # (manifest, shard index) -> verified bytes


def nesterov_step(
    parameter: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, outer: OuterConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One step of SGD with Nesterov momentum; returns the new (parameter, momentum). `momentum` None: plain SGD.

    m' = mu m + g;  p' = p - lr (g + mu m')   (arXiv 2311.08105 §2, in the form of torch.optim.SGD; m starts at zero).
    All tensors have one shape and are float32 on the CPU. Multiply and add are separate calls: `torch.optim.SGD` uses
    add(alpha=...), whose bits depend on whether the CPU fuses them.
    """
    direction = gradient
    if momentum is not None:
        momentum = (momentum * outer.momentum).add_(gradient)
        direction = (momentum * outer.momentum).add_(gradient) if outer.nesterov else momentum
    return parameter - direction * outer.lr, momentum


@torch.no_grad()
def step_in_place(base: Base, average: Mapping[str, torch.Tensor], outer: OuterConfig) -> None:
    """Step `base` in place. `average`: the averaged pseudo-gradients of one fragment, by parameter name."""
    gradients = average if isinstance(average, NamedVector) else NamedVector.of(average)
    for name in gradients:
        for parameter, momentum, gradient in _blocks(base, gradients, name):
            moved, next_momentum = nesterov_step(parameter, momentum, gradient, outer)
            parameter.copy_(moved)
            if momentum is not None and next_momentum is not None:
                momentum.copy_(next_momentum)


def _blocks(
    base: Base, gradients: NamedVector, name: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """Views of a parameter, its momentum (None if there is none) and its gradient, side by side."""
    numel, momentum = gradients.shapes[name].numel(), base.momentum_at(name)
    beside = [base.parameter_at(name), gradients.at(name), *([momentum] if momentum else [])]
    for parameter, gradient, *rest in aligned(numel, *beside):
        yield parameter, rest[0] if rest else None, gradient


def average(
    base: Base, fragment: Sequence[str], named: Sequence[tuple[Contribution, float]], read: ReadShard
) -> NamedVector:
    """The weighted mean of the pseudo-gradients of one fragment: float32, by parameter name, in the shapes of `base`.

    `fragment`: its parameter names in order. `named`: (manifest, weight) of the contributions that a commit averages.
    `read`: (manifest, shard index) -> verified bytes. Raises `PayloadCorrupt` for a contribution that is not one of
    this fragment, and what `read` raises.
    """
    parts = [_part(manifest, weight, read) for manifest, weight in named]
    ranges = shard_ranges(base.numel(fragment), parts[0].payload.shard_numel)
    shards = [held(stop - start, "the average") for start, stop in ranges]
    mean_into(shards, parts)
    return NamedVector(base.shapes(fragment), shards)


def step(base: Base, average: Mapping[str, torch.Tensor], outer: OuterConfig) -> Base:
    """A new base: `base` after an outer step. `average`: as of `step_in_place`."""
    moved = base.copy()
    step_in_place(moved, average, outer)
    return moved


def _part(manifest: Contribution, weight: float, read: ReadShard) -> Part:
    if manifest.payload is None:
        raise PayloadCorrupt(f"replica {manifest.replica_id} is averaged in round {manifest.round} without a payload.")
    return Part(manifest.replica_id, weight, manifest.payload, lambda index: read(manifest, index))


class Nesterov(torch.optim.Optimizer):
    """`nesterov_step` as a torch optimizer: SGD with Nesterov momentum, with the same bits on every CPU.

    Parameters must be float32 on the CPU. `state[p]["momentum_buffer"]` holds the momentum.
    """

    def __init__(self, params: Sequence[torch.Tensor], outer: OuterConfig) -> None:
        self.outer = outer
        super().__init__(params, {"lr": outer.lr, "momentum": outer.momentum, "nesterov": outer.nesterov})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient. A closure is not called."""
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            momentum = self.state[parameter].get("momentum_buffer")
            if momentum is None and self.outer.momentum:
                momentum = torch.zeros_like(parameter)
            moved, momentum = nesterov_step(parameter, momentum, parameter.grad, self.outer)
            self.install(parameter, moved, momentum)

    @torch.no_grad()
    def install(self, parameter: torch.Tensor, value: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Set a parameter and, unless it is None, its momentum buffer to values that were computed elsewhere."""
        parameter.copy_(value)
        if momentum is not None:
            self.state[parameter]["momentum_buffer"] = momentum

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
