"""The outer step: averages the contributions of a round and moves the base with Nesterov momentum.

Pure arithmetic on fp32 tensors on the CPU, with the same bits on every machine. Reading contributions and choosing
them is left to the callers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.vectors import aligned, empty
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
        momentum = _next_momentum(momentum, gradient, outer)
        direction = (momentum * outer.momentum).add_(gradient) if outer.nesterov else momentum
    return parameter - direction * outer.lr, momentum


def _next_momentum(momentum: torch.Tensor, gradient: torch.Tensor, outer: OuterConfig) -> torch.Tensor:
    return (momentum * outer.momentum).add_(gradient)


class OuterStep:
    """An outer step of a base whose average is known: first only its digest, then in place.

    As long as a commit names the digest of the base that comes out, and another commit may win the race, the base is
    stepped twice: block by block into the digest, and in place once it is certain that the step is the commit's. So
    only the average is held beside the base.

    `average`: the averaged pseudo-gradients of one fragment, by parameter name.
    """

    def __init__(self, base: Base, average: Mapping[str, torch.Tensor], outer: OuterConfig) -> None:
        self.base = base
        self.average = average if isinstance(average, NamedVector) else NamedVector.of(average)
        self._outer = outer

    @torch.no_grad()
    def digest(self) -> str:
        """The digest that the base has after the step. Changes nothing."""
        return self.base.digest_with(self._next_parameter, self._next_momentum)

    @torch.no_grad()
    def take(self) -> None:
        """Step the base in place. To be called once."""
        for name in self.average:
            for parameter, momentum, gradient in self._blocks(name):
                moved, next_momentum = nesterov_step(parameter, momentum, gradient, self._outer)
                parameter.copy_(moved)
                if momentum is not None and next_momentum is not None:
                    momentum.copy_(next_momentum)

    def _next_parameter(self, name: str) -> Iterator[torch.Tensor]:
        if name not in self.average:
            yield from self.base.parameter_pieces(name)
            return
        for block in self._blocks(name):
            yield nesterov_step(*block, self._outer)[0]

    def _next_momentum(self, name: str) -> Iterator[torch.Tensor]:
        if name not in self.average:
            yield from self.base.momentum_pieces(name)
            return
        for _, momentum, gradient in self._blocks(name):
            assert momentum is not None, "only asked for where there are momenta"
            yield _next_momentum(momentum, gradient, self._outer)

    def _blocks(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Views of a parameter, its momentum (None if there is none) and its gradient, side by side."""
        numel, momentum = self.average.shapes[name].numel(), self.base.momentum_at(name)
        beside = [self.base.parameter_at(name), self.average.at(name), *([momentum] if momentum else [])]
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
    shards = [empty(stop - start) for start, stop in ranges]
    mean_into(shards, parts)
    return NamedVector(base.shapes(fragment), shards)


def step(base: Base, average: Mapping[str, torch.Tensor], outer: OuterConfig) -> Base:
    """A new base: `base` after an outer step. `average`: as of `OuterStep`."""
    moved = base.copy()
    OuterStep(moved, average, outer).take()
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
