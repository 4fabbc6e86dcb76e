"""`DealtOrder`: digests of the order of batches, by which replicas that share one dataset check that it is the same.

Replicas that take every N-th batch of one order divide the data; if their orders differ, some items are trained twice
and others never. A digest of the batches 1, 2, 4, 8, … of the epoch is in every manifest (`Progress.cursor`).
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Contribution

log = logging.getLogger(__name__)

ORDER = "order"  # in `Progress.cursor`
_BYTES = 8  # of a digest: against mistakes, not attacks


class DealtOrder:
    """The order of the current epoch's batches, of all replicas, as far as this process has drawn it.

    `shared`: whether several replicas share the batches, so that all must draw the same order.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._epoch: dict[str, Any] = {}  # its number, and the number of batches before it
        self._digests: dict[str, str] = {}  # by the batch's number in the epoch, from 1
        self._earlier: Mapping[str, str] = {}  # of the same epoch, as an earlier attempt drew it

    def begin(self, epoch: int, before: int) -> None:
        """Begin epoch number `epoch` of the data. `before`: number of batches in earlier epochs."""
        self._epoch, self._digests, self._earlier = {"epoch": epoch, "before": before}, {}, {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Expect the batch order in `state`, a result of `state()` in an earlier attempt, of the epoch just begun."""
        self._earlier = state.get("batches", {})

    def add(self, number: int, batch: Any) -> None:
        """Add batch number `number` of the epoch (from 1), or the indices of its items, to the order.

        If an earlier attempt of this replica drew another batch there, raises `ConfigError` where replicas share the
        batches, and logs a warning where they do not.
        """
        if number & (number - 1):
            return
        found = self._digests[str(number)] = digest_of(batch)
        if self._earlier.get(str(number), found) == found:
            return
        words = (
            f"batch {number} of epoch {self._epoch['epoch']} is another than the earlier attempt of this replica drew, "
            "so that items are trained again, and others left out. Make the dataset and its loader in the same way at "
            "every start, with random numbers from torch, random or numpy, or from a generator with a fixed seed."
        )
        if self._shared:
            raise ConfigError(words)
        log.warning("%s", words)

    def state(self) -> dict[str, Any]:
        """The epoch, the number of batches before it, and digests of its batches so far, as JSON."""
        return {**self._epoch, "batches": dict(self._digests)}

    def compare(self, replica_id: int, others: Iterable[Contribution]) -> None:
        """Compare this replica's batch order with those of the others in the same epoch, from their manifests.

        Raises `ConfigError` unless more replicas, this one included, have this order than another; otherwise replicas
        with another order are logged.
        """
        agree, differ = [replica_id], list[int]()
        for manifest in others if self._shared else ():
            theirs = manifest.progress.cursor.get(ORDER) if manifest.progress else None
            if manifest.replica_id == replica_id or not isinstance(theirs, dict) or not self._is_in_epoch(theirs):
                continue
            (agree if self._is_same(theirs) else differ).append(manifest.replica_id)
        if not differ:
            return
        who = f"replica {replica_id} draws another order of its training data than replica {differ[0]}"
        if len(agree) > len(differ):
            log.warning("%s, which the others do not either: that one trains items of others", who)
            return
        raise ConfigError(
            f"{who}, so that items that are dealt in turn are trained twice or never. Make dataset, batch size, "
            "samplers and seeds (TrainingArguments: seed, data_seed) the same whatever ctx.replica_id is; or pass "
            "shard=False if the dataset is this replica's part already."
        )

    def _is_in_epoch(self, theirs: Mapping[str, Any]) -> bool:
        return theirs.get("epoch") == self._epoch.get("epoch") and isinstance(theirs.get("batches"), dict)

    def _is_same(self, theirs: Mapping[str, Any]) -> bool:
        common = self._digests.keys() & theirs["batches"].keys()
        same = all(theirs["batches"][number] == self._digests[number] for number in common)
        return same and theirs.get("before") == self._epoch["before"]


def dealt_in(stateful: Mapping[str, Any]) -> DealtOrder | None:
    """The batch order of the first object in `stateful` that has one, such as a `LoaderStream`; None if none has.

    `stateful`: the user's objects by name; such an object has a `DealtOrder` as its attribute `dealt`.
    """
    found = (getattr(each, "dealt", None) for each in stateful.values())
    return next((each for each in found if isinstance(each, DealtOrder)), None)


def digest_of(batch: Any) -> str:
    """A digest of the numbers and texts in a batch, however nested. Other objects count only by their type."""
    hasher = hashlib.blake2b(digest_size=_BYTES)
    _feed(hasher, batch)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    match value:
        case torch.Tensor() if value.layout == torch.strided:
            data = value.detach().to("cpu").contiguous().flatten().view(torch.uint8)
            hasher.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
            hasher.update(data.numpy().data)
        case Mapping():
            _feed(hasher, list(value.items()))
        case list() | tuple():
            hasher.update(f"list {len(value)} ".encode())
            for each in value:
                _feed(hasher, each)
        case str() | bytes() | int() | float() | None:
            hasher.update(f"{value!r} ".encode())
        case _ if getattr(getattr(value, "dtype", None), "hasobject", False):  # whose bytes are addresses in memory
            _feed(hasher, value.tolist())
        case _ if hasattr(value, "tobytes") and hasattr(value, "shape"):  # an array or a number of numpy
            hasher.update(f"array {value.dtype} {value.shape} ".encode())
            hasher.update(value.tobytes())
        case _:
            hasher.update(f"{type(value).__name__} ".encode())
