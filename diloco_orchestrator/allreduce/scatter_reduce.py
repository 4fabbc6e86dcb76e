"""`ScatterReduce`: the mean of contributions, of which each rank averages some shards and reads the averages of others.

With N ranks and payloads of c bytes a gather moves (N-1) c bytes to every rank, a scatter-reduce less than 3 c and the
size of the encoded mean, whatever N is. Two ranks, the *owner* and the *checker* of a shard, both average it from the
payloads and publish the digest of the result. The others use the owner's result where the two digests are equal, and
average the payloads themselves where they differ. So no published average changes a bit of the mean: it only saves
reading. Every rank encodes averages in the same codec and decodes them again.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.dealing import at_once_for, draw_chance
from diloco_orchestrator.allreduce.mean import EncodedShards, Part, encoded_shard
from diloco_orchestrator.allreduce.owners import ALONE, Owners
from diloco_orchestrator.allreduce.shards import fetch_shard
from diloco_orchestrator.clock import Background, Backoff, Clock, in_parallel
from diloco_orchestrator.codecs.table import get_codec
from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import Reduced, ReducedShard
from diloco_orchestrator.protocol.digests import BulkDigest, bulk_digest
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Shard
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

# How long to wait for the averages of others: thrice as long as this rank took for its own, and what a slow request
# takes. After that the payloads give the same bits.
_PATIENCE, _LEAST_PATIENCE_S = 3.0, 5.0
_FINE = 2**20  # parts of a chance
_POLL = Backoff(first_s=0.01, longest_s=0.5)

Words = Mapping[int, Mapping[int, ReducedShard]]  # rank -> shard -> the average that the rank has published


@dataclass
class ScatterReduce:
    """One rank's part in the scatter-reduce of one round."""

    store: Store
    clock: Clock
    background: Background  # for requests that do not depend on each other
    stamp: Stamp
    round_id: int
    rank: int
    pairs: Sequence[tuple[int, ...]]  # owner and checker of each shard
    write: Callable[[Reduced], bool]  # creates the record of this rank; False if its key holds another object
    aggregate: str = "mean"  # one of `allreduce.aggregate.AGGREGATES`
    owners: Owners = ALONE  # the processes of this rank, each of which averages and reads the shards that it owns
    fragment: int = 0  # whose shards these are
    patience_s: float = _LEAST_PATIENCE_S  # to wait for others, beside thrice the time of this rank's own averages
    distrusted: set[int] = field(default_factory=set)  # ranks whose averages are not used; grows with `false`
    # What the payloads do not give, of the shards averaged here: (shard, digest) -> ranks that published it, ascending.
    false: dict[tuple[int, BulkDigest], tuple[int, ...]] = field(default_factory=dict)
    borrowed: bool = False  # whether an average of another rank was used
    _digests: dict[int, BulkDigest] = field(default_factory=dict)  # of the averages made here, by shard
    _takes: dict[int, int | None] = field(default_factory=dict)  # versions under which those owned here were written

    def average_into(self, averages: EncodedShards, parts: Sequence[Part]) -> None:
        """Put the average of each shard of `parts`, the contributions, into `averages`, in whose codec it is encoded.

        Besides its own shards this rank averages one more from the payloads, which nobody can foretell: of two ranks
        that publish the same wrong average somebody finds out. In a large fleet it does so only at times
        (`draw_chance`). Shards of a rank that published a wrong one are averaged from the payloads, and `false` lists
        it. Raises `PayloadCorrupt` for bytes or lengths that are not the manifest's. Safe to repeat.
        """
        began = self.clock.now()
        own = [index for index, pair in enumerate(self.pairs) if self.rank in pair]
        others = [index for index in range(len(averages.lengths)) if index not in own]
        self._make(own, averages, parts)
        self._publish(own)
        took_s = self.clock.now() - began
        draws = bool(others) and self._draws(draw_chance(len(averages.lengths), len(parts)))
        drawn = [others[int(self.stamp.unforeseen(), 16) % len(others)]] if draws else []
        self._make(drawn, averages, parts)
        needed = {rank for index in others if index not in drawn for rank in self.pairs[index]}
        words = self._words(needed - {self.rank}, self.clock.now() + _PATIENCE * took_s + self.patience_s)
        self._compare([*own, *drawn], words)
        rest = [index for index in others if index not in drawn]
        taken = self._take(rest, averages, words)
        left = [index for index in rest if index not in taken]
        self.borrowed |= bool(taken)
        self._make(left, averages, parts)
        self._compare(left, words)

    def _draws(self, chance: float) -> bool:
        """Whether this rank averages one shard more; nobody can foretell it."""
        return chance >= 1 or int(self.stamp.unforeseen(), 16) % _FINE < chance * _FINE

    def _make(self, indices: Sequence[int], averages: EncodedShards, parts: Sequence[Part]) -> None:
        """Average the shards `indices` of the contributions `parts` from the payloads, into `averages`.

        Those that this rank owns are written to the store.
        """
        owned = {index for index in indices if self.pairs[index][0] == self.rank}
        what = self.background, self.store, self.round_id, self.aggregate, owned, averages, parts
        for digests, takes in self._each_owner(_average, indices, *what) if indices else ():
            self._digests |= digests
            self._takes |= takes

    def _each_owner(self, task: Callable[..., T], indices: Sequence[int], *args: Any) -> list[T]:
        """Call `task(own, *args)` in each process of this rank; `own`: the shards in `indices` that it holds."""
        return self.owners.each(_of_owner, self.owners, self.fragment, indices, task, *args)

    # -- what this rank publishes --------------------------------------------------------------------------------

    def _publish(self, own: Sequence[int]) -> None:
        """Publish the digests of the averages that this rank owns, which are written, and of those that it checks."""
        said = tuple(ReducedShard(shard=i, digest=self._digests[i], take=self._takes.get(i)) for i in own)
        record = Reduced(**self.stamp(), round_id=self.round_id, rank=self.rank, shards=said)
        if (
            said
            and not self.write(record)
            and published_by(self.store, self.round_id, self.rank) != {each.shard: each for each in said}
        ):
            key = keys.reduced(self.round_id, self.rank)
            log.warning("round %d: %s holds other averages than this rank made now", self.round_id, key)

    # -- what others published -----------------------------------------------------------------------------------

    def _words(self, needed: Iterable[int], until: float) -> Words:
        """Averages that the ranks `needed` have published, by rank and shard; waits for them until the time `until`."""
        found, missing, pauses = dict[int, Mapping[int, ReducedShard]](), set(needed), _POLL.pauses()
        while missing:
            for info in self.store.list(keys.reduced_shards(self.round_id)):
                parsed = keys.reduced.parse(info.key)
                if parsed and parsed[1] in missing:
                    missing.remove(parsed[1])
                    found[parsed[1]] = published_by(self.store, self.round_id, parsed[1])
            if missing and self.clock.now() >= until:
                log.warning("round %d: no averages of ranks %s; the payloads give them", self.round_id, sorted(missing))
                break
            if missing:
                self.clock.sleep(next(pauses))
        return found

    def _take(self, indices: Sequence[int], averages: EncodedShards, words: Words) -> set[int]:
        """Put into `averages` the published averages of shards on which owner and checker agree. Returns these shards.

        `words`: the averages that ranks have published, by rank and shard.
        """
        agreed = dict[int, tuple[int, ReducedShard]]()
        for index in indices:
            pair = self.pairs[index]
            owner, checker = (words.get(rank, {}).get(index) for rank in pair)
            if owner is None or checker is None or owner.take is None or owner.digest != checker.digest:
                continue
            if not self.distrusted & set(pair):
                agreed[index] = pair[0], owner
        what = self.store, self.background, self.round_id, averages, agreed
        return set().union(*self._each_owner(_read, list(agreed), *what)) if agreed else set()

    def _compare(self, made: Sequence[int], words: Words) -> None:
        """Record and log the ranks that published an average which the payloads do not give.

        `made`: the shards that this rank has averaged itself. `words`: published averages, by rank and shard.
        """
        for index in sorted(made):
            said = {rank: words[rank][index].digest for rank in self.pairs[index] if index in words.get(rank, {})}
            for digest, wrong in false_averages(said, self._digests[index], self.rank).items():
                log.warning(
                    "round %d: rank %s published an average of shard %d that the payloads do not give; not used",
                    self.round_id,
                    " and ".join(map(str, wrong)),
                    index,
                )
                self.false[index, digest] = wrong
                self.distrusted.update(wrong)


def published_by(store: Store, round_id: int, rank: int) -> Mapping[int, ReducedShard]:
    """Averages that a rank has published in round `round_id`, by shard; none, with a warning, without a valid record.

    A record is not valid if it is of another round or rank, or missing though it was listed: in a signed run the rank
    has not signed it.
    """
    key = keys.reduced(round_id, rank)
    try:
        record = Reduced.from_bytes(store.get(key, 0, most_bytes(key) + 1), key)
        if (record.round_id, record.rank) != (round_id, rank):
            raise RecordInvalid(f"{key} is the record of rank {record.rank} in round {record.round_id}.")
    except (RecordInvalid, ObjectMissing) as error:
        log.warning("round %d: the averages of rank %d are not used: %s", round_id, rank, error)
        return {}
    return {each.shard: each for each in record.shards}


def false_averages(
    said: Mapping[int, BulkDigest], right: BulkDigest, rank: int
) -> Mapping[BulkDigest, tuple[int, ...]]:
    """The ranks other than `rank`, ascending, that published another average of a shard than `right`, by its digest.

    `said`: digests that ranks have published. `right`: the digest of the average that the payloads give.
    """
    wrong = sorted((digest, each) for each, digest in said.items() if each != rank and digest != right)
    return {digest: tuple(each for known, each in wrong if known == digest) for digest, _ in wrong}


def _of_owner(owners: Owners, fragment: int, indices: Sequence[int], task: Callable[..., T], *args: Any) -> T:
    return task([index for index in indices if owners.owns(fragment, index)], *args)


def _average(
    indices: Sequence[int],
    background: Background,
    store: Store,
    round_id: int,
    aggregate: str,
    owned: Collection[int],
    averages: EncodedShards,
    parts: Sequence[Part],
) -> tuple[dict[int, BulkDigest], dict[int, int | None]]:
    """Average shards from the payloads, each read from all ranks at the same time, and write the encoded ones `owned`.

    Returns the digests of all, and of those written the version in the key, None where no key is left: both by shard.
    """
    digests, takes = dict[int, BulkDigest](), dict[int, int | None]()
    for index in indices:
        read = in_parallel(background, [partial(part.read, index) for part in parts])
        held = [replace(part, read=partial(_given, data)) for part, data in zip(parts, read, strict=True)]
        blocks = aggregate_of(aggregate, held, averages.lengths).shard(index)
        encoded = encoded_shard(blocks, averages.lengths[index], averages.codec)
        digests[index] = bulk_digest(encoded)
        if index in owned:
            takes[index] = _written(store, round_id, index, bytes(encoded))
        averages.put(index, encoded)
    return digests, takes


def _written(store: Store, round_id: int, index: int, data: bytes) -> int | None:
    """Write an average under the first of its keys that is free or has the same bytes; None if there is no such key."""
    for take in range(1, keys.MAX_TAKES + 1):
        key = keys.reduced_shard(round_id, index, take)
        if store.create(key, data) or store.get(key, 0, len(data) + 1) == data:
            return take
    return None


def _read(
    indices: Sequence[int],
    store: Store,
    background: Background,
    round_id: int,
    averages: EncodedShards,
    agreed: Mapping[int, tuple[int, ReducedShard]],
) -> set[int]:
    """Put published averages of shards into `averages`; returns the shards that could be read.

    `agreed`: by shard, the rank that owns it and the record of its average.
    """

    def read(index: int) -> bool:
        owner, said = agreed[index]
        assert said.take is not None, "what is agreed on was written"
        key = keys.reduced_shard(round_id, index, said.take)
        size = get_codec(averages.codec).encoded_size(averages.lengths[index])
        try:
            averages.put(index, fetch_shard(store, key, Shard(digest=said.digest, size=size)))
        except PayloadCorrupt as error:
            log.warning("round %d: an average of rank %d is not used: %s", round_id, owner, error)
            return False
        return True

    at_once = at_once_for(max(averages.lengths[index] for index in indices)) if indices else 1
    done = in_parallel(background, [partial(read, index) for index in indices], at_once)
    return {index for index, is_done in zip(indices, done, strict=True) if is_done}


def _given(data: bytes | memoryview, index: int) -> bytes | memoryview:
    """The bytes `data` of one shard that was read before, returned by a function of the form of `Part.read`."""
    return data
