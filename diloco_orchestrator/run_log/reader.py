"""Fetches and parses records, each only up to the maximum size of a record with its key.

So gigabytes that somebody puts under a record's key do not fill a reader's memory.
"""

from typing import TypeVar

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.store.base import Store

R = TypeVar("R", bound=Record)


def read_record(store: Store, key: str) -> bytes:
    """The bytes of the record at `key`, cut (no valid JSON then) at the maximum size. Raises the store's errors."""
    return store.get(key, 0, most_bytes(key) + 1)


def read_optional(store: Store, key: str) -> bytes | None:
    """The bytes of the record at `key`, cut at the maximum size; None if it is missing. Raises the store's errors."""
    try:
        return read_record(store, key)
    except ObjectMissing:
        return None


def read(store: Store, kind: type[R], key: str) -> Entry[R] | None:
    """The record at `key` with the digest of its bytes; None if the object does not exist. Nothing is cached.

    Raises `RecordInvalid` for an object that is no such record, `RecordTooNew` and `RecordTooOld` for another schema
    version, and the store's errors.
    """
    data = read_optional(store, key)
    return None if data is None else parsed(kind, key, data)


def parsed(kind: type[R], key: str, data: bytes) -> Entry[R]:
    """The record whose exact bytes are `data`, with their digest. `key`: for errors.

    Raises `RecordInvalid` for what is no such record, `RecordTooNew` and `RecordTooOld` for another schema version.
    """
    return Entry(kind.from_bytes(data, key), sha256_hex(data))
