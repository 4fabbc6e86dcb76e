"""Reads records from the store, each up to the most bytes that a record with its key may have.

Whoever may write to the bucket may put gigabytes there under any key; a reader must not hold them.
"""

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.protocol import limits
from diloco_orchestrator.store.base import Store


def read_record(store: Store, key: str) -> bytes:
    """The bytes of a record; the first of them, which are no JSON object, if there are more than a record may have.

    Raises the store's errors.
    """
    return store.get(key, 0, limits.most_bytes(key) + 1)


def read_optional(store: Store, key: str) -> bytes | None:
    """The result of `read_record`, or None if the object does not exist. Raises the store's other errors."""
    try:
        return read_record(store, key)
    except ObjectMissing:
        return None
