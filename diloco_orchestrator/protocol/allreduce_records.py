"""Schemas of the JSON objects of a stand-alone `ObjectStoreAllReduce`, and of averages by scatter-reduce."""

from typing import ClassVar

from pydantic import Field

from diloco_orchestrator.protocol.digests import BulkDigest
from diloco_orchestrator.protocol.record_format import Part, Record
from diloco_orchestrator.protocol.records import Payload


class AllReducePart(Record):
    """The manifest of one rank in a stand-alone `ObjectStoreAllReduce`, outside of any run."""

    record: ClassVar[str] = "allreduce"
    round_id: int = Field(ge=0)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    shape: tuple[int, ...]
    dtype: str
    payload: Payload


class ReducedShard(Part):
    """The average of one payload shard over all contributions, as one replica computed it for the others."""

    shard: int = Field(ge=0)
    digest: BulkDigest  # of its encoded bytes
    take: int | None = Field(default=None, ge=1, le=9)  # under which the owner wrote it; None: the checker, or no key


class Reduced(Record):
    """The averages of shards that one rank has computed for the others by scatter-reduce; in a run, one replica."""

    record: ClassVar[str] = "reduced"
    round_id: int = Field(ge=0)  # of a run its round
    rank: int = Field(ge=0)  # of a run the replica id
    shards: tuple[ReducedShard, ...]  # that it owns or checks


class MeasuredLink(Record):
    """start/link.json: how fast one replica, or rank of an all-reduce, reached the store; `path="auto"` goes by it."""

    record: ClassVar[str] = "link"
    rank: int = Field(ge=0)  # of a run the replica id
    latency_s: float = Field(gt=0, le=1e4)  # seconds of a small request, in the median
    up: float = Field(ge=1, le=1e15)  # bytes a second
    down: float = Field(ge=1, le=1e15)
