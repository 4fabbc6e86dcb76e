"""The buffers (such as BatchNorm statistics) of a base: one rule that replicas, rebuilds and `verify` share.

Every replica trains with its own buffers, and publishes with each contribution those that changed since the run's
start. The base after a round has the buffers of the lowest averaged replica (of the next one if those cannot be read),
and the first snapshot's values of the unchanged ones. Replicas of strangers come last: buffers are taken as they are,
unscored. They are not averaged: a mean of counters, masks or running maxima is not a value that training gives, and one
object is read instead of N.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from diloco_orchestrator.allreduce.shards import fetch_shard
from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Answer, Contribution, Shard
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.tensor_file import encode, views
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)


def write_buffers(
    store: Store, replica_id: int, round_: int, attempt: int, tensors: Mapping[str, torch.Tensor]
) -> Shard:
    """Create the object with these buffers; returns digest and size for the manifest."""
    data = encode(tensors)
    store.create(keys.buffers(replica_id, round_, attempt), data)
    return Shard(digest=bulk_digest(data), size=len(data))


def read_buffers(store: Store, manifest: Contribution) -> dict[str, torch.Tensor]:
    """The buffers that the author of a manifest published with it: those changed since the run's start.

    They must not be written to. Raises `PayloadCorrupt` if the object was deleted or changed, `RecordInvalid` if it
    holds no buffers.
    """
    if manifest.buffers is None:
        return {}
    key = keys.buffers(manifest.replica_id, manifest.round, manifest.attempt)
    return views(fetch_shard(store, key, manifest.buffers), f"{key} in {store.url}")


def buffers_of_base(run_log: RunLog, round_: int) -> dict[str, torch.Tensor]:
    """The buffers of the base after a round that differ from the first snapshot's. The model must have buffers.

    Raises `PayloadCorrupt`, `RecordInvalid` or `ObjectMissing` if those of no averaged replica can be read.
    """
    entry = run_log.commit(round_) if round_ else None
    if entry is None:
        return {}
    averaged = [answer for answer in entry.commit.answers if answer.averaged]
    return buffers_of(run_log.store, round_, averaged, run_log.run.config.invited)


def buffers_of(
    store: Store, round_: int, averaged: Sequence[Answer], invited: Collection[int]
) -> dict[str, torch.Tensor]:
    """The buffers of the base after a round: those of the first averaged replica whose object can be read.

    `averaged`: the responses that its commit averages, in `replica_id` order. `invited`: ids of strangers' replicas,
    which come after all others. Raises as `buffers_of_base`.
    """
    reader, failure = ContributionReader(store), None
    for answer in sorted(averaged, key=lambda each: each.replica_id in invited):
        try:
            return read_buffers(store, reader.named(round_, answer))
        except (PayloadCorrupt, RecordInvalid, ObjectMissing) as error:
            failure = failure or error
            log.warning("round %d: the buffers of replica %d cannot be read: %s", round_, answer.replica_id, error)
    raise failure or RecordInvalid(f"{keys.commit(round_)} averages nobody, and so has no buffers of a base.")


def not_a_number(tensors: Mapping[str, torch.Tensor]) -> str:
    """The name of the first tensor that holds NaN; empty if none does."""
    floating = (name for name in sorted(tensors) if tensors[name].is_floating_point())
    return next((name for name in floating if bool(torch.isnan(tensors[name]).any())), "")
