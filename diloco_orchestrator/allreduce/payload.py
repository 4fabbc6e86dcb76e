"""Publishes a payload: a flat fp32 vector as encoded, digested shards in the bucket.

`allreduce.shards` reads and verifies shards, `codecs` encodes them, `protocol.rounds` decides what is averaged.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from diloco_orchestrator.allreduce.owners import ALONE, Owners, merged
from diloco_orchestrator.allreduce.payload_cache import KeepsPayloads
from diloco_orchestrator.allreduce.shards import NotFinite, shard_ranges
from diloco_orchestrator.allreduce.threads import one_torch_thread, workers
from diloco_orchestrator.allreduce.vectors import BLOCK, FlatTensors, Vector
from diloco_orchestrator.clock import Background, NoBackground, in_parallel
from diloco_orchestrator.codecs.fine import within
from diloco_orchestrator.codecs.table import Measure, Ranges, get_codec
from diloco_orchestrator.errors import PayloadCorrupt, RoundReused
from diloco_orchestrator.protocol.digests import BulkHasher
from diloco_orchestrator.protocol.records import Payload, Shard
from diloco_orchestrator.store.base import Store

_AT_ONCE = 4  # shards that are formed or written at the same time, at the most: each needs twice its size


def publish(
    store: Store,
    key_of_shard: Callable[[int], str],
    vector: Vector,
    codec: str,
    shard_numel: int,
    cache: KeepsPayloads,
    background: Background | None = None,
    most_norm: float = math.inf,
    fine: Ranges = (),
    residual: FlatTensors | None = None,
    owners: Owners = ALONE,
    fragment: int = 0,
) -> Payload:
    """Create the shards of a vector and return their description for the manifest. Safe to repeat with equal numbers.

    Every element is read, encoded, checked and hashed once, a block at a time. Raises `NotFinite` if the vector holds
    NaN or infinity once it is encoded (bf16 turns the largest fp32 numbers into infinity), or if its norm is above
    `most_norm`, before anything is written; `RoundReused` if a shard exists with other bytes.

    Args:
        key_of_shard: shard index -> key. With several ranks it is pickled.
        codec: name of the encoding.
        shard_numel: elements per shard.
        cache: gets the bytes of each shard, for a reader in this process.
        background: runs several shards at once. `vector` is then read by several threads.
        fine: ranges of elements in the codec for fine parameters, where `codec` has one.
        residual: gets `vector` minus what the payload decodes to; of the same length. None: nobody needs it.
        owners: the ranks that hold the vector's shards; each forms and writes its own.
        fragment: index of the fragment that the vector is of, which decides who owns a shard.
    """
    publishing = _Publishing(
        store,
        key_of_shard,
        vector,
        codec,
        shard_numel,
        cache,
        background or NoBackground(),
        fine,
        residual,
        owners,
        fragment,
    )
    formed = merged(owners.each(_Publishing.form, publishing))
    found = [formed[index] for index in sorted(formed)]
    if nonfinite := sum(measure.nonfinite for _, measure in found):
        raise NotFinite(f"this tensor holds {nonfinite} elements that are not finite.")
    norms = tuple(measure.norm for _, measure in found)
    if (norm := math.hypot(*norms)) > most_norm:
        raise NotFinite(f"this tensor has norm {norm:.3g}, above {most_norm:.3g}: sums of such numbers overflow.")
    shards = tuple(shard for shard, _ in found if shard is not None)
    owners.each(_Publishing.write, publishing, shards)
    return Payload(codec=codec, numel=vector.numel, shard_numel=shard_numel, shards=shards, norms=norms)


@dataclass(frozen=True)
class _Publishing:
    """The arguments of `publish`, and its two steps for the shards that this process owns."""

    store: Store
    key_of_shard: Callable[[int], str]
    vector: Vector
    codec: str
    shard_numel: int
    cache: KeepsPayloads
    background: Background
    fine: Ranges
    residual: FlatTensors | None
    owners: Owners
    fragment: int

    @property
    def _own(self) -> list[tuple[int, int, int]]:
        return self.owners.shards(self.fragment, self.vector.numel, self.shard_numel)

    def form(self) -> dict[int, tuple[Shard | None, Measure]]:
        """Encode the shards into the cache. Returns each one's entry in the manifest, None if it is not finite."""
        calls = [partial(self._formed, *each) for each in self._own]
        found = in_parallel(self.background, calls, min(_AT_ONCE, workers()))
        return dict(zip((index for index, _, _ in self._own), found, strict=True))

    def write(self, shards: Sequence[Shard]) -> None:
        """Create the objects of the shards, of which `shards` lists all."""
        calls = [partial(self._written, index, shards[index]) for index, _, _ in self._own]
        in_parallel(self.background, calls, _AT_ONCE)

    def _formed(self, index: int, start: int, stop: int) -> tuple[Shard | None, Measure]:
        with one_torch_thread():
            # What is read, encoded and hashed does not leave a core's cache in between. BytesIO gives its bytes
            # uncopied.
            encoding, whole, hasher, measure = get_codec(self.codec), io.BytesIO(), BulkHasher(), Measure()
            finer = within(self.fine, start, stop)
            whole.write(header := encoding.header(stop - start, finer))
            hasher.update(header)
            for span in encoding.spans(stop - start, finer):
                for first in range(start + span.start, start + span.stop, BLOCK):
                    values = self.vector.read(first, min(first + BLOCK, start + span.stop))
                    block = span.codec.encode_block(values)
                    measure += block.measure
                    hasher.update(block.data)
                    whole.write(block.data)
                    if self.residual is not None:
                        self.residual.write(first, values - block.values)
            if measure.nonfinite:
                return None, measure
            shard = Shard(digest=hasher.digest(), size=whole.tell())
            self.cache.put((self.key_of_shard(index), shard.digest), whole.getvalue())
            return shard, measure

    def _written(self, index: int, shard: Shard) -> None:
        key = self.key_of_shard(index)
        kept = self.cache.get((key, shard.digest))
        assert kept is not None, "it was put there by `form`"
        data = bytes(kept)  # no copy, unless it is mapped
        del kept  # which ends the mapping
        _create_same(self.store, key, data)


def _create_same(store: Store, key: str, data: bytes) -> None:
    """Create an object, or accept one with equal bytes. Raises `RoundReused` if it exists with other bytes."""
    if not store.create(key, data) and store.get(key, 0, len(data) + 1) != data:
        raise RoundReused(
            f"{key} in {store.url} already holds another payload: this round id was used before with other numbers. "
            "Use a new folder, or the next round id."
        )


def check_shape(payload: Payload, codec: str, numel: int, shard_numel: int) -> None:
    """Raise `PayloadCorrupt` unless the manifest describes a vector of this length, codec and shard size."""
    expected = (codec, numel, shard_numel, len(shard_ranges(numel, shard_numel)))
    found = (payload.codec, payload.numel, payload.shard_numel, len(payload.shards))
    if found != expected:
        raise PayloadCorrupt(
            f"the payload is (codec, elements, elements per shard, shards) = {found}; this round needs {expected}."
        )
