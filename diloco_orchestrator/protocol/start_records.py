"""Schemas of the records of a run's first base: start.json, which describes it, and the replicas' votes on it."""

import math
from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field

from diloco_orchestrator.protocol.digests import BulkDigest, Sha256
from diloco_orchestrator.protocol.record_format import Part, Record
from diloco_orchestrator.protocol.records import FileInfo, FileName


class ParameterInfo(Part):
    """Name, shape and dtype of one trainable parameter of the user's model."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", …


class AdapterPair(Part):
    """A LoRA adapter of a frozen weight W, averaged exactly with a residual R: W + scaling * (R + B A)."""

    a: str  # parameter A, (r, in)
    b: str  # parameter B, (out, r)
    weight: str  # the frozen W, (out, in)
    residual: str  # R in the base, (out, in) float32
    scaling: float


class FrozenTensors(Part):
    """The tensors of the user's model that are never trained, equal in every replica."""

    digest: BulkDigest  # over names, dtypes, shapes and bytes
    tensors: int = Field(ge=1)
    size: int = Field(ge=0)  # bytes


class VaultSet(Part):
    """The confirmation set: further held-out items, scored only after an alarm of the guard, to confirm it."""

    shares: tuple[int, ...]  # the number of items of each share
    digest: Sha256  # over the sorted content hashes of all items

    @property
    def items(self) -> int:
        """Number of held-out items in all shares of the confirmation set together."""
        return sum(self.shares)


class HeldoutSet(Part):
    """The held-out set on which the guard scores the model: fixed at the start, so that no replica can change it."""

    metric: Literal["loss", "reward"]  # what scores and training metric measure
    shares: tuple[int, ...]  # the number of items of each share
    digest: Sha256  # over the sorted content hashes of all items
    root: Sha256 | None = None  # Merkle root over the item hashes of the split's manifest, or of the items themselves
    scorer: Sha256 | None = None  # of the source of the function that scores; None where it has none to read
    vault: VaultSet | None = None  # None: alarms halt at once

    @property
    def items(self) -> int:
        """Number of held-out items in all shares together."""
        return sum(self.shares)


class Start(Record):
    """start.json, the start record: trained parameters, shards and digest of the first base, and the held-out set."""

    record: ClassVar[str] = "start"
    later_fields: ClassVar[frozenset[str]] = frozenset({"path", "scores_strangers", "heldout_by"})
    run_sha256: Sha256
    parameters: tuple[ParameterInfo, ...]  # in name order
    fragments: tuple[tuple[str, ...], ...]  # parameter names, in the order in which they are synchronised
    shard_numel: int = Field(ge=1)  # parameters in one shard of a fragment; its last shard may have fewer
    base_digest: BulkDigest
    heldout: HeldoutSet | None = None  # None: nothing is scored, and the guard is off
    frozen: FrozenTensors | None = None  # None: every parameter is trained
    buffers: BulkDigest | None = None  # of the persistent buffers in snapshot 0; None: the model has none
    adapter: dict[str, str] | None = None  # names in an adapter's file, by name in the model; None: whole models
    # With adapters="exact": parameters holds their residuals too, and the last fragment is those, never synchronised.
    # Snapshots then hold whole models; `adapter` has the names in the adapter folder that readers get of one.
    adapters: tuple[AdapterPair, ...] = ()
    # The files of snapshot 0 that hold the model's tensors, and those that hold none, which are the same in every
    # snapshot. None: of a run that began before records had them.
    first_files: dict[FileName, FileInfo] | None = None
    path: Literal["gather", "scatter_reduce"] | None = None  # which one path="auto" takes; None for other settings
    # By which version of the rules replicas score strangers' work before it is averaged. True: the first; None: not.
    scores_strangers: Literal[True, 2] | None = None
    # Whose scores and training metrics the guard counts: of replicas that are no strangers'. None: everybody's.
    heldout_by: Literal["launched"] | None = None

    def unheard(self, invited: Collection[int]) -> frozenset[int]:
        """Ids of the replicas whose scores and metrics the guard does not count. `invited`: ids of strangers'."""
        return frozenset(invited) if self.heldout_by else frozenset()

    @property
    def strangers_rules(self) -> int:
        """Version of the rules by which replicas score strangers' work before it is averaged; 0: it is not scored."""
        return int(self.scores_strangers or 0)

    @property
    def synced_fragments(self) -> tuple[tuple[str, ...], ...]:
        """The fragments that rounds synchronise in turn: all but the residuals of exactly averaged LoRA adapters."""
        return self.fragments[:-1] if self.adapters else self.fragments

    @property
    def fragment_numels(self) -> tuple[int, ...]:
        """Number of elements of each fragment that rounds synchronise."""
        numels = {parameter.name: math.prod(parameter.shape) for parameter in self.parameters}
        return tuple(sum(numels[name] for name in names) for names in self.synced_fragments)


class Began(Record):
    """start/<replica>/began.<attempt>.json: an attempt's vote on the first base: digest of its model's start record."""

    record: ClassVar[str] = "began"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    start_sha256: Sha256  # of the start that it would write
    key: str  # where it writes that one if start.json holds another


class Follows(Record):
    """Record start/<replica>/follows.json: digest of the start record (of a first base) that a replica adopted for
    good.
    """

    record: ClassVar[str] = "follows"
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    start_sha256: Sha256
    key: str  # of that start
    take: str  # of snapshot 0, as this replica has read or written it
