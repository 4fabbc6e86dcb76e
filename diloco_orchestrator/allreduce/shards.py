"""Fetches payload shards from the store, and verifies their digest, length, codec, finiteness and norm.

Replicas' saved training states are fetched here too, by digest and length. A failed check raises `PayloadCorrupt`, a
missing object `PayloadGone`. `allreduce.payload` imports torch, this file does not: commands that only read records
start faster without it.
"""

import mmap
import os
from contextlib import ExitStack
from typing import IO

from diloco_orchestrator.codecs.table import Encoded, Measure, get_codec
from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt
from diloco_orchestrator.protocol.digests import BulkHasher, bulk_digest
from diloco_orchestrator.protocol.records import Payload, Shard
from diloco_orchestrator.store.base import Store

_SAME_NORM = 1e-3  # relative difference of two measurements of one norm, at the most: CPUs sum in other orders
_READS = 2  # a bit flipped in transfer is right in the second read; a bit flipped in the store is wrong in both


class PayloadGone(PayloadCorrupt):
    """A payload shard does not exist any more: retention or somebody deleted it."""


class NotFinite(PayloadCorrupt):
    """A vector holds NaN or infinity, or numbers so large that sums of them would be infinite."""


def shard_ranges(numel: int, shard_numel: int) -> list[tuple[int, int]]:
    """[start, stop) of every shard of a vector; an empty vector has no shards."""
    return [(start, min(start + shard_numel, numel)) for start in range(0, numel, shard_numel)]


def fetch(store: Store, key: str, payload: Payload, index: int, *, with_norm: bool = False) -> bytes:
    """The verified bytes of shard `index` of a payload, from `key`: those that the manifest names, all finite.

    Later code decodes them without another check. Raises as `fetch_shard` and `check_shard` do, and with `with_norm` as
    `check_norm` does. A replica checks the norm when it decides on a contribution; for committed ones the check is left
    out, because every replica must average them, whatever norm its CPU computes. A shard whose manifest declares more
    bytes than its elements can have raises `PayloadCorrupt` without a request: the bytes would all be in memory.
    """
    whose = f"{key} in {store.url}"
    _check_size(payload, index, whose)
    data = fetch_shard(store, key, payload.shards[index])
    measure = check_shard(data, payload, index, whose)
    if with_norm:
        check_norm(measure, payload, index, whose)
    return data


def open_verified(store: Store, key: str, payload: Payload, index: int) -> IO[bytes] | None:
    """The store's local file of shard `index`, verified as by `fetch` with its norm, to be mapped instead of copied.

    None if the store has no such file, or one with other bytes, which `fetch` then reads or reports. Raises
    `PayloadGone` if the object does not exist, and as `check_shard` and `check_norm` do.
    """
    try:
        file = store.open_file(key)
    except ObjectMissing:
        raise PayloadGone(f"{key} in {store.url} is gone although a manifest names it.", key) from None
    if file is None:
        return None
    shard = payload.shards[index]
    with ExitStack() as unless_verified:
        unless_verified.enter_context(file)
        if os.fstat(file.fileno()).st_size != shard.size:
            return None
        start, stop = shard_ranges(payload.numel, payload.shard_numel)[index]
        hasher = BulkHasher()
        try:
            measure = Encoded(mapped(file, shard.size), payload.codec, stop - start).measure(hasher.update)
        except PayloadCorrupt:
            return None
        if hasher.digest() != shard.digest:
            return None
        if measure.nonfinite:
            raise NotFinite(f"the file {key} in {store.url} holds {measure.nonfinite} elements that are not finite.")
        check_norm(measure, payload, index, f"the file {key} in {store.url}")
        unless_verified.pop_all()
    return file


def mapped(file: IO[bytes], size: int, offset: int = 0) -> memoryview:
    """Bytes [offset, offset + size) of a file, mapped into memory read-only. Valid after the file is closed."""
    return memoryview(mmap.mmap(file.fileno(), size, offset=offset, access=mmap.ACCESS_READ))


def fetch_shard(store: Store, key: str, shard: Shard) -> bytes:
    """The bytes of an object that a manifest names by digest and size.

    Fetched once more if the digest differs, then raises `PayloadCorrupt`. Raises `PayloadGone` if the object is
    missing.
    """
    for _ in range(_READS):
        try:
            data = store.get(key, 0, shard.size + 1)
        except ObjectMissing:
            raise PayloadGone(f"{key} in {store.url} is gone although a manifest names it.", key) from None
        digest = bulk_digest(data)
        if digest == shard.digest:
            return data
    raise PayloadCorrupt(
        f"{key} in {store.url}: {len(data)} bytes with digest {digest[:12]}, read {_READS} times; the "
        f"manifest names {shard.size} bytes with {shard.digest[:12]}. They are not used.",
        key,
    )


def _check_size(payload: Payload, index: int, whose: str) -> None:
    declared, numel = payload.shards[index].size, min(payload.shard_numel, payload.numel - index * payload.shard_numel)
    if declared > (most := get_codec(payload.codec).most_size(numel)):
        raise PayloadCorrupt(
            f"{whose} has {declared} bytes by its manifest; {numel} elements encoded as {payload.codec} have at most "
            f"{most}. It is not read."
        )


def check_shard(data: bytes | memoryview, payload: Payload, index: int, whose: str) -> Measure:
    """Norm and finiteness of a shard's bytes, which must decode to finite numbers of the declared codec and length.

    No copy is made. Raises `PayloadCorrupt` for another codec or length, `NotFinite` for NaN or infinity. `whose`:
    begins the message.
    """
    start, stop = shard_ranges(payload.numel, payload.shard_numel)[index]
    measure = Encoded(data, payload.codec, stop - start).measure()
    if measure.nonfinite:
        raise NotFinite(f"{whose} holds {measure.nonfinite} elements that are not finite.")
    return measure


def check_norm(measure: Measure, payload: Payload, index: int, whose: str) -> None:
    """Raise `PayloadCorrupt` unless the manifest declares the norm of the shard's elements, to a part in a thousand.

    `measure`: of shard `index`, as read. `whose`: begins the message.
    """
    declared = payload.norms[index] if index < len(payload.norms) else None
    if declared is not None and abs(declared - measure.norm) > _SAME_NORM * max(declared, measure.norm):
        raise PayloadCorrupt(f"{whose} has norm {measure.norm:g}; the manifest declares {declared:g}.")
