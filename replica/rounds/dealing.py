"""Dealings: which payload shards of a round a replica receives: verifies before it decides, and holds to average.

A dealing follows from the manifests alone, so that every replica knows what every other one receives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diloco_orchestrator.allreduce.payload_cache import Name
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution


@dataclass(frozen=True)
class PayloadShard:
    """One shard of a contribution's payload."""

    manifest: Contribution
    index: int

    @property
    def name(self) -> Name:
        """The name of its bytes in a `PayloadCache`: (key, digest)."""
        manifest = self.manifest
        assert manifest.payload is not None
        key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, self.index)
        return key, manifest.payload.shards[self.index].digest


Dealing = Callable[[Iterable[Contribution]], list[PayloadShard]]


def everything(manifests: Iterable[Contribution]) -> list[PayloadShard]:
    """The dealing of a gather: all shards of all payloads, to everybody."""
    return [PayloadShard(m, index) for m in manifests if m.payload for index in range(len(m.payload.shards))]
