"""`ScatterReduce`: the mean of contributions, of which each rank averages some shards and reads the averages of others.

With N ranks and payloads of c bytes a gather moves (N-1) c bytes to every rank, this less than 3 c and the fp32 size of
the mean, whatever N. The *owner* and the *checker* of a shard both average it from the payloads, and publish what came
out. The others use it where both agree on its bytes, and average the payloads where they do not. So a reduced shard
decides no bit of the mean: it is a cache.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.allreduce.shards import fetch_shard, shard_ranges
from diloco_orchestrator.clock import Background, Backoff, Clock, in_parallel, random_token
from diloco_orchestrator.codecs.table import LARGEST_GROUP, Encoded, encode, get_codec
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import Reduced, ReducedShard
from diloco_orchestrator.protocol.digests import BulkDigest, bulk_digest
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Shard
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

_CODEC = "fp32"  # of reduced shards: the bits of the mean, whatever the payloads are encoded in
_SHARDS_A_RANK = 4  # so that a drawn shard is a small part of all, and the last one hardly shorter
# How long to wait for the averages of others: thrice as long as this rank took for its own, and what a slow request
# takes. After that the payloads give the same bits.
_PATIENCE, _LEAST_PATIENCE_S = 3.0, 5.0
_POLL = Backoff(first_s=0.01, longest_s=0.5)

_AT_ONCE = 4  # reduced shards that are read at the same time

# The link for which `path="auto"` chooses. All ranks must choose alike, so none goes by what it has measured.
_ROUND_TRIP_S, _BYTES_PER_S = 0.05, 12.5e6  # 100 Mb/s

Words = Mapping[int, Mapping[int, ReducedShard]]  # rank -> shard -> the average that the rank has published


def shard_numel_for(numel: int, world_size: int, most: int) -> int:
    """Elements per shard, at most `most`, so that every rank has shards to average; whole groups of every codec."""
    return min(most, max(1, -(-numel // (_SHARDS_A_RANK * world_size * LARGEST_GROUP))) * LARGEST_GROUP)


def dealers(round_id: int, shard: int, world_size: int) -> tuple[int, int]:
    """The ranks, owner and checker, that average a shard in this round; another pair each round. `world_size` > 2."""
    first = (round_id + shard) % world_size
    return first, (first + 1) % world_size


def bytes_down(lengths: Sequence[int], codec: str, world_size: int) -> tuple[int, int]:
    """Payload and reduced bytes that all ranks together read: (by gather, by scatter-reduce), headers included.

    `lengths`: elements of each shard. For scatter-reduce while nobody fails, if all shards have the first one's length.
    """
    sizes = [get_codec(codec).encoded_size(length) for length in lengths]
    reduced = [get_codec(_CODEC).encoded_size(length) for length in lengths]
    gathered, scattered = world_size * (world_size - 1) * sum(sizes), 0
    for rank in range(world_size):
        own = [index for index in range(len(lengths)) if rank in dealers(0, index, world_size)]
        drawn = min(1, len(lengths) - len(own))
        scattered += (world_size - 1) * (sum(sizes[index] for index in own) + drawn * sizes[0] if sizes else 0)
        scattered += sum(reduced) - sum(reduced[index] for index in own) - drawn * reduced[0] if sizes else 0
    return gathered, scattered


def predicted_s(numel: int, codec: str, world_size: int, most: int) -> tuple[float, float]:
    """Seconds that a rank waits for the bytes of others, (by gather, by scatter-reduce), at 50 ms and 100 Mb/s.

    `most`: elements of a shard at the most. A rank of a gather reads one payload shard after another.
    """
    lengths = [stop - start for start, stop in shard_ranges(numel, shard_numel_for(numel, world_size, most))]
    shards, own = len(lengths), 2 * len(lengths) / world_size
    # By scatter-reduce: its own shards and one more, the averages that it writes and those that it reads, the records.
    trips = own + 1 + own / 2 + (shards - own) / _AT_ONCE + 2 + (world_size - 1)
    gathered, scattered = (bytes_ / world_size / _BYTES_PER_S for bytes_ in bytes_down(lengths, codec, world_size))
    return gathered + _ROUND_TRIP_S * (world_size - 1) * -(-numel // most), scattered + _ROUND_TRIP_S * trips


@dataclass
class ScatterReduce:
    """One rank's part in the scatter-reduce of one round."""

    store: Store
    clock: Clock
    background: Background  # for requests that do not depend on each other
    stamp: Stamp
    round_id: int
    rank: int
    world_size: int
    _digests: dict[int, BulkDigest] = field(default_factory=dict)  # of the averages made here, by shard

    def mean_into(self, shards: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
        """Write the mean of `parts`, those of all ranks, into `shards`, flat tensors of the payload shards' lengths.

        Besides its own shards this rank averages one more from the payloads, which nobody can foretell: of two ranks
        that publish the same wrong average somebody finds out. Raises `PayloadCorrupt` if this rank does, and for bytes
        or lengths that are not the manifest's; what one rank alone publishes wrongly is logged with its rank and not
        used.
        """
        began, pairs = self.clock.now(), [dealers(self.round_id, i, self.world_size) for i in range(len(shards))]
        own = [index for index, pair in enumerate(pairs) if self.rank in pair]
        others = [index for index in range(len(shards)) if index not in own]
        self._make(own, shards, parts)
        self._publish(own, shards, pairs)
        took_s = self.clock.now() - began
        drawn = [others[int(random_token(), 16) % len(others)]] if others else []
        self._make(drawn, shards, parts)
        needed = {rank for index in others for rank in pairs[index]}
        words = self._words(needed, self.clock.now() + _PATIENCE * took_s + _LEAST_PATIENCE_S)
        rest = [index for index in others if index not in drawn]
        calls = [partial(self._take, index, shards[index], words, pairs[index]) for index in rest]
        taken = in_parallel(self.background, calls, _AT_ONCE)
        self._make([index for index, done in zip(rest, taken, strict=True) if not done], shards, parts)
        self._compare(pairs, words)

    def _make(self, indices: Sequence[int], shards: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
        """Average shards from the payloads. Each shard is read from all ranks at the same time."""
        for index in indices:
            read = in_parallel(self.background, [partial(part.read, index) for part in parts])
            held = [replace(part, read=partial(_given, data)) for part, data in zip(parts, read, strict=True)]
            mean_into(shards, held, [index])
            self._digests[index] = bulk_digest(encode(shards[index], _CODEC))

    # -- what this rank publishes --------------------------------------------------------------------------------

    def _publish(self, own: Sequence[int], shards: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Write the averages that this rank owns, then the digests of those that it owns or checks."""
        takes = {index: self._written(index, shards[index]) for index in own if pairs[index][0] == self.rank}
        said = tuple(ReducedShard(shard=i, digest=self._digests[i], take=takes.get(i)) for i in own)
        record = Reduced(**self.stamp(), round_id=self.round_id, rank=self.rank, shards=said)
        key = keys.reduced(self.round_id, self.rank)
        if not self.store.create(key, record.to_bytes()) and self._said(self.rank) != {
            each.shard: each for each in said
        }:
            log.warning("round %d: %s holds other averages than this rank made now", self.round_id, key)

    def _written(self, index: int, shard: torch.Tensor) -> int | None:
        """Write an average under the first of its keys that is free or has the same bytes. None: there is none."""
        data = encode(shard, _CODEC)
        for take in range(1, keys.MAX_TAKES + 1):
            key = keys.reduced_shard(self.round_id, index, take)
            if self.store.create(key, data) or self.store.get(key) == data:
                return take
        return None

    # -- what others published -----------------------------------------------------------------------------------

    def _words(self, needed: Iterable[int], until: float) -> Words:
        """Averages by rank and shard that the ranks `needed` published by the time `until`, when waiting ends."""
        found, missing, pauses = dict[int, Mapping[int, ReducedShard]](), set(needed), _POLL.pauses()
        while missing:
            for info in self.store.list(keys.reduced_shards(self.round_id)):
                parsed = keys.reduced.parse(info.key)
                if parsed and parsed[1] in missing:
                    missing.remove(parsed[1])
                    found[parsed[1]] = self._said(parsed[1])
            if missing and self.clock.now() >= until:
                log.warning("round %d: no averages of ranks %s; the payloads give them", self.round_id, sorted(missing))
                break
            if missing:
                self.clock.sleep(next(pauses))
        return found

    def _said(self, rank: int) -> Mapping[int, ReducedShard]:
        """Averages that the record of a rank lists, by shard; none if it is not that rank's record of this round."""
        key = keys.reduced(self.round_id, rank)
        try:
            record = Reduced.from_bytes(self.store.get(key), key)
            if (record.round_id, record.rank) != (self.round_id, rank):
                raise RecordInvalid(f"{key} is the record of rank {record.rank} in round {record.round_id}.")
        except RecordInvalid as error:
            log.warning("round %d: the averages of rank %d are not used: %s", self.round_id, rank, error)
            return {}
        return {each.shard: each for each in record.shards}

    def _take(self, index: int, shard: torch.Tensor, words: Words, pair: tuple[int, int]) -> bool:
        """Copy the owner's average of a shard, if owner and checker agree on its bytes. Returns whether they do."""
        owner, checker = (words.get(rank, {}).get(index) for rank in pair)
        if owner is None or checker is None or owner.take is None or owner.digest != checker.digest:
            return False
        key, size = keys.reduced_shard(self.round_id, index, owner.take), get_codec(_CODEC).encoded_size(shard.numel())
        try:
            data = fetch_shard(self.store, key, Shard(digest=owner.digest, size=size))
            shard.copy_(Encoded(data, _CODEC, shard.numel()).values())
        except PayloadCorrupt as error:
            log.warning("round %d: an average of rank %d is not used: %s", self.round_id, pair[0], error)
            return False
        return True

    def _compare(self, pairs: Sequence[tuple[int, int]], words: Words) -> None:
        """Log ranks that published an average which the payloads do not give, of the shards averaged here.

        Raises `PayloadCorrupt` if owner and checker of a shard published the same wrong one: other ranks have used it.
        """
        for index, digest in sorted(self._digests.items()):
            said = {rank: words[rank][index].digest for rank in pairs[index] if index in words.get(rank, {})}
            wrong = sorted(rank for rank, word in said.items() if rank != self.rank and word != digest)
            if len(wrong) == 2 and len(set(said.values())) == 1:
                raise PayloadCorrupt(
                    f"round {self.round_id} in {self.store.url}: ranks {wrong[0]} and {wrong[1]} published the same "
                    f"average of shard {index}, which the payloads do not give. Other ranks may have used it: do not "
                    "use this round's means. Compare `diloco doctor` on both machines, or use path='gather'."
                )
            if wrong:
                log.warning(
                    "round %d: rank %s published an average of shard %d that the payloads do not give; not used",
                    *(self.round_id, " and ".join(map(str, wrong)), index),
                )


def _given(data: bytes | memoryview, index: int) -> bytes | memoryview:
    """The bytes `data` of a shard that was read before, as `Part.read` returns them."""
    return data
