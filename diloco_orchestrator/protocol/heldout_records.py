"""What records say of the held-out set, and of the comparison of training items with it."""

from typing import ClassVar, Literal

from pydantic import Field

from diloco_orchestrator.protocol.digests import BulkDigest
from diloco_orchestrator.protocol.record_format import Part, Record, Sha256


class HeldoutSet(Part):
    """The held-out set that the guard judges by: fixed when the run starts, so that no manifest can say otherwise."""

    metric: Literal["loss", "reward"]  # what scores and training metric measure
    shares: tuple[int, ...]  # the number of items of each share
    digest: Sha256  # over the sorted content hashes of all items
    root: Sha256 | None = None  # Merkle root over the item hashes of the split's manifest, or of the items themselves
    scorer: Sha256 | None = None  # of the source of the function that scores; None where it has none to read

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
