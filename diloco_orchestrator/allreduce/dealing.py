"""Which replicas read and average which payload shards by scatter-reduce, what that costs, and when a run does so.

Pure functions of numbers and settings, so that all replicas, and all readers of the commit log, deal alike. Needs no
torch. `allreduce.scatter_reduce` averages what is dealt.
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
    """Reduced shards of `numel` elements that are read at the same time, so that they take 256 MiB, or are four."""
    return max(_FEWEST_AT_ONCE, min(MOST_PARALLEL, _IN_FLIGHT // max(1, _BYTES_IN_FLIGHT * numel)))


def average_codec_of(codec: str) -> str | None:
    """Codec through which an average by scatter-reduce passes; None for payloads in fp32: it stays as it is.

    It is that of the payloads, or the one for fine parameters if theirs needs error feedback: what encoding loses of an
    average nobody keeps.
    """
    found = get_codec(codec).fine or codec
    return None if found == EXACT else found


def shard_numel_for(numel: int, world_size: int, most: int) -> int:
    """Elements per shard, at most `most`, so that every rank has shards to average; whole groups of every codec."""
    shards = max(world_size, min(_SHARDS_A_RANK * world_size, _MOST_SHARDS))
    return min(most, max(1, -(-numel // (shards * LARGEST_GROUP))) * LARGEST_GROUP)


def dealers(
    round_id: int, shard: int, world_size: int, among: Container[int] | None = None, but: int | None = None
) -> tuple[int, ...]:
    """The ranks, owner and checker, that average a shard in this round; another pair each round.

    The first two ranks of `among` (default: all) without `but`, in turn from `round_id + shard` on; fewer if there are
    fewer.
    """
    in_turn = ((round_id + shard + step) % world_size for step in range(world_size))
    return tuple(islice((rank for rank in in_turn if rank != but and (among is None or rank in among)), 2))


@dataclass(frozen=True)
class Dealing:
    """The replicas that read and average payload shards in one round by scatter-reduce, called its dealers."""

    round: int
    replicas: int  # ids of the run
    among: frozenset[int]  # the dealers

    def readers(self, author: int, shard: int) -> tuple[int, ...]:
        """The two dealers that read a shard of one contribution before the commit, none of them its author."""
        return dealers(self.round, shard, self.replicas, self.among, author)

    def averagers(self, shard: int) -> tuple[int, int]:
        """Owner and checker of a shard: the two dealers that average it after the commit."""
        owner, checker = dealers(self.round, shard, self.replicas, self.among)
        return owner, checker


def dealing_of(round_: int, config: RunConfig, among: Iterable[int]) -> Dealing | None:
    """Dealing of a round's shards among some replicas; None for fewer than three, or half of the run's: a gather."""
    dealing = Dealing(round_, config.most_replicas, frozenset(among))
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
    """Bytes of the reduced shard of `numel` elements. `codec`: that of averages, None for fp32 as it is."""
    return get_codec(codec or EXACT).encoded_size(numel)


def bytes_down_of_round(payload_bytes: float, lengths: Sequence[int], codec: str | None, replicas: int) -> int:
    """Bytes of payloads and reduced shards that all replicas together read in a round by scatter-reduce of a run.

    While nobody fails or is late, on average over what they draw. A run reads more than `bytes_down`, because a third
    replica reads the shards whose author is one of their dealers. What such a reader draws it has read in part.

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
    """Seconds in which a rank moves its bytes and sends its requests, (by gather, by scatter-reduce), over `LINK`.

    For three ranks or more. Payload shards are written four at a time, and up to `MOST_PARALLEL` objects read at the
    same time. `most`: elements of a shard at the most.
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
    """The path of a run that begins now. `fragments`: elements of each fragment that rounds average."""
    if config.path == "auto" and config.adapters == "exact":
        return "gather"  # steps of products need every payload
    numel = max(fragments, default=0)
    takes = chooses_scatter(config.path, numel, config.codec, config.replicas, config.shard_numel)
    return "scatter_reduce" if takes else "gather"


def scatters(config: RunConfig, start: Start) -> bool:
    """Whether the rounds of a run are by scatter-reduce. What "auto" takes is fixed by the start record.

    Without it in an earlier version's record: the shards of a gather have the length of the setting.
    """
    if config.path == "auto":
        return start.path == "scatter_reduce" if start.path else start.shard_numel < config.shard_numel
    return config.path == "scatter_reduce" and config.replicas >= _FEWEST_DEALERS


def shard_numel_of(config: RunConfig, path: str, fragments: Sequence[int]) -> int:
    """Elements in a shard of a run's base and payloads. `path`, `fragments`: as of `path_of`."""
    if path == "gather":
        return config.shard_numel
    return shard_numel_for(max(fragments), config.replicas, config.shard_numel)
