"""What records say of the held-out set, and of the comparison of training items with it."""

import math
from typing import ClassVar, Literal

from pydantic import Field

from diloco_orchestrator.protocol.digests import BulkDigest
from diloco_orchestrator.protocol.record_format import Part, Record, Sha256


class VaultSet(Part):
    """The vault set: further held-out items, scored only to confirm an alarm of the guard."""

    shares: tuple[int, ...]  # the number of items of each share
    digest: Sha256  # over the sorted content hashes of all items

    @property
    def items(self) -> int:
        """Items of all shares together."""
        return sum(self.shares)


class VaultScore(Part):
    """How the scores of one share of the vault set changed from an earlier base to another. Higher is better."""

    share: int = Field(ge=0)
    change: float | None  # sum over items of their score minus that on the earlier base; None: not finite
    squares: float | None  # sum of the squares of these differences from their mean; None: not finite
    count: int = Field(ge=2)

    @property
    def mean(self) -> float:
        """The mean change of an item; NaN if one of its scores is not finite."""
        return math.nan if self.change is None else self.change / self.count

    @property
    def variance(self) -> float:
        """The variance of an item's change; NaN if one of the scores is not finite."""
        return math.nan if self.squares is None else max(self.squares, 0.0) / (self.count - 1)


class HeldoutSet(Part):
    """The held-out set that the guard judges by: fixed when the run starts, so that no manifest can say otherwise."""

    metric: Literal["loss", "reward"]  # what scores and training metric measure
    shares: tuple[int, ...]  # the number of items of each share
    digest: Sha256  # over the sorted content hashes of all items
    root: Sha256 | None = None  # Merkle root over the item hashes of the split's manifest, or of the items themselves
    scorer: Sha256 | None = None  # of the source of the function that scores; None where it has none to read
    vault: VaultSet | None = None  # None: alarms halt at once

    @property
    def items(self) -> int:
        """Items of all shares together."""
        return sum(self.shares)


class Consumed(Part):
    """The training items of a contribution's own steps. None of them was in the held-out set."""

    items: int = Field(ge=0)
    digest: Sha256  # over the items' hashes, in the order in which they were consumed


class Probe(Record):
    """probe.json: names probe.safetensors, the reference from which `KLProbe` measures drift since the run's start."""

    record: ClassVar[str] = "probe"
    base_digest: BulkDigest  # of the run's first base, whose predictions the reference holds
    items: Sha256  # over the content hashes of the probe's items, in their order
    digest: BulkDigest  # of probe.safetensors
    size: int = Field(ge=0)  # bytes
    tokens: int = Field(ge=1)  # that are averaged
