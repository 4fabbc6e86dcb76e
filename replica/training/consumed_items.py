"""`ConsumedItems`: compares every training item with the held-out set before a step trains on it, and counts items."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from diloco_orchestrator.errors import ConfigError, HeldoutItemInTraining
from diloco_orchestrator.protocol.records import Consumed
from diloco_orchestrator.split.content import ItemHash, kind_of
from diloco_orchestrator.split.manifest import HeldoutManifest

ItemsOf = Callable[[Any], Iterable[Any]]
Batch = TypeVar("Batch")


def together(first: Consumed | None, *others: Consumed | None) -> Consumed | None:
    """The compared training items of several ranks of a replica as one record, in rank order.

    `first`: of rank 0, returned if there is no other.
    """
    if first is None or not any(others):
        return first
    found = [each for each in (first, *others) if each is not None]
    digest = hashlib.sha256("".join(each.digest for each in found).encode()).hexdigest()
    return Consumed(items=sum(each.items for each in found), digest=digest)


class ConsumedItems:
    """Compares the training items of this replica with the held-out ones, and counts them.

    Args:
        manifest: the items that must not be trained on.
        items_of: returns the items of a batch, in the form of the manifest. By default those of a text, of a list, of a
            mapping with the manifest's text field, or the rows of an array.
        scored: held-out items as they are scored; one is used to prove that the check works.

    Before any step, the first batch must pass a self-test: it must have items of the manifest's kind, and must be
    refused while its own first item is treated as held out.
    """

    def __init__(self, manifest: HeldoutManifest, items_of: ItemsOf | None, scored: Sequence[Any] = ()) -> None:
        self._manifest = manifest
        self._forbidden = manifest.forbidden()
        self.items_of = items_of or self._declared_by_form  # the items of a batch
        self._proven = False
        self.last: ItemHash | None = None  # the hash of the last item that was compared
        self._count = 0  # since the last contribution
        self._hasher = hashlib.sha256()
        for item in scored[:1]:
            self._prove_refusal([item], {})

    def checked(self, batch: Batch) -> Batch:
        """The batch, if none of its items is held out. Raises `HeldoutItemInTraining` otherwise."""
        items = list(self.items_of(batch))
        if not self._proven:
            self._prove(items)
        self.add(items)
        return batch

    def add(self, items: Iterable[Any]) -> None:
        """Compare and count items that the next steps train on. Raises `HeldoutItemInTraining` for a held-out one."""
        self._record(self._compared(items, self._forbidden))

    def forbid(self, item: ItemHash, name: str) -> None:
        """Refuse the training item with this hash from now on. `name`: its id, for the error."""
        self._forbidden[item] = name

    def take(self) -> Consumed:
        """Count and digest of the training items compared since the last call."""
        taken = Consumed(items=self._count, digest=self._hasher.hexdigest())
        self._count, self._hasher = 0, hashlib.sha256()
        return taken

    def _record(self, hashes: Sequence[ItemHash]) -> None:
        self._count += len(hashes)
        self.last = next(reversed(hashes), self.last)
        self._hasher.update(b"".join(hashes))

    def _compared(self, items: Iterable[Any], forbidden: Mapping[ItemHash, str]) -> list[ItemHash]:
        """The hashes of the training items. Raises `HeldoutItemInTraining` if one is in `forbidden`."""
        hashes = [self._manifest.hash_of(item) for item in items]
        for each in hashes:
            if each in forbidden:
                raise HeldoutItemInTraining(
                    f"training data holds the held-out item {forbidden[each]!r} (hash {each.hex()[:12]}, held-out set "
                    f"with root {self._manifest.root[:12]}): its score would say nothing any more. No step was "
                    "taken on it. Remove it from the training data (`diloco split` writes files without it) and start "
                    "a new run.",
                    item=forbidden[each],
                )
        return hashes

    # -- proof that refusing works -------------------------------------------------------------------------------

    def _prove(self, items: list[Any]) -> None:
        """Self-test: training items whose first one is treated as held out must be refused.

        Raises `ConfigError` if they are not, if there are none, or if they are of another kind than the held-out ones.
        """
        if not items:
            raise ConfigError(
                "the first batch declares no item, so that nothing is compared with the held-out set: items_of must "
                "return the items of a batch, such as its texts before tokenisation."
            )
        kind = kind_of(self._manifest.content_of(items[0]))
        if kind not in self._manifest.kind.split("/"):
            raise ConfigError(
                f"the first batch declares an item of the kind {kind}, the held-out items are {self._manifest.kind}: "
                "they could never be equal. Pass attach(items_of=...), which returns a batch's items as the held-out "
                "set has them, such as its texts before tokenisation."
            )
        self._prove_refusal(items, {self._manifest.hash_of(items[0]): "planted"})
        self._proven = True

    def _prove_refusal(self, items: Iterable[Any], planted: Mapping[ItemHash, str]) -> None:
        """Raise `ConfigError` unless `items`, one of which is held out or in `planted`, are refused."""
        try:
            self._compared(items, {**self._forbidden, **planted} if planted else self._forbidden)
        except HeldoutItemInTraining:
            return
        raise ConfigError(
            "a planted held-out item was not refused: training items are not compared in the form in which they are "
            "held out. Check heldout_manifest and items_of."
        )

    # -- items of a batch ----------------------------------------------------------------------------------------

    def _declared_by_form(self, batch: Any) -> Iterable[Any]:
        """The items of a batch, taken from its form (text, list, mapping), if the user gave no `items_of`."""
        field = self._manifest.settings.text_field
        if isinstance(batch, str | bytes | bytearray):
            return [batch]
        if isinstance(batch, Mapping):
            found = batch.get(field) if field is not None else None
            if found is None:
                return [batch]
            return [found] if isinstance(found, str) else found
        if hasattr(batch, "shape"):
            return batch if len(batch.shape) > 1 else [batch]
        if isinstance(batch, list | tuple):
            return chain.from_iterable(self._declared_by_form(each) for each in batch)
        return [batch]
