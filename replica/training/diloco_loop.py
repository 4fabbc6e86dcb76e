"""`DiLoCoLoop`: the inner and outer loop of DiLoCo (arXiv 2311.08105; streaming fragments: 2501.18512).

Counts inner steps, hands over a fragment's values, waits for the round, installs the new base. Averaging, the outer
step, and with a delay their background thread, are in the `Rounds` object it is given.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

import torch
from torch.utils.hooks import RemovableHandle

from diloco_orchestrator.allreduce.vectors import Vector, has_nonzero
from diloco_orchestrator.config.schedule import SyncSchedule
from diloco_orchestrator.errors import ModelMismatch
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.replica.rounds.allocator import returning_freed_memory
from diloco_orchestrator.replica.rounds.interface import ClosedRound, ContributionFields, Rounds
from diloco_orchestrator.replica.training.fragments import FragmentView
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.snapshots.pieces_of_ranks import TensorInRanks
from diloco_orchestrator.snapshots.stored_state import StoredTensor


class DiLoCoLoop:
    """Counts inner steps, and at the end of each round synchronises one fragment of the model with the other replicas.

    `fields` returns a manifest's content beside the pseudo-gradient. Inside the loop's context every step of
    `inner_optimizer` counts; without an `inner_optimizer` the caller calls `after_inner_step`.
    """

    def __init__(
        self,
        fragments: Sequence[FragmentView],
        rounds: Rounds,
        schedule: SyncSchedule,
        fields: Callable[[], ContributionFields] = ContributionFields,
        inner_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.inner_step = 0  # of the open round
        self.published = False  # whether the open round's pseudo-gradient is published, or on its way
        self.schedule = schedule
        self._fragments = fragments
        self._rounds = rounds
        self._fields = fields
        self._inner_optimizer = inner_optimizer
        self._hooks: list[RemovableHandle] = []
        self.load_base()

    # -- a round -------------------------------------------------------------------------------------------------

    def after_inner_step(self) -> ClosedRound | None:
        """Count an inner step; publish and synchronise as scheduled. Returns the round if it was closed, else None.

        Between publishing and synchronising it raises an error of the round's background thread.
        """
        self.inner_step += 1
        if self.inner_step == self.schedule.publish_at:
            self.publish()
        if self.inner_step == self.schedule.round_steps:
            return self.synchronise()
        if self.published:
            fragment = self._fragments[self._rounds.open.fragment]
            self._rounds.close_beside_training(lambda: fragment.stage(self._rounds.base))
        return None

    def publish(self) -> None:
        """Publish the open round's pseudo-gradient; with a delay, a copy of it in the background."""
        fragment = self._fragments[self._rounds.open.fragment]
        if self.schedule.delay:
            self._publish(fragment.handed_over(self._rounds.base), in_background=True)
        else:
            self._publish(self._pseudo_gradient, in_background=False)

    def publish_part(self) -> None:
        """Publish the pseudo-gradient of the inner steps so far.

        Does nothing if the round's is published, if it is zero, or in the final evaluation round, in which nobody
        trains.
        """
        if self.published or self._rounds.open.final_evaluation:
            return
        pseudo_gradient = self._pseudo_gradient()
        base, fragment = self._rounds.base, self._rounds.open.fragment
        if has_nonzero(pseudo_gradient, base.owners, fragment, base.shard_numel):
            self._publish(lambda: pseudo_gradient, in_background=False)

    @returning_freed_memory()
    def synchronise(self) -> ClosedRound:
        """Close the open round after any number of inner steps (partial if few), and continue from the new base."""
        whole = self.inner_step == self.schedule.round_steps
        fragment = self._fragments[self._rounds.open.fragment]
        self.publish_part()
        closed = self._rounds.close()
        if closed.skipped or closed.healed:
            self.load_base()
            return closed
        # Without alpha for a partial round: its work returns by the carry, and a share kept here would count twice.
        keep = self.schedule.alpha if whole and closed.applied else 0.0
        fragment.install(self._rounds.base, keep)
        self.inner_step, self.published = 0, False
        return closed

    def _pseudo_gradient(self) -> Vector:
        return self._fragments[self._rounds.open.fragment].pseudo_gradient(self._rounds.base)

    def _publish(self, form: Callable[[], Vector], in_background: bool) -> None:
        self._rounds.publish(form, self._fields(), in_background=in_background)
        self.published = True

    # -- beside the schedule -------------------------------------------------------------------------------------

    def load_base(self) -> None:
        """Set every fragment to the base and restart the open round; inner steps taken in it are discarded."""
        for fragment in self._fragments:
            fragment.install(self._rounds.base)
        self.inner_step, self.published = 0, False

    def load_local(self, values: Mapping[str, StoredTensor], from_base: Collection[int]) -> None:
        """Load saved local parameters. Fragments whose index is in `from_base` are loaded from the base instead."""
        self.load_base()
        for index, fragment in enumerate(self._fragments):
            if index not in from_base:
                fragment.restore(values)

    def continue_after_publishing(self) -> None:
        """Continue as if this process had just published the open round's pseudo-gradient; an earlier attempt did."""
        self.inner_step, self.published = self.schedule.publish_at, True
        if self.inner_step == self.schedule.round_steps:
            self.synchronise()

    @property
    def keeps_local_values(self) -> bool:
        """Whether local parameters differ from the base after a round: with several fragments, a delay or an alpha."""
        return len(self._fragments) > 1 or self.schedule.overlaps

    def local_values(self) -> dict[str, torch.Tensor | TensorInRanks]:
        """The model's parameters as they are saved, by name, in their own dtype and on their device."""
        return {name: value for fragment in self._fragments for name, value in fragment.values().items()}

    @contextmanager
    def showing_base(self) -> Iterator[None]:
        """Context in which the model's parameters are the base's; the local parameters are restored after it."""
        if len(self._fragments) == 1 and not self.schedule.alpha:
            yield
            return
        with self.holding(self._rounds.base):
            yield

    @contextmanager
    def holding(self, base: Base) -> Iterator[None]:
        """Context in which the model has the parameters of `base`, perhaps an earlier one, then its own again."""
        with ExitStack() as stack:
            for fragment in self._fragments:
                stack.enter_context(fragment.holding(base))
            yield

    # -- as a context --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._inner_optimizer is not None:
            self._hooks = InnerOptimizers(self._inner_optimizer).watch(lambda: None, self.after_inner_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters with `requires_grad`, in name order. Raises `ModelMismatch` if there is none."""
    parameters = trainable(model)
    if not parameters:
        raise ModelMismatch(
            "the model has no parameter with requires_grad=True: there is nothing to train. Set it, or load an adapter "
            "of PEFT with from_pretrained(..., is_trainable=True)."
        )
    return parameters
