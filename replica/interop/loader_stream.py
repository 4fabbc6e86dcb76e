"""`LoaderStream`: one rank's part of the batches of another library's data loader, as an endless stream.

All ranks of all replicas iterate over the same batches in the same order and each takes its own, so that the data is
divided without a change to the loader. The position, and the random state at the epoch's begin, are the stream's
`state_dict`, so that a restarted attempt goes on with the next batch. Prefetched batches count once they are taken.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.dealt_order import DealtOrder

log = logging.getLogger(__name__)

# Settings of a DataLoader, beside those that say which items a batch has.
_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
_DIVIDERS = ("BatchSamplerShard", "IterableDatasetShard")  # classes of accelerate, which is not imported
_END = object()


@dataclass(frozen=True)
class Deal:
    """The batches of a stream, numbered from 0 over all epochs, that one rank takes.

    Each `of * block` consecutive batches are divided among the replicas: the `ranks` ranks of this one take `ranks *
    block` of them, after those of replicas with `before` ranks in all, one by one in turn. `rank`: this one.
    """

    before: int = 0
    ranks: int = 1
    rank: int = 0
    of: int = 1
    block: int = 1
    even: bool = False  # whether all batches have one size, as collectives of the ranks of a replica need it

    @classmethod
    def over(cls, ranks: Sequence[int], replica_id: int, rank: int = 0, block: int = 1) -> "Deal":
        """The assignment of batches to rank `rank` of a replica.

        `ranks`: their number in each replica, in the order of ids. `block`: batches that a rank takes in a row, before
        other replicas take theirs.
        """
        return cls(sum(ranks[:replica_id]), ranks[replica_id], rank, sum(ranks), block, even=max(ranks) > 1)

    def takes(self, index: int) -> bool:
        """Whether this rank takes batch `index`."""
        within = index % (self.of * self.block) - self.before * self.block
        return 0 <= within < self.ranks * self.block and within % self.ranks == self.rank

    def count(self, batches: int) -> int:
        """The number of batches that this rank takes of the first `batches`."""
        cycles, rest = divmod(batches, self.of * self.block)
        within = min(max(rest - self.before * self.block, 0), self.ranks * self.block)
        return cycles * self.block + (within + self.ranks - 1 - self.rank) // self.ranks


class LoaderStream:
    """Iterates over `loader` again and again; yields the batches of one rank.

    Args:
        loader: a torch DataLoader, plain or prepared by accelerate, or any other object that can be iterated again.
        deal: which of the batches are this rank's.
        ended: whether no more batches are wanted; then the iterator stops.
        begin: called before each batch is made.

    Raises `ConfigError` for a loader that divides its batches over the ranks in a way that cannot be undone.
    """

    def __init__(
        self,
        loader: Any,
        deal: Deal,
        seed: int = 0,
        ended: Callable[[], bool] = lambda: False,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = 0
        self._loader = loader
        self._deal, self._seed = deal, seed
        self._ended, self._prepare = ended, begin
        base = _undivided(loader, deal.even)
        self._order, self._chance = DealtOrder(shared=deal.of > deal.ranks), rng.SeparateDraws()
        self._length = _length_of(base)
        kind = _MapEpochs if _has_indices(base) else _Epochs
        self._epochs: _Epochs = kind(base, deal, self._order, self._chance)
        self._generators = rng.generators_in(loader)
        self._before = 0  # batches of all earlier epochs, whoever took them
        self._taken = 0  # by this rank, of this epoch
        self._batches: Iterator[Any] | None = None
        self._states: list[dict[str, Any]] = []  # of the loader's own generators when the epoch began
        self._unseeded: dict[str, Any] | None = None  # the process's when it began, in an epoch of an earlier version
        self._earlier: Mapping[str, Any] = {}  # the order of the epoch that an earlier attempt was in

    @property
    def dataset(self) -> Any:
        """The loader's dataset, which trainers read."""
        return getattr(self._loader, "dataset", None)

    @property
    def dealt(self) -> DealtOrder | None:
        """Digests of the order in which replicas share the epoch's batches; None if an old version began the epoch."""
        return self._order if self._unseeded is None else None

    def passes(self, batches: int) -> float | None:
        """Passes over the data in which this rank takes so many batches; None for a stream without a length."""
        return None if self._length is None else batches * self._deal.of / self._length

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch of this rank. Raises `ConfigError` if the loader yields none."""
        if self._ended():
            raise StopIteration
        self._prepare()
        while True:
            if self._batches is None:
                self._open()
            assert self._batches is not None
            for batch in self._batches:
                self._taken += 1
                return batch
            if not self._epochs.seen:
                raise ConfigError(
                    "the trainer's data loader yields no batch. Check train_dataset; an iterable dataset must be one "
                    "that can be iterated again."
                )
            before, self._before = self._before, self._before + self._epochs.seen
            # More than this epoch has: where rank 0 of the replica is in it still, another rank may be in the next.
            self._taken -= min(self._taken, self._deal.count(self._before) - self._deal.count(before))
            self.epoch, self._batches = self.epoch + 1, None
            self._unseeded, self._earlier = None, {}

    def state_dict(self) -> dict[str, Any]:
        drawn = self._batches is not None
        state = {
            "epoch": self.epoch,
            "taken": self._taken,
            "before": self._before,
            "of": self._deal.of * self._deal.block,
            "generators": self._states if drawn else self._capture(),
            "order": self._order.state() if drawn else dict(self._earlier),
        }
        return state if self._unseeded is None else {**state, "chance": {"process": self._unseeded}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, which rank 0 of this replica returned. The caller restores the process's random state.

        Where the batches were dealt over another number of ranks, this rank continues after all those that they took.
        """
        self.epoch, self._taken, self._before = state["epoch"], state["taken"], state["before"]
        deal, cycle = self._deal, self._deal.of * self._deal.block
        taken = replace(deal, rank=0).count(self._before) + self._taken
        if (dealt := state.get("of", cycle)) != cycle:
            cycles = -(-self._before // dealt) - (-self._taken // deal.block)
            taken = -(-cycles * dealt // cycle) * deal.block
        self._taken = taken - self._deal.count(self._before)
        self._earlier, chance = state.get("order", {}), state.get("chance", {})
        self._unseeded = chance.get("process")
        if self._unseeded is not None:
            log.warning(
                "this run began with a version that drew the order of the training data from each replica's own random "
                "numbers, so that replicas may have trained the same items. Epoch %d goes on in the order that it has; "
                "later ones have an order of the whole run.",
                self.epoch,
            )
        states = state["generators"] if "generators" in state else chance["generators"]
        if len(states) != len(self._generators):
            raise ConfigError(
                f"the trainer's data loader has {len(self._generators)} random generators, and had {len(states)} in an "
                "earlier attempt: it must be made in the same way at every start."
            )
        for generator, saved in zip(self._generators, states, strict=True):
            rng.restore_generator(saved, generator)
        self._batches = None

    def _open(self) -> None:
        """Begin the next epoch, or continue in the middle of one in its order."""
        self._states = self._capture()
        self._chance.begin(self._seed_epoch)
        self._order.begin(self.epoch, self._before)
        self._order.resume(self._earlier)
        with self._chance.drawing():
            if hasattr(self._loader, "set_epoch"):
                self._loader.set_epoch(self.epoch)
            self._batches = self._epochs.begin(self._before, self._taken)

    def _seed_epoch(self) -> None:
        if self._unseeded is not None:
            rng.restore(self._unseeded)
            return
        digest = hashlib.sha256(f"{self._seed} {self.epoch}".encode()).digest()
        rng.seed_all(int.from_bytes(digest[:4], "little"))

    def _capture(self) -> list[dict[str, Any]]:
        return [rng.capture_generator(each) for each in self._generators]


class _Epochs:
    """Iterates over one epoch of a loader after another. All batches are made, and those of other replicas dropped."""

    def __init__(self, base: Iterable[Any], deal: Deal, order: DealtOrder, chance: rng.SeparateDraws) -> None:
        self.seen = 0  # batches of the epoch so far, whoever takes them
        self._base = base
        self._is_ours, self._order, self._chance = deal.takes, order, chance

    def begin(self, before: int, skip: int) -> Iterator[Any]:
        """This rank's batches of an epoch except the first `skip`, which are dropped.

        `before`: number of batches, whoever took them, in the epochs before it, by which batches are assigned in turn.
        """
        batches = self._ours(self._base, before)
        for _ in range(skip):
            next(batches, None)
        return batches

    def _ours(self, batches: Iterable[Any], before: int) -> Iterator[Any]:
        self.seen = 0
        if isinstance(batches, DataLoader):
            # Persistent workers would go on with their random numbers of the epoch before, which an attempt that
            # restarts in this epoch does not have: each epoch of a stream gets new workers.
            batches._iterator = None
        with self._chance.drawing():
            iterator = iter(batches)
        while True:
            with self._chance.drawing():
                batch = self._next_of_ours(iterator, before)
            if batch is _END:
                return
            yield batch

    def _next_of_ours(self, batches: Iterator[Any], before: int) -> Any:
        for batch in batches:
            self.seen += 1
            self._order.add(self.seen, batch)
            if self._is_ours(before + self.seen - 1):
                return batch
        return _END


class _MapEpochs(_Epochs):
    """`_Epochs` for a DataLoader with indices: items of others, and of skipped batches, are never loaded."""

    def __init__(self, base: DataLoader[Any], deal: Deal, order: DealtOrder, chance: rng.SeparateDraws) -> None:
        super().__init__(base, deal, order, chance)
        self._indices: Iterable[Any] = base.sampler if base.batch_sampler is None else base.batch_sampler
        if deal.even and isinstance(base.batch_sampler, BatchSampler):
            self._indices = _Filled(base.batch_sampler)
        self._window = _Window()
        self._has_workers = False  # of an earlier epoch
        settings = {name: getattr(base, name) for name in _SETTINGS if hasattr(base, name)}
        if base.batch_sampler is None:
            self._ours_only = DataLoader(base.dataset, sampler=self._window, batch_size=None, **settings)
        else:
            self._ours_only = DataLoader(base.dataset, batch_sampler=self._window, **settings)

    def begin(self, before: int, skip: int) -> Iterator[Any]:
        self._window.indices = islice(self._ours(self._indices, before), skip, None)
        if self._has_workers:
            # A new iterator draws a seed for its workers before the sampler draws the order; that of persistent workers
            # draws none, and an attempt that restarts in this epoch has a new one.
            torch.empty((), dtype=torch.int64).random_(generator=self._ours_only.generator)
        self._has_workers = self._ours_only.persistent_workers
        return iter(self._ours_only)  # workers are given indices here


class _Window:
    """A sampler for a DataLoader that yields the indices set for the current epoch."""

    def __init__(self) -> None:
        self.indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _Filled:
    """The batches of a sampler; an epoch's last one, if it is shorter, is filled up with the epoch's first indices."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        first: list[int] = []
        for batch in self._sampler:
            first = first or list(batch)
            missing = self._sampler.batch_size - len(batch)
            yield [*batch, *islice(cycle(first), missing)] if missing > 0 else batch


def _length_of(loader: Any) -> int | None:
    """The number of batches of a loader; None if it has no length, or an empty one."""
    try:
        return len(loader) or None
    except TypeError:
        return None


def _undivided(loader: Any, even: bool) -> Any:
    """The loader behind accelerate's, with the batches of all ranks.

    accelerate's own iterator is a batch ahead, and gives each rank its part of the batches of one replica. `even`:
    whether a stream's last batch is left out where it is shorter than others.
    """
    base = getattr(loader, "base_dataloader", loader)
    sampler: Any = getattr(base, "batch_sampler", None)
    dataset: Any = getattr(base, "dataset", None)
    divided: Any = next((each for each in (sampler, dataset) if type(each).__name__ in _DIVIDERS), None)
    own = getattr(base, "sampler", None)
    if getattr(divided, "split_batches", False):
        raise ConfigError(
            "the trainer's accelerator_config has split_batches=True, which cuts each batch into the ranks' parts. Set "
            "split_batches=False: batches are dealt over the ranks of all replicas."
        )
    if isinstance(own, DistributedSampler) and own.num_replicas > 1:
        raise ConfigError(
            f"the trainer's data loader has a DistributedSampler over {own.num_replicas} processes. Take it out: the "
            "batches of one loader, the same in every rank, are dealt over the ranks of all replicas."
        )
    if getattr(getattr(divided, "batch_sampler", sampler), "dp_size", 1) > 1:
        raise ConfigError(
            'the trainer has train_sampling_strategy="batch_rebalance", which divides batches over the ranks of one '
            'replica. Set "group_by_length" or "random": they are dealt over the ranks of all replicas.'
        )
    shortens = even and isinstance(base, DataLoader) and isinstance(dataset, IterableDataset) and bool(base.batch_size)
    if divided is None and not shortens:
        return base
    settings = {name: getattr(base, name) for name in _SETTINGS if hasattr(base, name)}
    if divided is not None and divided is sampler:
        return DataLoader(dataset, batch_sampler=divided.batch_sampler, **settings)
    source = dataset if divided is None else divided.dataset
    return DataLoader(source, batch_size=base.batch_size, drop_last=base.drop_last or even, **settings)


def _has_indices(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
