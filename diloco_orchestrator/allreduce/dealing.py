"""Scatter-reduce: which replicas read and average which payload shards, what that costs, and when a run uses it.

Pure functions of numbers and settings, so that all replicas, and all readers of the commit log, assign shards alike.
Needs no torch. `allreduce.scatter_reduce` computes the averages.
"""

import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.clock import MOST_PARALLEL
from diloco_orchestrator.codecs.table import LARGEST_GROUP, get_codec
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.records import Start

log = logging.getLogger(__name__)

EXACT = "fp32"  # codec that changes no bit
# So many that a drawn shard is a small part of all, and the last one hardly shorter; but every rank writes and reads
# objects by their number, and a store takes some thousand requests a second (`benchmarks/scale.py`).
_SHARDS_A_RANK, _MOST_SHARDS = 4, 256
_FEWEST_DEALERS = 3  # of two, each would read all payloads
_FEWEST_AT_ONCE, _IN_FLIGHT = 4, 256 * 2**20  # reduced shards that are read at the same time, and their bytes
_BYTES_IN_FLIGHT = 8  # of an element: the store engine's buffer and the bytes, in fp32

_WRITTEN_AT_ONCE = 4  # payload shards

# The link for which `path="auto"` chooses. All ranks must choose alike, so none goes by what it has measured. Over the
# fleets and links of `benchmarks/scale.py` it chooses right most often with this one.
LINK = "50 ms and 500 Mb/s"
_ROUND_TRIP_S, _BYTES_PER_S = 0.05, 62.5e6


def at_once_for(numel: int) -> int:
    """Number of averaged shards of `numel` elements that a rank reads at the same time: as many as take 256 MiB, at
    least four.
    """
    return max(_FEWEST_AT_ONCE, min(MOST_PARALLEL, _IN_FLIGHT // max(1, _BYTES_IN_FLIGHT * numel)))


def average_codec_of(codec: str) -> str | None:
    """Name of the codec in which averages by scatter-reduce are sent; None if payloads are in fp32: then averages are
    too.

    It is the payloads' codec `codec`, or the one for fine parameters if that codec needs error feedback: for an average
    no replica keeps the encoding's error to add it to the next one.
    """
    found = get_codec(codec).fine or codec
    return None if found == EXACT else found


def shard_numel_for(numel: int, world_size: int, most: int) -> int:
    """Elements per shard, at most `most`: a multiple of every codec's group, small enough that each rank has some."""
    shards = max(world_size, min(_SHARDS_A_RANK * world_size, _MOST_SHARDS))
    return min(most, max(1, -(-numel // (shards * LARGEST_GROUP))) * LARGEST_GROUP)


def dealers(
    round_id: int, shard: int, world_size: int, among: Container[int] | None = None, but: int | None = None
) -> tuple[int, ...]:
    """The two ranks, owner and checker, that both average a shard for all others in this round; another pair each
    round.

    They are the first two ranks in turn from `round_id + shard` on that are in `among` (default: all) and are not
    `but`; fewer if fewer are left.
    """
    in_turn = ((round_id + shard + step) % world_size for step in range(world_size))
    return tuple(islice((rank for rank in in_turn if rank != but and (among is None or rank in among)), 2))


@dataclass(frozen=True)
class Dealing:
    """The assignment of payload shards to the replicas that verify and average them for all in one round."""

    round: int
    replicas: int  # ids of the run
    among: frozenset[int]  # the dealers

    def readers(self, author: int, shard: int) -> tuple[int, ...]:
        """Two replicas that read and verify a shard of one contribution before the commit; neither is its author."""
        return dealers(self.round, shard, self.replicas, self.among, author)

    def averagers(self, shard: int) -> tuple[int, int]:
        """Owner and checker of a shard: the two replicas that average it for the others after the commit."""
        owner, checker = dealers(self.round, shard, self.replicas, self.among)
        return owner, checker


def dealing_of(round_: int, config: RunConfig, among: Iterable[int]) -> Dealing | None:
    """The assignment of a round's shards to the replicas `among`; None if they are too few for scatter-reduce.

    Fewer than three, or than half of the run's replicas, are too few: then every replica reads every payload.
    Replicas of strangers (`config.invited`) average for nobody.
    """
    dealing = Dealing(round_, config.most_replicas, frozenset(among).difference(config.invited))
    return dealing if len(dealing.among) >= max(_FEWEST_DEALERS, config.replicas // 2 + 1) else None


def bytes_down(lengths: Sequence[int], codec: str, world_size: int) -> tuple[int, int]:
    """Payload and reduced bytes that all ranks together read: (by gather, by scatter-reduce), headers included.

    `lengths`: elements of each shard. For scatter-reduce while nobody fails, if all shards have the first one's length.
    """
    sizes = [get_codec(codec).encoded_size(length) for length in lengths]
    reduced = [reduced_size(length, average_codec_of(codec)) for length in lengths]
    pairs = [dealers(0, index, world_size) for index in range(len(lengths))]
    dealt = Counter(rank for pair in pairs for rank in pair)
    draws = sum(dealt[rank] < len(lengths) for rank in range(world_size))  # ranks that deal not every shard
    of_payloads = sum(size * len(pair) for size, pair in zip(sizes, pairs, strict=True)) + draws * max(sizes, default=0)
    made = sum(size * len(pair) for size, pair in zip(reduced, pairs, strict=True)) + draws * max(reduced, default=0)
    return world_size * (world_size - 1) * sum(sizes), (world_size - 1) * of_payloads + world_size * sum(reduced) - made


def reduced_size(numel: int, codec: str | None) -> int:
    """Bytes of an averaged shard of `numel` elements. `codec`: of averages; None: they are in fp32."""
    return get_codec(codec or EXACT).encoded_size(numel)


def bytes_down_of_round(payload_bytes: float, lengths: Sequence[int], codec: str | None, replicas: int) -> int:
    """Bytes of payloads and averaged shards that all replicas together read in a round by scatter-reduce of a run.

    The number is a mean over rounds in which nobody fails or is late. A run reads more than `bytes_down`, because a
    third replica reads the shards whose author is one of the two that average them, and every replica averages one more
    shard.

    Args:
        payload_bytes: of all payloads of the round.
        lengths: elements of each shard.
        codec: of the averages, None for fp32 as it is.
    """
    shards, averages = max(1, len(lengths)), sum(reduced_size(length, codec) for length in lengths)
    not_dealt = shards * (1 - 2 / replicas)  # shards that a replica is no dealer of
    drawn = min(1.0, not_dealt)
    drawn_bytes = drawn * (replicas - 1 - 2 / (replicas - 2)) * payload_bytes / shards
    return round(2 * payload_bytes + drawn_bytes + replicas * (not_dealt - drawn) * averages / shards)


def predicted_s(numel: int, codec: str, world_size: int, most: int) -> tuple[float, float]:
    """Seconds that a rank's transfers and requests take over `LINK`: (by gather, by scatter-reduce), for three ranks or
    more.

    Payload shards are written four at a time, and up to `MOST_PARALLEL` objects read at the same time. `most`: the
    largest number of elements in a shard.
    """
    whole = [stop - start for start, stop in shard_ranges(numel, most)]
    lengths = [stop - start for start, stop in shard_ranges(numel, shard_numel_for(numel, world_size, most))]
    size, average, shards = get_codec(codec).encoded_size, average_codec_of(codec), len(lengths)
    gathered, payload = world_size * sum(map(size, whole)), sum(map(size, lengths))
    scattered = payload + bytes_down_of_round(world_size * payload, lengths, average, world_size) / world_size
    scattered += sum(reduced_size(each, average) for each in lengths) / world_size
    own = 2 * shards / world_size
    rest = max(0.0, shards - own - 1)  # averages that others make
    trips = len(whole) / _WRITTEN_AT_ONCE + _batches((world_size - 1) * len(whole))
    # Payload shards, what is dealt of others', check records; own averages, the drawn shard, records, others' averages.
    more = shards / _WRITTEN_AT_ONCE + _batches(2 * shards) + _batches(world_size) + 2
    more += own / 2 + 1 + 2 * _batches(world_size) + rest / at_once_for(max(lengths, default=0))
    return gathered / _BYTES_PER_S + _ROUND_TRIP_S * trips, scattered / _BYTES_PER_S + _ROUND_TRIP_S * more


def _batches(requests: int) -> int:
    return -(-requests // MOST_PARALLEL)


def chooses_scatter(path: str, numel: int, codec: str, world_size: int, most: int) -> bool:
    """Whether a vector of `numel` elements is averaged by scatter-reduce. `path`: the setting; "auto" predicts times.

    Both predicted times are logged. False for two ranks: owner and checker of every shard would read all payloads.
    """
    if world_size < _FEWEST_DEALERS or path == "gather":
        return False
    if path == "scatter_reduce":
        return True
    gather_s, scatter_s = predicted_s(numel, codec, world_size, most)
    chosen = "scatter_reduce" if scatter_s < gather_s else "gather"
    log.info("path %r: %.1f s by gather, %.1f s by scatter_reduce, at %s", chosen, gather_s, scatter_s, LINK)
    return scatter_s < gather_s


def path_of(config: RunConfig, fragments: Iterable[int]) -> Literal["gather", "scatter_reduce"]:
    """Name of the way in which a run that begins now averages. `fragments`: elements of each fragment of the model."""
    if config.path == "auto" and config.adapters == "exact":
        return "gather"  # steps of products need every payload
    numel = max(fragments, default=0)
    takes = chooses_scatter(config.path, numel, config.codec, config.replicas, config.shard_numel)
    return "scatter_reduce" if takes else "gather"


def scatters(config: RunConfig, start: Start) -> bool:
    """Whether a run averages by scatter-reduce. With `path="auto"` its start record says which way was chosen.

    In a start record of an earlier version, which does not say it, shards shorter than the setting mean scatter-reduce.
    """
    if config.path == "auto":
        return start.path == "scatter_reduce" if start.path else start.shard_numel < config.shard_numel
    return config.path == "scatter_reduce" and config.replicas >= _FEWEST_DEALERS


def shard_numel_of(config: RunConfig, path: str, fragments: Sequence[int]) -> int:
    """Elements in a shard of a run's base and payloads. `path`: a result of `path_of`.

    `fragments`: elements of each fragment of the model.
    """
    if path == "gather":
        return config.shard_numel
    return shard_numel_for(max(fragments), config.replicas, config.shard_numel)
