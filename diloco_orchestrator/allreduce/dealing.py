"""Scatter-reduce: which replicas read and average which payload shards, what that costs, and when a run uses it.

Pure functions of numbers and settings, so that all replicas, and all readers of the commit log, assign shards alike.
Needs no torch. `allreduce.scatter_reduce` computes the averages.
"""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.clock import MOST_PARALLEL
from diloco_orchestrator.codecs.table import LARGEST_GROUP, get_codec
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.start_records import Start

log = logging.getLogger(__name__)

EXACT = "fp32"  # codec that changes no bit
# More shards than these spread bytes no better. Large fleets take fewer where that costs less: every rank writes and
# reads objects by their number, and a store takes some thousand requests a second. Below 64 it hardly costs less.
_SHARDS_A_RANK, _MOST_SHARDS, _FEW_SHARDS = 4, 256, 64
_DRAWN = 2  # ranks that average a shard though others do it for them
_FEWEST_DEALERS = 3  # of two, each would read all payloads
_FEWEST_AT_ONCE, _IN_FLIGHT = 4, 256 * 2**20  # reduced shards that are read at the same time, and their bytes
_BYTES_IN_FLIGHT = 8  # of an element: the store engine's buffer and the bytes, in fp32

_WRITTEN_AT_ONCE = 4  # payload shards

# Requests a second of all ranks together, as S3 documents them for one prefix; bytes of fp32 a second that a rank
# decodes, adds or hashes: 16 cores take more, two take less.
_GETS_PER_S, _PUTS_PER_S, _ARITHMETIC = 5500.0, 3500.0, 10e9
SLOWEST = 1.75  # times the latency: the slowest request of those for which a round waits at one time


class Link(NamedTuple):
    """Latency and bandwidth of a rank's requests while all ranks use the store; `path="auto"` predicts times by it."""

    latency_s: float  # seconds of a small request, in the median
    up: float  # bytes a second
    down: float


ASSUMED = Link(0.05, 62.5e6, 62.5e6)  # where none was measured: 50 ms and 500 Mb/s


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


def draw_chance(shards: int, world_size: int) -> float:
    """Chance that a rank averages one shard more than it is assigned.

    The additional average finds false ones that owner and checker of the shard both published. The chance is 1 for up
    to two ranks a shard, and else such that two ranks for each shard do so in the mean, because each has to read that
    shard of every payload.
    """
    return min(1.0, _DRAWN * shards / world_size)


def dealers_of(shards: int, world_size: int) -> int:
    """Number of ranks that read and average `shards` shards, and publish what they found; all ranks read that."""
    return min(world_size, shards + 2)


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


def reduced_size(numel: int, codec: str | None) -> int:
    """Bytes of an averaged shard of `numel` elements. `codec`: of averages; None: they are in fp32."""
    return get_codec(codec or EXACT).encoded_size(numel)


def bytes_down_of_round(payload_bytes: float, lengths: Sequence[int], codec: str | None, replicas: int) -> int:
    """Bytes of payloads and averaged shards that all replicas together read in a round by scatter-reduce of a run.

    The number is a mean over rounds in which nobody fails or is late. A third replica reads the shards whose author is
    one of the two that average them, and every replica averages one more shard.

    Args:
        payload_bytes: of all payloads of the round.
        lengths: elements of each shard.
        codec: of the averages, None for fp32 as it is.
    """
    shards, averages = max(1, len(lengths)), sum(reduced_size(length, codec) for length in lengths)
    not_dealt = shards * (1 - 2 / replicas)  # shards that a replica is no dealer of
    drawn = min(1.0, not_dealt) * draw_chance(shards, replicas)
    drawn_bytes = drawn * (replicas - 1 - 2 / (replicas - 2)) * payload_bytes / shards
    return round(2 * payload_bytes + drawn_bytes + replicas * (not_dealt - drawn) * averages / shards)


def shard_numel_for(numel: int, world_size: int, most: int, codec: str = EXACT, link: Link = ASSUMED) -> int:
    """Elements per shard, at most `most`, with which scatter-reduce takes the least time over `link`.

    It is a multiple of every codec's group. Candidates are four shards a rank, but at most 256 or one a rank, and a
    half, a quarter and so on of that number, down to 64.
    """
    shards, cuts = max(world_size, min(_SHARDS_A_RANK * world_size, _MOST_SHARDS)), dict[int, float]()
    while shards >= _FEW_SHARDS or not cuts:
        cut = min(most, max(1, -(-numel // (shards * LARGEST_GROUP))) * LARGEST_GROUP)
        if cut not in cuts:
            cuts[cut] = _scatter_s(numel, codec, world_size, cut, link)
        shards //= 2
    return min(cuts, key=lambda cut: cuts[cut])


def predicted_s(numel: int, codec: str, world_size: int, most: int, link: Link = ASSUMED) -> tuple[float, float]:
    """Seconds in which ranks average a vector over `link`: (by gather, by scatter-reduce), for three ranks or more.

    A part of a round takes as long as the slowest of its bytes, of one rank's requests and of the requests of all ranks
    together; parts follow one another. Payload shards are written four at a time, and up to `MOST_PARALLEL` objects
    read at the same time. `most`: the largest number of elements in a shard.
    """
    cut = shard_numel_for(numel, world_size, most, codec, link)
    return _gather_s(numel, codec, world_size, most, link), _scatter_s(numel, codec, world_size, cut, link)


def _gather_s(numel: int, codec: str, n: int, shard_numel: int, link: Link) -> float:
    lengths = [stop - start for start, stop in shard_ranges(numel, shard_numel)]
    size, requests = sum(map(get_codec(codec).encoded_size, lengths)), n + (n - 1) * len(lengths)
    took_s = _writing_s(size, len(lengths), n, link) + _reading_s((n - 1) * size, requests, requests, n, link)
    return took_s + (2 * n - 1) * 4 * numel / _ARITHMETIC


def _scatter_s(numel: int, codec: str, n: int, shard_numel: int, link: Link) -> float:
    lengths = [stop - start for start, stop in shard_ranges(numel, shard_numel)]
    shards, size = max(1, len(lengths)), sum(map(get_codec(codec).encoded_size, lengths))
    averages = sum(reduced_size(each, average_codec_of(codec)) for each in lengths)
    mean, dealt = 2 * shards / n, 2 * (shards // n) + min(shards % n, 2)  # shards that a rank deals; at the most
    rest = max(0.0, shards - mean - 1)  # averages that others make
    took_s = _writing_s(size, shards, n, link) + ((dealt + 1) * n / shards + 2) * 4 * numel / _ARITHMETIC
    took_s += _reading_s(dealt / shards * n * size, n + n * dealt, n + n * mean, n, link)  # payloads
    told = dealers_of(shards, n)
    took_s += _reading_s(0, told + 2, told, n, link)  # check records
    # The shards that it owns, one after the other, and its record; the drawn one; records and averages of others.
    slow_s = SLOWEST * link.latency_s
    in_turn_s = (dealt / 2 + 1 + batches(told)) * slow_s + averages / n / link.up
    in_turn_s += _reading_s((n - 1) / shards * size, n - 1, 0, n, link)
    in_turn_s += rest * max(averages / shards / link.down, slow_s / at_once_for(max(lengths, default=0)))
    return took_s + max(in_turn_s, n * (n * draw_chance(shards, n) + told + rest) / _GETS_PER_S)


def _writing_s(size: int, shards: int, ranks: int, link: Link) -> float:
    """Seconds in which each of `ranks` writes `size` bytes in so many shards, then a record."""
    slow_s = SLOWEST * link.latency_s
    return max(
        size / link.up + slow_s, (batches(shards, _WRITTEN_AT_ONCE) + 1) * slow_s, ranks * (shards + 1) / _PUTS_PER_S
    )


def _reading_s(size: float, requests: int, mean: float, ranks: int, link: Link) -> float:
    """Seconds in which a rank reads `size` bytes by `requests`, while `ranks` send `mean` requests each."""
    return max(size / link.down, batches(requests) * SLOWEST * link.latency_s, ranks * mean / _GETS_PER_S)


def batches(requests: int, at_once: int = MOST_PARALLEL) -> int:
    """Number of times that a rank waits for requests of which `at_once` run at the same time."""
    return -(-requests // at_once)


def chooses_scatter(
    path: str, numel: int, codec: str, world_size: int, most: int, link: Callable[[], Link] = lambda: ASSUMED
) -> bool:
    """Whether a vector of `numel` elements is averaged by scatter-reduce. `path`: the setting; "auto" predicts times
    over `link()`, which is called for "auto" only.

    `most`: the largest number of elements in a shard. Both predicted times are logged. False for two ranks: owner and
    checker of every shard would read all payloads.
    """
    if world_size < _FEWEST_DEALERS or path == "gather":
        return False
    if path == "scatter_reduce":
        return True
    over = link()
    gather_s, scatter_s = predicted_s(numel, codec, world_size, most, over)
    chosen = "scatter_reduce" if scatter_s < gather_s else "gather"
    log.info(
        "path %r: %.2f s by gather, %.2f s by scatter_reduce, at %.3g ms a request, %.3g Mb/s up and %.3g Mb/s down",
        chosen,
        gather_s,
        scatter_s,
        1e3 * over.latency_s,
        over.up / 125e3,
        over.down / 125e3,
    )
    return scatter_s < gather_s


def path_of(
    config: RunConfig, fragments: Iterable[int], link: Callable[[], Link] = lambda: ASSUMED
) -> Literal["gather", "scatter_reduce"]:
    """Name of the way in which a run that begins now averages.

    Args:
        fragments: elements of each fragment of the model.
        link: the way of a replica to the store; called only where the choice depends on it.
    """
    if config.path == "auto" and config.adapters == "exact":
        return "gather"  # steps of products need every payload
    numel = max(fragments, default=0)
    takes = chooses_scatter(config.path, numel, config.codec, config.replicas, config.shard_numel, link)
    return "scatter_reduce" if takes else "gather"


def scatters(config: RunConfig, start: Start) -> bool:
    """Whether a run averages by scatter-reduce. With `path="auto"` its start record says which way was chosen.

    In a start record of an earlier version, which does not say it, shards shorter than the setting mean scatter-reduce.
    """
    if config.path == "auto":
        return start.path == "scatter_reduce" if start.path else start.shard_numel < config.shard_numel
    return config.path == "scatter_reduce" and config.replicas >= _FEWEST_DEALERS


def shard_numel_of(
    config: RunConfig, path: str, fragments: Sequence[int], link: Callable[[], Link] = lambda: ASSUMED
) -> int:
    """Elements in a shard of a run's base and payloads. `path`: a result of `path_of`.

    Args:
        fragments: elements of each fragment of the model.
        link: the way of a replica to the store; called only if the path was chosen by it.
    """
    if path == "gather":
        return config.shard_numel
    over = link() if config.path == "auto" else ASSUMED
    return shard_numel_for(max(fragments), config.replicas, config.shard_numel, config.codec, over)
