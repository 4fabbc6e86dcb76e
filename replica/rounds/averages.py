"""`averages_of`: the average of each payload shard that a commit gives, by scatter-reduce among the round's replicas.

Reduced shards are a cache: the bits are those of averages from all payloads (invariant I11).
"""

import logging
from collections.abc import Sequence
from functools import partial

from diloco_orchestrator.allreduce.dealing import Dealing
from diloco_orchestrator.allreduce.scatter_reduce import ScatterReduce
from diloco_orchestrator.allreduce.vectors import FlatTensors, room
from diloco_orchestrator.outer.arithmetic import denormals_kept
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import ReadShard, part_of
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import Reduced
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # in which the others read the commit, beside their longest pause


def averages_of(
    attempt: Attempt,
    dealing: Dealing,
    named: Sequence[tuple[Contribution, int]],
    base: Base,
    fragment: int,
    read: ReadShard,
    pause_s: float,
) -> FlatTensors:
    """The average of each shard, flat float32 tensors, of which this replica makes those dealt to it and one more.

    Others are read where owner and checker agree on their bytes, and made from the payloads where they do not or one is
    missing after some seconds. Safe to repeat. Raises `PayloadCorrupt` for a payload that cannot be read.

    Args:
        named: (manifest, weight) of the contributions that the commit averages.
        base: has the shards of the averages, and their owners.
        fragment: index of the one that is averaged.
        read: (manifest, shard index) -> verified bytes.
        pause_s: the longest pause of a waiting replica, after which every one has read the commit.
    """
    owners, numel = base.owners, base.numel(base.fragments[fragment])
    averages = owners.make(room, numel, base.shard_numel, "the average", owners, fragment)
    pairs = [dealing.averagers(index) for index in range(len(base.shards(fragment)))]
    key = keys.reduced(dealing.round, attempt.replica_id)
    reducing = ScatterReduce(
        *(attempt.store, attempt.clock, attempt.background, attempt.stamp, dealing.round, attempt.replica_id, pairs),
        write=partial(_created, attempt, key),
        aggregate=attempt.config.aggregate,
        patience_s=_PATIENCE_S + pause_s,
        owners=owners,
        fragment=fragment,
    )
    with denormals_kept():
        parts = [part_of(manifest, weight, read) for manifest, weight in named]
        for index in reducing.average_into(averages, parts):
            log.error(
                "round %d: replicas %d and %d published the same average of shard %d, which the payloads do not give",
                *(dealing.round, *pairs[index], index),
            )
    return averages


def _created(attempt: Attempt, key: str, record: Reduced) -> bool:
    return attempt.writer.create(record, key) is not None
