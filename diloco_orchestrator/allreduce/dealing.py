"""Scatter-reduce: which replicas read and average which payload shards, what that costs, and when a run uses it.

Pure functions of numbers and settings, so that all replicas, and all readers of the commit log, assign shards alike.
Needs no torch. `allreduce.scatter_reduce` computes the averages.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.codecs.table import LARGEST_GROUP, get_codec
from diloco_orchestrator.config import RunConfig

log = logging.getLogger(__name__)

REDUCED_CODEC = "fp32"  # of reduced shards: the bits of the mean, whatever the payloads are encoded in
_SHARDS_A_RANK = 4  # so that a drawn shard is a small part of all, and the last one hardly shorter
_FEWEST_DEALERS = 3  # of two, each would read all payloads
AT_ONCE = 4  # reduced shards that are read at the same time

# The link for which `path="auto"` chooses. All ranks must choose alike, so none goes by what it has measured.
_ROUND_TRIP_S, _BYTES_PER_S = 0.05, 12.5e6  # 100 Mb/s


def shard_numel_for(numel: int, world_size: int, most: int) -> int:
    """Elements per shard, at most `most`: a multiple of every codec's group, small enough that each rank has some."""
    return min(most, max(1, -(-numel // (_SHARDS_A_RANK * world_size * LARGEST_GROUP))) * LARGEST_GROUP)


def dealers(round_id: int, shard: int, world_size: int, among: Iterable[int] | None = None) -> tuple[int, ...]:
    """The two ranks, owner and checker, that both average a shard for all others in this round; another pair each
    round.

    The first two ranks of `among` (default: all) in turn from `round_id + shard` on; fewer if it has fewer.
    """
    allowed = range(world_size) if among is None else set(among)
    in_turn = ((round_id + shard + step) % world_size for step in range(world_size))
    return tuple(rank for rank in in_turn if rank in allowed)[:2]


@dataclass(frozen=True)
class Dealing:
    """The assignment of payload shards to the replicas that verify and average them for all in one round."""

    round: int
    replicas: int  # ids of the run
    among: frozenset[int]  # the dealers

    def readers(self, author: int, shard: int) -> tuple[int, ...]:
        """Two replicas that read and verify a shard of one contribution before the commit; neither is its author."""
        return dealers(self.round, shard, self.replicas, self.among - {author})

    def averagers(self, shard: int) -> tuple[int, int]:
        """Owner and checker of a shard: the two replicas that average it for the others after the commit."""
        owner, checker = dealers(self.round, shard, self.replicas, self.among)
        return owner, checker


def dealing_of(round_: int, config: RunConfig, among: Iterable[int]) -> Dealing | None:
    """The assignment of a round's shards to the replicas `among`; None if they are too few for scatter-reduce.

    Fewer than three, or than half of the run's replicas, are too few: then every replica reads every payload.
    """
    dealing = Dealing(round_, config.most_replicas, frozenset(among))
    return dealing if len(dealing.among) >= max(_FEWEST_DEALERS, config.replicas // 2 + 1) else None


def bytes_down(lengths: Sequence[int], codec: str, world_size: int) -> tuple[int, int]:
    """Payload and reduced bytes that all ranks together read: (by gather, by scatter-reduce), headers included.

    `lengths`: elements of each shard. For scatter-reduce while nobody fails, if all shards have the first one's length.
    """
    sizes = [get_codec(codec).encoded_size(length) for length in lengths]
    reduced = [get_codec(REDUCED_CODEC).encoded_size(length) for length in lengths]
    gathered, scattered = world_size * (world_size - 1) * sum(sizes), 0
    for rank in range(world_size):
        own = [index for index in range(len(lengths)) if rank in dealers(0, index, world_size)]
        drawn = min(1, len(lengths) - len(own))
        scattered += (world_size - 1) * (sum(sizes[index] for index in own) + drawn * sizes[0] if sizes else 0)
        scattered += sum(reduced) - sum(reduced[index] for index in own) - drawn * reduced[0] if sizes else 0
    return gathered, scattered


def bytes_down_of_round(payload_bytes: float, lengths: Sequence[int], replicas: int) -> int:
    """Bytes of payloads and averaged shards that all replicas together read in a round by scatter-reduce of a run.

    The number is a mean over rounds in which nobody fails or is late. A run reads more than `bytes_down`, because a
    third replica reads the shards whose author is one of the two that average them, and every replica averages one more
    shard.

    Args:
        payload_bytes: of all payloads of the round.
        lengths: elements of each shard.
    """
    shards, averages = len(lengths), sum(get_codec(REDUCED_CODEC).encoded_size(length) for length in lengths)
    not_dealt = shards * (1 - 2 / replicas)  # shards that a replica is no dealer of
    drawn = min(1.0, not_dealt)
    drawn_bytes = drawn * (replicas - 1 - 2 / (replicas - 2)) * payload_bytes / shards
    return round(2 * payload_bytes + drawn_bytes + replicas * (not_dealt - drawn) * averages / shards)


def predicted_s(numel: int, codec: str, world_size: int, most: int) -> tuple[float, float]:
    """Seconds that a rank waits for the bytes of others, (by gather, by scatter-reduce), at 50 ms and 100 Mb/s.

    `most`: the largest number of elements in a shard. A rank of a gather reads one payload shard after another.
    """
    lengths = [stop - start for start, stop in shard_ranges(numel, shard_numel_for(numel, world_size, most))]
    shards, own = len(lengths), 2 * len(lengths) / world_size
    # By scatter-reduce: its own shards and one more, the averages that it writes and those that it reads, the records.
    trips = own + 1 + own / 2 + (shards - own) / AT_ONCE + 2 + (world_size - 1)
    gathered, scattered = (bytes_ / world_size / _BYTES_PER_S for bytes_ in bytes_down(lengths, codec, world_size))
    return gathered + _ROUND_TRIP_S * (world_size - 1) * -(-numel // most), scattered + _ROUND_TRIP_S * trips


def chooses_scatter(path: str, numel: int, codec: str, world_size: int, most: int) -> bool:
    """Whether a vector of `numel` elements is averaged by scatter-reduce. `path`: the setting; "auto" predicts times.

    Both predicted times are logged. False for two ranks: owner and checker of every shard would read all payloads.
    """
    if world_size < _FEWEST_DEALERS or path == "gather":
        return False
    if path == "scatter_reduce":
        return True
    gather_s, scatter_s = predicted_s(numel, codec, world_size, most)
    chosen, link = "scatter_reduce" if scatter_s < gather_s else "gather", "50 ms and 100 Mb/s"
    log.info("path %r: %.1f s by gather, %.1f s by scatter_reduce, at %s", chosen, gather_s, scatter_s, link)
    return scatter_s < gather_s


def scatters(config: RunConfig, fragments: Iterable[int]) -> bool:
    """Whether a run averages by scatter-reduce. `fragments`: elements of each fragment of the model."""
    if config.path == "auto" and config.adapters == "exact":
        return False  # steps of products need every payload
    numel = max(fragments, default=0)
    return chooses_scatter(config.path, numel, config.codec, config.replicas, config.shard_numel)


def shard_numel_of(config: RunConfig, fragments: Sequence[int]) -> int:
    """Elements in a shard of a run's base and payloads. `fragments`: elements of each fragment of the model."""
    if not scatters(config, fragments):
        return config.shard_numel
    return shard_numel_for(max(fragments), config.replicas, config.shard_numel)
