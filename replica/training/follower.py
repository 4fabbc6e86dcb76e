"""`Follower`: the training loop of a rank other than 0, which continues, waits and ends as rank 0 signals.

It counts no round and writes no record. It has the part of `TrainingSession` that the user's loop sees through
`replica.context.ReplicaSession`.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from diloco_orchestrator.replica.rounds.allocator import returning_freed_memory
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.consumed_items import ConsumedItems
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.island import Island, RankMetrics
from diloco_orchestrator.replica.training.observed_metrics import ObservedMetrics
from diloco_orchestrator.replica.training.position import DataCursor, has_position
from diloco_orchestrator.replica.training.ranks import CALL, END, GO, Ranks, Signal
from diloco_orchestrator.replica.training.round_hooks import RoundFn, RoundView

Batch = TypeVar("Batch")
_STOPPED, _PREEMPTED = 1, 2
_FLAGS = 4


def signal_state(ranks: Ranks, going: bool, step_count: int, round_: int, *, stopped: bool, preempted: bool) -> None:
    """In rank 0, at a step boundary: signal the other ranks whether training goes on (`going`), and if not, why it
    ended.

    `step_count` and `round_` are what `ReplicaSession` shows in every rank.
    """
    flags = _STOPPED * stopped + _PREEMPTED * preempted
    ranks.signal(GO if going else END, step_count, round_ * _FLAGS + flags)


def served(island: Island) -> Signal:
    """Run, in a rank other than 0, the methods that rank 0 calls, and return its signal to continue training or to end
    it.
    """
    while (signal := island.ranks.next_signal()).kind == CALL:
        assert signal.call is not None, "it is a call"
        name, args, number = signal.call
        with returning_freed_memory():
            island.ranks.kept(number, getattr(island, name)(*args))
        del args, signal  # what they hold may have been dropped by rank 0
    return signal


class Follower:
    """The training loop of a rank other than 0, which continues, waits and ends as rank 0 signals.

    `items`: compares training items with held-out ones; None if they are not compared.
    """

    def __init__(self, island: Island, optimizers: InnerOptimizers, in_loop: str, items: ConsumedItems | None) -> None:
        self.metrics = ObservedMetrics(in_loop)
        self.preempted = self.stopped = False
        self.round = 0
        self.hooks = FollowerHooks()
        self._island = island
        self._items = items
        self._going = False
        self._step_count = 0  # at the last step boundary
        self._stepped = 0  # inner steps since then
        self._cursor: DataCursor | None = None
        self._goes_on_at: tuple[int, int, Mapping[str, Any]] = (0, 0, {})  # epoch and batch of the data, and `drawn`
        self._generators: list[torch.Generator] = []  # of the data
        self._drawn: Mapping[str, Any] = {}  # their states when the epoch began
        self._rewind: Callable[[], object] = lambda: None  # sets data with a state of its own to its first batch
        self._watched = optimizers.watch(self._before_step, self._count_step)
        island.take_metrics, island.show_round, island.seek = self._take_metrics, self.hooks.call, self._seek

    @property
    def step_count(self) -> int:
        """Inner steps of the run, as rank 0 counts them."""
        return self._step_count + self._stepped

    def serve(self) -> None:
        """Run the methods that rank 0 calls, until it signals to continue training or to end it."""
        signal = served(self._island)
        self._going = signal.kind == GO
        self._step_count, self._stepped = signal.first, 0
        self.round, flags = divmod(signal.second, _FLAGS)
        self.stopped, self.preempted = bool(flags & _STOPPED), bool(flags & _PREEMPTED)

    def begin(self) -> None:
        """Wait until rank 0 has restored the replica's state and opened the round, running what it calls."""
        self.serve()

    def step(self) -> bool:
        """Run the methods that rank 0 calls between two inner steps. Returns False once training has ended."""
        if self._going:
            self.serve()
        return self._going

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """Batches of this rank's data, from where rank 0 is in its own, until training has ended."""
        self._cursor = DataCursor(data, self._begin_epoch)
        self._generators = rng.generators_in(data)
        if has_position(data) and not isinstance(data, DataLoader):  # whose first state has the order of one epoch
            saves: Any = data
            first = copy.deepcopy(saves.state_dict())
            self._rewind = lambda: saves.load_state_dict(copy.deepcopy(first))
        self._seek(*self._goes_on_at)
        while self._going:
            yield self._cursor.next()
            self.step()

    def detach(self) -> None:
        """Remove the hooks that count the optimizers' steps."""
        for hook in self._watched:
            hook.remove()

    def _before_step(self) -> None:
        if self._going and self._stepped:
            self.serve()

    def _count_step(self) -> None:
        if self._going:
            self._stepped += 1
            self.metrics.count_step()

    def _seek(self, epoch: int, batches: int, drawn: Mapping[str, Any] | None = None) -> None:
        """Go to batch number `batches` of an epoch of this rank's data. The epoch is drawn anew, as it was at first.

        The numbers are rank 0's: data with fewer batches in an epoch continues in the next one. `drawn`: what this rank
        was at then (`RankMetrics`).
        """
        drawn = drawn or {}
        self._goes_on_at = epoch, batches, drawn
        if self._cursor is not None and (epoch or batches):
            self._rewind()
            if drawn.get("epoch") == epoch:
                for generator, state in zip(self._generators, drawn["generators"], strict=False):
                    rng.restore_generator(state, generator)
            self._cursor.seek({"epoch": epoch, "batches": batches}, of_other_data=True)
        self._island.reseed()

    def _begin_epoch(self, epoch: int) -> None:
        self._island.seed(f"{self._island.replica}/epoch {epoch}")
        if self._generators:
            states = [rng.capture_generator(each) for each in self._generators]
            self._drawn = {"epoch": epoch, "generators": states}

    def _take_metrics(self) -> RankMetrics:
        values, tokens = self.metrics.taken_raw()
        return RankMetrics(values, tokens, self._items.take() if self._items else None, self._drawn)


class FollowerHooks:
    """The functions given to `on_round` in a rank other than 0, called with what rank 0 sends about each commit."""

    def __init__(self) -> None:
        self._functions: list[RoundFn] = []
        self._newest: RoundView | None = None

    def add(self, function: RoundFn) -> None:
        """Call `function` for each commit from now on, and at once with the newest that rank 0 has sent."""
        self._functions.append(function)
        if self._newest is not None:
            function(self._newest)

    def call(self, view: RoundView) -> None:
        """Call every function given to `on_round` with `view`, the metrics of a committed round."""
        self._newest = view
        for function in self._functions:
            function(view)
