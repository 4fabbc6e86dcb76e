"""Reads payload shards and saved states from the store and verifies them.

Kept apart from `allreduce.payload`, because commands that only read records must start without importing torch.
"""

import mmap
import os
from contextlib import ExitStack
from typing import IO

from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt
from diloco_orchestrator.protocol import codecs
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Payload, Shard
from diloco_orchestrator.store.base import Store, open_file

_READS = 2  # a bit flipped in transfer is right in the second read; a bit flipped in the store is wrong in both


class PayloadGone(PayloadCorrupt):
    """The object of a payload shard does not exist any more: it was deleted by retention or by hand."""


class NotFinite(PayloadCorrupt):
    """The vector holds NaN or infinity."""


def shard_ranges(numel: int, shard_numel: int) -> list[tuple[int, int]]:
    """[start, stop) of every shard of a vector; an empty vector has no shards."""
    return [(start, min(start + shard_numel, numel)) for start in range(0, numel, shard_numel)]


def fetch(store: Store, key: str, payload: Payload, index: int) -> bytes:
    """The bytes of shard `index` of a payload, read from `key`: what the manifest names, and finite numbers only.

    Foreign bytes are verified here and nowhere else; the mean decodes them without checking them again. Raises what
    `fetch_shard` and `check_shard` raise.
    """
    data = fetch_shard(store, key, payload.shards[index])
    check_shard(data, payload, index, f"{key} in {store.url}")
    return data


def open_verified(store: Store, key: str, payload: Payload, index: int) -> IO[bytes] | None:
    """The file of shard `index` of a payload, verified as `fetch` does; to be mapped, not copied.

    None where the store has no such file, or one with other bytes: `fetch` reads them, or says what is wrong. Raises
    `PayloadGone` if the object does not exist, and what `check_shard` raises.
    """
    try:
        file = open_file(store, key)
    except ObjectMissing:
        raise PayloadGone(f"{key} in {store.url} is gone although a manifest names it.", key) from None
    if file is None:
        return None
    shard = payload.shards[index]
    with ExitStack() as unless_verified:
        unless_verified.enter_context(file)
        if os.fstat(file.fileno()).st_size != shard.size:
            return None
        data = mapped(file, shard.size)
        if bulk_digest(data) != shard.digest:
            return None
        check_shard(data, payload, index, f"the file {key} in {store.url}")
        unless_verified.pop_all()
    return file


def mapped(file: IO[bytes], size: int, offset: int = 0) -> memoryview:
    """Bytes [offset, offset + size) of a file, mapped into memory, read-only. Lasts without the file being open."""
    return memoryview(mmap.mmap(file.fileno(), size, offset=offset, access=mmap.ACCESS_READ))


def fetch_shard(store: Store, key: str, shard: Shard) -> bytes:
    """The bytes of an object that a manifest names by digest and size.

    Other bytes are read once more, then `PayloadCorrupt` is raised. Raises `PayloadGone` if the object does not exist.
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


def check_shard(data: bytes | memoryview, payload: Payload, index: int, whose: str) -> None:
    """Raise unless the bytes, whose digest was checked, are finite numbers as the payload says. Decodes no copy.

    Raises `PayloadCorrupt` for another codec or length, `NotFinite` for NaN or infinity. `whose`: opens its message.
    """
    start, stop = shard_ranges(payload.numel, payload.shard_numel)[index]
    if count := codecs.count_nonfinite(data, payload.codec, stop - start):
        raise NotFinite(f"{whose} holds {count} elements that are not finite.")
