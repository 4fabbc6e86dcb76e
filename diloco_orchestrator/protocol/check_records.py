"""Schemas of what replicas find in payload shards of others in a round by scatter-reduce."""

from typing import Annotated, ClassVar

from pydantic import Field

from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.record_format import Part, Record


class ReadShards(Part):
    """The payload shards of one contribution that a replica has read, by whether they are as the manifest says."""

    manifest_sha256: Sha256
    good: tuple[Annotated[int, Field(ge=0)], ...] = ()
    bad: tuple[Annotated[int, Field(ge=0)], ...] = ()


class Checked(Record):
    """The payload shards of others that a replica has read in a round by scatter-reduce since its record before."""

    record: ClassVar[str] = "checked"
    round: int = Field(ge=1)
    leg: int = Field(ge=1)
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    number: int = Field(ge=1)  # of this replica's records of the round
    claim_sha256: Sha256
    read: tuple[ReadShards, ...]


class CheckNamed(Part):
    """A check record that a commit rests on, by its key and the sha256 of its bytes."""

    replica_id: int = Field(ge=0)
    number: int = Field(ge=1)
    sha256: Sha256
