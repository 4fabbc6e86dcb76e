"""Positions of a replica's training: in the user's data (`DataCursor`), and of random generators and counters.

A position goes into every manifest as `Progress`, from which the next attempt continues.
"""

import base64
import inspect
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import JsonValue
from torch.utils.data import IterableDataset

from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.protocol.records import Contribution, Progress
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.dealt_batches import DealtBatches
from diloco_orchestrator.replica.training.dealt_order import ORDER, DealtOrder
from diloco_orchestrator.replica.training.observed_metrics import ObservedMetrics
from diloco_orchestrator.replica.training.small_state import LIMIT
from diloco_orchestrator.replica.training.tensor_tree import check_packable, pack, unpack

_OWN = "own"  # in the saved states of random generators: those of the data's parts, beside its own
_RANKS = "ranks"  # in them: those of the data of the replica's other ranks
_DEPTH = 4  # of parts in parts of a loader, such as the sampler in its batch sampler


def drawn_by_ranks(cursor: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The `drawn` that `TrainingPosition.progress` got for a manifest with this data cursor; empty without one."""
    chance = cursor.get("chance")
    found: Sequence[Mapping[str, Any]] = chance.get(_RANKS, ()) if isinstance(chance, dict) else ()
    return found


def has_position(data: Any) -> bool:
    """Whether data saves and restores its own position.

    accelerate's loaders all have the methods for that, which work where the loader inside them has them too.
    """
    inside = data, getattr(data, "base_dataloader", data)
    return all(hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in inside)


class DataCursor:
    """An endless iterator over the user's `data`, epoch after epoch, whose position can be saved and restored.

    If `data` has `state_dict` and `load_state_dict`, they give the position. Otherwise the batches already seen are
    skipped, one by one. Either way the epoch starts from the same random numbers, so that a shuffle gives the same
    order. `set_epoch` of `data`, or else of its sampler and data set, is called with each epoch but the first.

    `begin_epoch(number)` is called before each epoch is drawn.
    """

    def __init__(self, data: Iterable[Any], begin_epoch: Callable[[int], None] = lambda epoch: None) -> None:
        self._data = data
        self._begin_epoch = begin_epoch
        self._stateful = has_position(data)
        self._epoch = self._epoch_set = 0
        self._batches = 0  # of this epoch
        self._chance: dict[str, Any] = {}  # states of the random generators at the epoch's start
        self._own = [each for each in rng.generators_in(data) if each is not self._generator]  # such as a sampler's
        self._iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next batch. Raises `ConfigError` if the data yields none."""
        for _ in range(2):
            if self._iterator is None:
                self._set_epoch()
                self._begin_epoch(self._epoch)
                self._chance = self._drawn_so_far()
                self._renew_workers()
                self._iterator = iter(self._data)
            for batch in self._iterator:
                self._batches += 1
                return batch
            if self._batches == 0:
                break
            self._epoch, self._batches, self._iterator = self._epoch + 1, 0, None
        raise ConfigError(
            "the data yields no batch. A generator can be used up only once: pass something that can be iterated "
            "again, such as a list, a DataLoader or a class with __iter__."
        )

    def position(self) -> dict[str, Any]:
        """The position where `next` continues, as JSON. Raises `ConfigError` for data whose state cannot be saved."""
        chance = self._chance or self._drawn_so_far()
        position: dict[str, Any] = {"epoch": self._epoch, "batches": self._batches, "chance": chance}
        if self._stateful:
            state = self._data.state_dict()  # type: ignore[attr-defined]
            try:
                position["state"] = json.loads(json.dumps(state, allow_nan=False))
            except (TypeError, ValueError):
                position["packed"] = _packed(state)
        return position

    def _set_epoch(self) -> None:
        """Call `set_epoch` where the data has it, unless it was called for this epoch.

        A data set of the library `datasets` begins every epoch of its number at the state that it has loaded; a
        sampler of torch draws one order for all epochs of its number.
        """
        if self._epoch == self._epoch_set:
            return
        self._epoch_set = self._epoch
        inside = getattr(self._data, "base_dataloader", None)  # of accelerate's, which do not reach all parts
        for part in {id(each): each for each in (*_with_epochs(self._data), *_with_epochs(inside))}.values():
            part.set_epoch(self._epoch)

    def _drawn_so_far(self) -> dict[str, Any]:
        """The states of all random generators that may decide the order of an epoch."""
        found = rng.capture(self._generator)
        return {**found, _OWN: [rng.capture_generator(each) for each in self._own]} if self._own else found

    def _renew_workers(self) -> None:
        """Let a DataLoader that keeps its workers begin an epoch as that of a restarted attempt does, with new ones.

        These cost a random number before the sampler draws the order. Where they hold what decides the order, which is
        a stream or a data set with `set_epoch`, kept ones are replaced.
        """
        loader: Any = getattr(self._data, "base_dataloader", self._data)
        if not getattr(loader, "persistent_workers", False) or getattr(loader, "_iterator", None) is None:
            return
        if getattr(loader, "_initial_iter_for_state_dict", False):
            return  # torchdata's, which are new
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, IterableDataset) or _with_epochs(dataset):
            loader._iterator = None
        else:
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._generator)

    @property
    def _generator(self) -> Any:
        """A DataLoader's own random generator, or None."""
        return getattr(self._data, "generator", None)

    def seek(self, position: Mapping[str, Any], *, of_other_data: bool = False) -> None:
        """Continue at a result of `position()`. If the data ends before that batch, raises `ConfigError`, or, with a
        position `of_other_data`, continues in the next epoch.
        """
        self._iterator = None
        self._epoch, self._batches = position["epoch"], 0
        self._set_epoch()  # first: `datasets` ignores a state of another epoch than the set one
        self._chance = position.get("chance", {})
        if self._chance:
            rng.restore(self._chance, self._generator)
            for generator, state in zip(self._own, self._chance.get(_OWN, ()), strict=False):
                rng.restore_generator(state, generator)
        if self._stateful and ("state" in position or "packed" in position):
            state = _unpacked(position["packed"]) if "packed" in position else position["state"]
            self._data.load_state_dict(state)  # type: ignore[attr-defined]
            self._batches = position["batches"]
            if self._batches:  # the epoch has begun: the numbers that its iterator draws come before those of its steps
                self._iterator = iter(self._data)
            return
        for _ in range(position["batches"]):
            before = self._epoch
            self.next()
            if self._epoch != before and not of_other_data:
                raise ConfigError(
                    f"the data ended after fewer than the {position['batches']} batches that an earlier attempt had "
                    "seen: it must be the same at every start."
                )


def _with_epochs(loader: Any, depth: int = _DEPTH) -> list[Any]:
    """A loader if it has a `set_epoch` that takes a number; otherwise those of its samplers and its dataset that do."""
    set_epoch = getattr(loader, "set_epoch", None)
    if callable(set_epoch) and _takes_number(set_epoch):
        return [loader]
    parts = (getattr(loader, name, None) for name in rng.PARTS if depth)
    return [found for part in parts if part is not None for found in _with_epochs(part, depth - 1)]


def _takes_number(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(0)
    except TypeError:  # it asks for more, and so has another meaning
        return False
    except ValueError:  # it is not written in Python
        return True
    return True


def _packed(state: Any) -> str:
    """A state of data that is not JSON, such as one with tensors, as text. Raises `ConfigError` if that cannot be."""
    check_packable(state, "the data's state_dict()")
    data = pack(state)
    if len(data) > LIMIT:
        raise ConfigError(
            f"the data's state_dict() has {len(data)} bytes, which every manifest would hold: at most {LIMIT} are "
            "saved. Return a smaller one, such as numbers of files and rows."
        )
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _unpacked(text: str) -> Any:
    """The state that `_packed` encoded. Raises `RecordInvalid` for any other text."""
    where = "the position in data in this replica's manifest"
    try:
        return unpack([zlib.decompress(base64.b64decode(text, validate=True))], where)
    except (ValueError, zlib.error) as error:
        raise RecordInvalid(f"{where} cannot be decoded ({error}): it was changed.") from None


class TrainingPosition:
    """The position of one attempt's training: data cursor, random generators, step and token counts.

    `fresh_seed`: seed of the generators for a replica without manifests.
    """

    def __init__(self, metrics: ObservedMetrics, fresh_seed: int, dealt: Callable[[], DealtOrder | None]) -> None:
        self._dealt = dealt
        self._metrics = metrics
        self._fresh_seed = fresh_seed
        self._cursor: DataCursor | None = None  # None in a loop that takes its batches elsewhere
        self._batches: DealtBatches | None = None  # in place of a cursor, where the log deals batches
        self._resumed: Progress | None = None  # that this attempt continued from

    def continue_from(self, progress: Progress | None) -> None:
        """Set step counts, random generators and data cursor to those in a manifest, or to those of a new replica."""
        self._resumed = progress
        if progress is not None:
            self._metrics.resume(progress)
        if self._batches is not None:
            self._batches.forget_steps()
        self._seek()

    def take(self, data: Iterable[Any]) -> DataCursor:
        """A cursor over the data from where an earlier attempt ended; random generators are set to that point."""
        self._cursor = DataCursor(data)
        self._seek()
        return self._cursor

    def take_dealt(self, batches: DealtBatches) -> DealtBatches:
        """Note that the log deals the batches, and set the random generators as `take` does."""
        self._batches = batches
        self._seek()
        return batches

    def progress(self, stateful: str, drawn: Sequence[Mapping[str, Any]] = ()) -> Progress:
        """The present position in data, random numbers and step counts.

        `stateful`: the encoded small state. `drawn`: that of each other rank of the replica (`RankMetrics`).
        """
        cursor = self._cursor_position()
        if any(drawn) and isinstance(chance := cursor.get("chance"), dict):
            cursor = {**cursor, "chance": {**chance, _RANKS: [dict(each) for each in drawn]}}
        return Progress(
            cursor=cursor,
            rng=rng.capture(),
            inner_steps=self._metrics.total_inner_steps,
            tokens=self._metrics.total_tokens,
            stateful=stateful,
        )

    def compare_order(self, replica_id: int, manifests: Iterable[Contribution]) -> None:
        """Raise `ConfigError` if replicas that share batches mostly have another order of the data than this one.

        Where the log deals batches, it is raised if half of the replicas or more have another number of them.
        """
        if self._batches is not None:
            self._batches.compare(manifests)
        elif (order := self._dealt()) is not None:
            order.compare(replica_id, manifests)

    def _cursor_position(self) -> dict[str, JsonValue]:
        if self._batches is not None:
            return self._batches.position()
        if self._cursor is not None:
            return self._cursor.position()
        kept = self._resumed.cursor if self._resumed else {}
        order = self._dealt()
        return {**kept, ORDER: order.state()} if order else {name: kept[name] for name in kept if name != ORDER}

    def _seek(self) -> None:
        if self._resumed is None:
            # Data order and dropout differ between replicas from here on; the model was built from the same seed.
            rng.seed_all(self._fresh_seed)
            return
        if self._cursor is not None and self._resumed.cursor:
            self._cursor.seek(self._resumed.cursor)
        rng.restore(self._resumed.rng)
