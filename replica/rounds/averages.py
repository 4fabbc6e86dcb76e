"""`averages_of`: the average of each payload shard that a commit determines, by scatter-reduce among the replicas.

Averages that others published are only a cache: the bits are those of averages from all payloads (invariant I11).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.dealing import EXACT, Dealing
from diloco_orchestrator.allreduce.mean import EncodedShards, encoded_shard
from diloco_orchestrator.allreduce.scatter_reduce import ScatterReduce
from diloco_orchestrator.outer.arithmetic import denormals_kept
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import ReadShard, part_of
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import Reduced
from diloco_orchestrator.protocol.digests import BulkDigest, bulk_digest
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.run_log.contributions import ContributionReader

_PATIENCE_S = 5.0  # in which the others read the commit, beside their longest pause


@dataclass(frozen=True)
class Averages:
    """The averages of a round's shards, and what this replica found about those that others published."""

    shards: EncodedShards  # in each process of this replica those of the shards that it holds
    borrowed: bool  # whether others have made some of them
    false: Mapping[tuple[int, BulkDigest], tuple[int, ...]]  # (shard, digest) -> replicas that published it, ascending


def averages_of(
    attempt: Attempt,
    dealing: Dealing,
    named: Sequence[tuple[Contribution, int]],
    codec: str | None,
    base: Base,
    fragment: int,
    read: ReadShard,
    pause_s: float,
    distrusted: Collection[int],
) -> Averages:
    """The average of each shard. This replica computes the shards assigned to it and one more from the payloads.

    Others are read where owner and checker agree on their bytes, and computed from the payloads where they do not or
    one is missing after some seconds. Safe to repeat. Raises `PayloadCorrupt` for a payload that cannot be read.

    Args:
        dealing: assigns shards to replicas.
        named: (manifest, weight) of the contributions that the commit averages.
        codec: that the average passes through, as the commit names it; None: it is fp32 as summed.
        base: has the shards of the averages, and their owners.
        fragment: index of the fragment that is averaged.
        read: (manifest, shard index) -> verified bytes.
        pause_s: the longest pause of a waiting replica, after which every one has read the commit.
        distrusted: replicas whose averages are not used.
    """
    lengths = [len(shard.parameters) for shard in base.shards(fragment)]
    averages = base.owners.make(EncodedShards, lengths, codec or EXACT)
    pairs = [dealing.averagers(index) for index in range(len(lengths))]
    key = keys.reduced(dealing.round, attempt.replica_id)
    reducing = ScatterReduce(
        attempt.store,
        attempt.clock,
        attempt.background,
        attempt.stamp,
        dealing.round,
        attempt.replica_id,
        pairs,
        write=partial(_created, attempt, key),
        aggregate=attempt.config.aggregate,
        patience_s=_PATIENCE_S + pause_s,
        distrusted=set(distrusted),
        owners=base.owners,
        fragment=fragment,
    )
    with denormals_kept():
        reducing.average_into(averages, [part_of(manifest, weight, read) for manifest, weight in named])
    return Averages(averages, reducing.borrowed, reducing.false)


def digest_of_average(attempt: Attempt, commit: Commit, index: int, lengths: Sequence[int]) -> BulkDigest:
    """Digest of the average of one shard that a commit determines, computed from the payloads and encoded as published
    ones.

    `lengths`: elements of each shard. Raises `PayloadCorrupt` for a payload that is damaged or deleted, `RecordInvalid`
    or `ObjectMissing` for a manifest.
    """
    reader = ContributionReader(attempt.store, attempt.background)
    named = [(reader.named(commit.round, answer), answer.weight) for answer in commit.answers if answer.averaged]
    with denormals_kept():
        parts = [part_of(manifest, weight, reader.shard) for manifest, weight in named]
        blocks = aggregate_of(attempt.config.aggregate, parts, lengths).shard(index)
        return bulk_digest(encoded_shard(blocks, lengths[index], commit.average_codec or EXACT))


def _created(attempt: Attempt, key: str, record: Reduced) -> bool:
    return attempt.writer.create(record, key) is not None
