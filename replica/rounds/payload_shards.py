"""Payload shards that manifests name, read in the process (rank) of this replica that owns each, and verified.

Verified bytes are kept in `RecentPayloads` until they are averaged. Before the decision of a round a shard is read
under the key that its author wrote, and its norm is measured too (`verify_own`). After the commit, for which others
have measured it, bytes of the right digest suffice, under whichever key they were uploaded again (`fetch_own`,
`ReadVerified`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.allreduce.payload_cache import Name
from diloco_orchestrator.allreduce.recent_payloads import RecentPayloads
from diloco_orchestrator.allreduce.shards import fetch, open_verified
from diloco_orchestrator.allreduce.threads import one_torch_thread
from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import Store


@dataclass(frozen=True)
class PayloadShard:
    """One shard of the payload that a manifest names, by index."""

    manifest: Contribution
    index: int

    @property
    def name(self) -> Name:
        """The shard's name in a cache of payload bytes: (key, digest)."""
        manifest = self.manifest
        assert manifest.payload is not None
        key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, self.index)
        return key, manifest.payload.shards[self.index].digest

    def is_of(self, owners: Owners) -> bool:
        """Whether this process, one rank of a replica, owns the shard."""
        return owners.owns(self.manifest.fragment, self.index)


def all_shards(manifests: Iterable[Contribution]) -> list[PayloadShard]:
    """All payload shards of `manifests`, which a replica downloads in a round by gather."""
    return [PayloadShard(m, index) for m in manifests if m.payload for index in range(len(m.payload.shards))]


@dataclass(frozen=True)
class ReadVerified:
    """A function of (manifest, shard index) that returns the verified bytes, from the cache if they are there."""

    store: Store
    cache: RecentPayloads

    def __call__(self, manifest: Contribution, index: int) -> bytes | memoryview:
        name = PayloadShard(manifest, index).name
        return self.cache.get(name) or ContributionReader(self.store).shard(manifest, index)


def fetch_own(
    owners: Owners,
    store: Store,
    background: Background,
    cache: RecentPayloads,
    shards: Sequence[PayloadShard],
    at_once: int,
) -> None:
    """After a commit: fetch those of the shards that this process owns and has not cached, re-uploaded ones too.

    Raises as `ContributionReader.shard`.
    """

    @one_torch_thread()
    def fetched(shard: PayloadShard) -> None:
        cache.put(shard.name, ContributionReader(store).shard(shard.manifest, shard.index))

    missing = [each for each in shards if each.is_of(owners) and each.name not in cache]
    in_parallel(background, [partial(fetched, each) for each in missing], at_once)


def verify_own(
    owners: Owners,
    store: Store,
    background: Background,
    cache: RecentPayloads,
    shards: Sequence[PayloadShard],
    at_once: int,
) -> dict[Name, PayloadCorrupt | None]:
    """Before the decision: fetch those of the shards that this process owns, check them and put them in the cache.

    Returns for each the error of its check, None if it is as its manifest declares.
    """
    own = [each for each in shards if each.is_of(owners)]
    found = in_parallel(background, [partial(_verify, store, cache, each) for each in own], at_once)
    return dict(zip((each.name for each in own), found, strict=True))


@one_torch_thread()
def _verify(store: Store, cache: RecentPayloads, shard: PayloadShard) -> PayloadCorrupt | None:
    """Fetch a shard, check it and put it in the cache. Returns the error if the check fails.

    A shard that this process published is in the cache and not read back. If the store lost it after confirming the
    write, the other replicas find out, because they cannot read it.
    """
    name, payload, index = shard.name, shard.manifest.payload, shard.index
    assert payload is not None
    if name in cache:
        return None
    try:
        if (file := open_verified(store, name[0], payload, index)) is not None:
            cache.put_file(name, file, payload.shards[index].size)
        else:
            cache.put(name, fetch(store, name[0], payload, index, with_norm=True))
    except PayloadCorrupt as error:
        return error
    return None
