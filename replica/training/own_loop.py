"""`make_diloco_outer_loop`: DiLoCo around a training loop that its user starts, without a coordinator or a context.

In a replica of several ranks, such as the processes of torchrun, every rank makes one. Rank 0 takes part in the rounds,
and the others follow its signals.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch.utils.hooks import RemovableHandle

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.config.schedule import SyncSchedule
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.rounds.interface import ClosedRound, ContributionFields, Rounds
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.training.attached_model import AttachedModel
from diloco_orchestrator.replica.training.diloco_loop import DiLoCoLoop
from diloco_orchestrator.replica.training.exchange import is_sharded
from diloco_orchestrator.replica.training.follower import served
from diloco_orchestrator.replica.training.fp32_shadow import views_of
from diloco_orchestrator.replica.training.fragments import FragmentView, split_fragments
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.island import Island, IslandModel, IslandView
from diloco_orchestrator.replica.training.ranks import END, GO, Ranks
from diloco_orchestrator.snapshots.layout import ModelFiles


class RoundsManager(Protocol):
    """The factory of rounds for `make_diloco_outer_loop`: an `ObjectStoreManager`, or a `MockManager` in tests."""

    @property
    def ranks(self) -> Ranks:
        """This process among the ranks of its replica."""
        ...

    def start(self, own: OwnModel, outer: OuterConfig | None) -> Rounds:
        """Join the rounds with a model. `outer`: settings of the outer optimizer; None for the run's own.

        Raises `ModelMismatch` if the model is not the run's, `ConfigError` if `outer` is not.
        """
        ...

    def leave(self) -> None:
        """End the background work of the rounds. May be repeated, and called without a `start`."""
        ...


class LeadingLoop(DiLoCoLoop):
    """The `DiLoCoLoop` of rank 0 of a replica of several ranks: it signals the others after each inner step.

    `leave`: ends the rounds' background work; called at the end of the context, where the replica leaves the run.
    """

    def __init__(
        self,
        fragments: Sequence[FragmentView],
        rounds: Rounds,
        schedule: SyncSchedule,
        fields: Callable[[], ContributionFields],
        ranks: Ranks,
        leave: Callable[[], None],
        inner_optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(fragments, rounds, schedule, fields, inner_optimizer)
        self._ranks = ranks
        self._leave = leave

    def after_inner_step(self) -> ClosedRound | None:
        closed = super().after_inner_step()
        self._ranks.signal(GO)
        return closed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._leave()
            self._ranks.signal(END)
            self._ranks.close()


class FollowingLoop:
    """The loop of a rank other than 0: a context in which it follows the signals of rank 0 after each inner step."""

    def __init__(self, island: Island, optimizers: InnerOptimizers) -> None:
        self._island = island
        self._optimizers = optimizers
        self._hooks: list[RemovableHandle] = []
        served(island)

    def __enter__(self) -> Self:
        self._hooks = self._optimizers.watch(lambda: None, lambda: served(self._island))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if error is not None:
            return
        if served(self._island).kind != END:
            raise ConfigError(
                f"rank {self._island.ranks.rank} has left the loop, and rank 0 goes on: all ranks of a replica must "
                "take the same number of steps."
            )
        self._island.ranks.close()


def make_diloco_outer_loop(
    model: torch.nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    manager: RoundsManager,
    sync_every: int,
    outer: OuterConfig | None = None,
    *,
    fragments: int | Sequence[Sequence[str]] = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    tokenizer: Any = None,
) -> DiLoCoLoop | FollowingLoop:
    """DiLoCo around `model`'s trainable parameters, as a context in which steps of `inner_optimizer` count.

    The manager's base is loaded into `model`. Buffers are published, not synchronised. In a replica of several ranks
    every rank makes the loop, around a model in DistributedDataParallel, sharded by `fully_shard`, or plain, and takes
    as many steps as the others; buffers are those of rank 0.

    Args:
        inner_optimizer: its steps are counted; it must hold `model`'s parameters.
        manager: takes part in the rounds, such as `ObjectStoreManager.join(…)`.
        sync_every: inner steps between outer steps of the same fragment (H); a multiple of the number of fragments.
        outer: the outer optimizer; with an `ObjectStoreManager` the run's, which is the default.
        fragments: the number of parts to synchronise in turn, or the parameter names of each.
        fragment_sync_delay: inner steps between publishing a fragment and waiting for its average.
        fragment_update_alpha: share of the local values kept when a fragment is synchronised, 0 to 1.
        tokenizer: saved beside the model in snapshots.

    Raises:
        ConfigError: for settings that do not fit together, parameters that cannot be averaged, such as complex ones,
            and an optimizer of another model; in the loop, for parameters that are other objects than here.
        ModelMismatch: the model is not the run's.
    """
    attached, optimizers, ranks = AttachedModel(model), InnerOptimizers(inner_optimizer), manager.ranks
    attached.check_optimized(optimizers, {})
    parameters = attached.parameters

    def fields() -> ContributionFields:
        attached.check_unchanged()
        return ContributionFields()

    names = split_fragments(parameters, fragments)
    schedule = SyncSchedule(sync_every, len(names), fragment_sync_delay, fragment_update_alpha)
    if ranks.ranks == 1 and not any(map(is_sharded, parameters.values())):
        rounds = manager.start(OwnModel(parameters, names, ModelFiles.of(attached.module, tokenizer)), outer)
        views = views_of(parameters, names, mixes=schedule.alpha > 0, in_background=schedule.delay > 0)
        return DiLoCoLoop(views, rounds, schedule, fields, inner_optimizer)
    if schedule.alpha:
        raise ConfigError(
            f"fragment_update_alpha={schedule.alpha} needs the whole model in one process; this one is sharded, or in "
            "several ranks. Set fragment_update_alpha=0."
        )
    ranks.await_all("make_diloco_outer_loop")
    island = Island(ranks, attached, optimizers, {})
    if ranks.rank:
        return FollowingLoop(island, optimizers)
    files = ModelFiles.of(attached.module, tokenizer, frozen=island.call("frozen"))
    rounds = manager.start(IslandModel(attached.parameters, names, files, island=island), outer)
    island.call("share_buffers")
    of_ranks = [IslandView(island, each) for each in names]
    loop = LeadingLoop(of_ranks, rounds, schedule, fields, ranks, manager.leave, inner_optimizer)
    ranks.signal(GO)
    return loop
