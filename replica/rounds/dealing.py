"""Which payload shards of a round a replica downloads, verifies before it decides, and averages. Today: all of them.

The assignment is a function of the manifests alone, so that every replica can derive those of all others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diloco_orchestrator.allreduce.payload_cache import Name
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution


@dataclass(frozen=True)
class PayloadShard:
    """One shard of the payload that a manifest names, by index."""

    manifest: Contribution
    index: int

    @property
    def name(self) -> Name:
        """The shard's name in a `PayloadCache`: (key, digest)."""
        manifest = self.manifest
        assert manifest.payload is not None
        key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, self.index)
        return key, manifest.payload.shards[self.index].digest


Dealing = Callable[[Iterable[Contribution]], list[PayloadShard]]


def everything(manifests: Iterable[Contribution]) -> list[PayloadShard]:
    """All shards of all payloads: the assignment of an all-gather, the same for every replica."""
    return [PayloadShard(m, index) for m in manifests if m.payload for index in range(len(m.payload.shards))]
