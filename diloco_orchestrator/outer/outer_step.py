"""The outer step: averages the contributions of a round and steps the base with Nesterov momentum.

Pure arithmetic on fp32 tensors on the CPU, with the same bits on every machine. Callers choose and read contributions.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.mean import Aggregate, LeftOut, Part, ShardBlocks
from diloco_orchestrator.allreduce.spool import held
from diloco_orchestrator.allreduce.threads import in_threads, ranges
from diloco_orchestrator.allreduce.vectors import aligned
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.outer.adapter_products import LocalFactors, factors_of, step_residuals
from diloco_orchestrator.outer.arithmetic import denormals_kept, nesterov_step
from diloco_orchestrator.outer.base import Base, BaseShard, NamedVector
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.protocol.start_records import AdapterPair

ReadShard = Callable[[Contribution, int], bytes | memoryview]  # (manifest, shard index) -> verified bytes


class OuterStep(NamedTuple):
    """The result of an outer step beside the base: its average, and which contributions that leaves out."""

    average: Mapping[str, torch.Tensor]  # pseudo-gradient by parameter name; empty unless it was asked for
    left_out: Sequence[LeftOut] = ()  # of this process's shards


@torch.no_grad()
def step_shard(shard: BaseShard, gradient: Iterable[torch.Tensor], outer: OuterConfig) -> None:
    """Step one shard of a base, or a range of it, in place. `gradient`: its averaged pseudo-gradient as flat blocks.

    If it raises midway, the shard is left partly stepped.
    """
    start = 0
    for block in gradient:
        stop = start + block.numel()
        momenta = None if shard.momenta is None else shard.momenta[start:stop]
        nesterov_step(shard.parameters[start:stop], momenta, block, outer)
        start = stop


def step_in_threads(
    shard: BaseShard, average: ShardBlocks, outer: OuterConfig, kept: torch.Tensor | None = None
) -> None:
    """Step one shard of a base in place like `step_shard`, several pieces at a time in threads.

    `average`: the shard's averaged pseudo-gradient. `kept`: if given, the average is copied into it.
    """

    def step_range(start: int, stop: int) -> None:
        gradient = average(start, stop)
        step_shard(shard.part(start, stop), gradient if kept is None else _copied_to(kept[start:stop], gradient), outer)

    in_threads([functools.partial(step_range, *each) for each in ranges(len(shard.parameters))])


@denormals_kept()
def average_and_step(
    base: Base,
    fragment: int,
    named: Sequence[tuple[Contribution, float]],
    read: ReadShard,
    outer: OuterConfig,
    *,
    aggregate: str = "mean",
    codec: str | None = None,
    keep_average: bool = False,
    adapters: Sequence[AdapterPair] = (),
    averages: Aggregate | None = None,
) -> OuterStep:
    """Average the contributions to a fragment and step `base` by the average in place, shard by shard.

    This steps the shards of this process; of a base in several ranks every rank calls it. Only a block of the average
    exists at a time, except with `adapters` (averaged exactly, all in this fragment), where the average and all
    contributions are in memory. The average is returned if `keep_average`, for which the base must be whole in this
    process. Raises `PayloadCorrupt` for a contribution to another fragment,
    with the base unchanged, and the errors of `read`, with the first shards stepped.

    Args:
        named: (manifest, weight) of the contributions that a commit averages.
        read: (manifest, shard index) -> verified bytes.
        aggregate: one of `allreduce.aggregate.AGGREGATES`; with `adapters` the mean.
        codec: in which the average is encoded and decoded again (`Commit.average_codec`); None, as always with
            `adapters`: it is not.
        averages: the average, if it is computed already; None: it is computed here. Other ranks' shards of it are not
            read.
    """
    if adapters:
        return _with_adapters(base, fragment, named, read, outer, adapters)
    shards, average = base.own_shards(fragment), averages
    if average is None:
        parts = [part_of(manifest, weight, read) for manifest, weight in named]
        average = aggregate_of(aggregate, parts, [len(shard.parameters) for shard in base.shards(fragment)], codec)
    kept = [held(len(shard.parameters), "the average") for _, shard in shards] if keep_average else []
    for index, shard in shards:
        step_in_threads(shard, average.shard(index), outer, kept[index] if keep_average else None)
    found = NamedVector(base.shapes(base.fragments[fragment]), kept) if keep_average else {}
    return OuterStep(found, average.left_out)


def _with_adapters(
    base: Base,
    fragment: int,
    named: Sequence[tuple[Contribution, float]],
    read: ReadShard,
    outer: OuterConfig,
    adapters: Sequence[AdapterPair],
) -> OuterStep:
    """Do the work of `average_and_step` for a fragment with exactly averaged LoRA adapters."""
    read_once = functools.cache(lambda replica_id, index: read(manifests[replica_id], index))
    manifests = {manifest.replica_id: manifest for manifest, _ in named}
    before, shapes = factors_of(base, adapters), base.shapes(base.fragments[fragment])
    stepped = average_and_step(
        base, fragment, named, lambda manifest, index: read_once(manifest.replica_id, index), outer, keep_average=True
    )
    contributions = []
    for manifest, weight in sorted(named, key=lambda each: each[0].replica_id):
        part = part_of(manifest, weight, lambda each, index: read_once(each.replica_id, index))
        lengths = [len(shard.parameters) for shard in base.shards(fragment)]
        decoded = [Encoded(part.read(index), part.payload.codec, numel).values() for index, numel in enumerate(lengths)]
        contributions.append(LocalFactors(weight, NamedVector(shapes, decoded)))
    step_residuals(base, adapters, before, stepped.average, contributions, outer)
    return stepped


def _copied_to(shard: torch.Tensor, blocks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """`blocks` unchanged, each copied to the next elements of `shard` as it passes."""
    start = 0
    for block in blocks:
        shard[start : start + block.numel()].copy_(block)
        start += block.numel()
        yield block


@torch.no_grad()
def step_in_place(base: Base, average: Mapping[str, torch.Tensor], outer: OuterConfig) -> None:
    """Step `base` in place. `average`: averaged pseudo-gradients of any of its parameters, by name."""
    gradients = average if isinstance(average, NamedVector) else NamedVector.of(average)
    for name in gradients:
        momentum = base.momentum_at(name)
        beside = [base.parameter_at(name), gradients.at(name), *([momentum] if momentum else [])]
        for parameter, gradient, *rest in aligned(gradients.shapes[name].numel(), *beside):
            nesterov_step(parameter, rest[0] if rest else None, gradient, outer)


def step(base: Base, average: Mapping[str, torch.Tensor], outer: OuterConfig) -> Base:
    """A new base: `base` after an outer step. `average`: averaged pseudo-gradients of its parameters, by name."""
    moved = base.copy()
    step_in_place(moved, average, outer)
    return moved


def part_of(manifest: Contribution, weight: float, read: ReadShard) -> Part:
    """A contribution as a `Part`, the input of an average. Raises `PayloadCorrupt` if it has no payload.

    `read`: (manifest, shard index) -> verified bytes.
    """
    if manifest.payload is None:
        raise PayloadCorrupt(f"replica {manifest.replica_id} is averaged in round {manifest.round} without a payload.")
    return Part(manifest.replica_id, weight, manifest.payload, functools.partial(read, manifest))


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
                momentum = self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            nesterov_step(parameter, momentum, parameter.grad, self.outer)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
