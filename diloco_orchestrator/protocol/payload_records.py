"""The parts of a manifest that describe payloads: digests, sizes and norms of its own; which others were left out."""

import math
from typing import Annotated

from pydantic import Field

from diloco_orchestrator.protocol.digests import BulkDigest, bulk_digest
from diloco_orchestrator.protocol.limits import MOST_COUNTED
from diloco_orchestrator.protocol.record_format import Part

_MOST = 1e60  # beyond any norm of fp32 numbers; its square is finite


class Shard(Part):
    """Digest and size of one object: a payload shard or a saved state."""

    digest: BulkDigest
    size: int = Field(le=MOST_COUNTED)  # bytes


class Payload(Part):
    """An encoded pseudo-gradient: the parameters of one fragment in name order as one flat vector, cut into shards."""

    codec: str
    numel: int
    shard_numel: int  # elements per shard; the last one may be shorter
    shards: tuple[Shard, ...]
    # The Euclidean norm of each shard's decoded elements, in four digits; whoever verifies the bytes checks it.
    norms: tuple[Annotated[float, Field(ge=0, le=_MOST)], ...] = ()

    @property
    def norm(self) -> float:
        """The norm of the whole vector, as it is declared. The same number on every machine."""
        return math.sqrt(math.fsum(norm * norm for norm in self.norms))

    @property
    def digest(self) -> BulkDigest:
        """The digest of the digests of its shards: equal for payloads of equal bytes, cut alike."""
        return bulk_digest("".join(shard.digest for shard in self.shards).encode())


class Disagreeing(Part):
    """A contribution that `aggregate="agreeing_mean"` left out, in some of its shards, of a round that was averaged."""

    replica_id: int = Field(ge=0)
    round: int = Field(ge=1)
    shards: int = Field(ge=1)  # in which it was left out
    # Its median cosine to the others, in the shard where that is lowest, and the median of all contributions there.
    agreement: float = Field(ge=-1, le=1)
    usual: float = Field(ge=-1, le=1)

    @property
    def reason(self) -> str:
        return (
            f"its direction agrees with most others' by {self.agreement:.2f}, where {self.usual:.2f} is the median, in "
            f"{self.shards} shard{'' if self.shards == 1 else 's'}"
        )
