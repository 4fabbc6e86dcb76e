"""What machines of a simulated run do wrong: bits that flip, outer steps with other bits, times that are not so."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base, BaseShard
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.snapshots import rebuild as rebuild_module
from diloco_orchestrator.store.base import Store
from replica.rounds import snapshot_writer
from replica.rounds.close_round import RoundCloser
from replica.rounds.contribute import Contributor
from replica.rounds.interface import ClosedRound
from replica.training.checkpoint import Checkpoint, SavedState

if TYPE_CHECKING:
    from simulation import Simulation


def flip_bit(tensor: torch.Tensor, number: int) -> None:
    """Flip a mantissa bit of the first element, another one for each of a run's first flips."""
    bits = tensor.view(-1)[:1].view(torch.int32)
    bits ^= 1 << (15 - number % 8)


def first_tensor(base: Base) -> torch.Tensor:
    """The parameter of a base that bits flip in."""
    return base.parameters[min(base.parameters)]


@contextmanager
def machines_of(simulation: "Simulation") -> Iterator[None]:
    """Within it outer steps of `plan.other_arithmetic` differ in their last bits, as with another CPU's rounding, bits
    flip where `Simulation.coming` says, and the simulation notes what replicas load and close.
    """
    step, load, close = outer_step.step_shard, Checkpoint.load, RoundCloser._open_next_round
    manifest = Contributor._manifest
    rebuilt, write = rebuild_module._by_first_way, snapshot_writer.write_snapshot
    step_rebuilt = rebuild_module._step_shard

    def step_of_this_machine(shard: BaseShard, gradient: Iterable[torch.Tensor], outer: OuterConfig) -> None:
        simulation.maybe_flip("before step", shard.parameters)
        step(shard, (average_of_this_machine(block) for block in gradient), outer)
        simulation.maybe_flip("after step", shard.parameters)
        if simulation.computing() in simulation.plan.other_arithmetic:
            shard.parameters.copy_(torch.nextafter(shard.parameters, shard.parameters + 1))

    def average_of_this_machine(block: torch.Tensor) -> torch.Tensor:
        simulation.maybe_flip("average", block)
        return block

    def rebuilt_by_this_machine(*args: Any) -> Any:
        made = rebuilt(*args)
        if isinstance(made, rebuild_module.Tip):
            simulation.maybe_flip("rebuild", first_tensor(made.base))
        return made

    def step_rebuilt_by_this_machine(shard: BaseShard, *args: Any) -> None:
        step_rebuilt(shard, *args)
        simulation.maybe_flip("rebuild", shard.parameters)

    def write_by_this_machine(store: Store, round_: int, base: Base, *args: Any, **given: Any) -> str | None:
        number, held = len(simulation.flipped), first_tensor(base).clone()
        if not simulation.maybe_flip("snapshot", first_tensor(base)):
            return write(store, round_, base, *args, **given)
        try:
            return write(store, round_, base, *args, **given)
        finally:  # the bit was wrong in the copy that was written
            flip_bit(first_tensor(base), number)
            assert torch.equal(first_tensor(base), held)

    def load_and_note(self: Checkpoint, saved: SavedState) -> None:
        simulation.note_loaded(saved.contribution)
        load(self, saved)

    def close_and_note(self: RoundCloser, commit: Commit, average: Any) -> ClosedRound:
        attempt = self._attempt
        simulation.note_closed(attempt.replica_id, attempt.number, commit.round)
        return close(self, commit, average)

    def manifest_as_reported(self: Contributor, *args: Any, **contents: Any) -> Contribution:
        made, reported = manifest(self, *args, **contents), dict(simulation.plan.reports_s)
        return made.model_copy(update={"train_s": reported.get(made.replica_id, made.train_s)})

    Contributor._manifest = manifest_as_reported  # type: ignore[method-assign]
    Checkpoint.load = load_and_note  # type: ignore[method-assign]
    RoundCloser._open_next_round = close_and_note  # type: ignore[method-assign]
    outer_step.step_shard = step_of_this_machine
    rebuild_module._by_first_way, snapshot_writer.write_snapshot = rebuilt_by_this_machine, write_by_this_machine
    rebuild_module._step_shard = step_rebuilt_by_this_machine
    try:
        yield
    finally:
        outer_step.step_shard = step
        Contributor._manifest = manifest  # type: ignore[method-assign]
        Checkpoint.load = load  # type: ignore[method-assign]
        RoundCloser._open_next_round = close  # type: ignore[method-assign]
        rebuild_module._by_first_way, snapshot_writer.write_snapshot = rebuilt, write
        rebuild_module._step_shard = step_rebuilt
