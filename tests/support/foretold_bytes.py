"""Bytes that the ranks of one `ObjectStoreAllReduce` read, from the rules by which they deal shards."""

from collections import Counter
from collections.abc import Sequence

from diloco_orchestrator.allreduce.dealing import average_codec_of, dealers, draw_chance, reduced_size
from diloco_orchestrator.codecs.table import get_codec


def bytes_down(lengths: Sequence[int], codec: str, world_size: int) -> tuple[int, int]:
    """Bytes of payloads and averages that all ranks together read: (by gather, by scatter-reduce), with headers.

    `lengths`: elements of each shard. The number for scatter-reduce assumes that nobody fails, and that all shards are
    as long as the first one.
    """
    sizes = [get_codec(codec).encoded_size(length) for length in lengths]
    reduced = [reduced_size(length, average_codec_of(codec)) for length in lengths]
    pairs = [dealers(0, index, world_size) for index in range(len(lengths))]
    dealt = Counter(rank for pair in pairs for rank in pair)
    # Ranks that deal not every shard, and of these in the mean those that draw one.
    draws = sum(dealt[rank] < len(lengths) for rank in range(world_size)) * draw_chance(len(lengths), world_size)
    of_payloads = sum(size * len(pair) for size, pair in zip(sizes, pairs, strict=True)) + draws * max(sizes, default=0)
    made = sum(size * len(pair) for size, pair in zip(reduced, pairs, strict=True)) + draws * max(reduced, default=0)
    scattered = (world_size - 1) * of_payloads + world_size * sum(reduced) - made
    return world_size * (world_size - 1) * sum(sizes), round(scattered)
