"""Checks before a run that a store keeps the promises that the protocol relies on. Deletes its test objects."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from diloco_orchestrator.clock import random_token
from diloco_orchestrator.errors import StoreError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.base import Store

_RACERS = 8


def probe(store: Store) -> None:
    """Raise `StoreError` unless the store can be written, listed and read, and creates exclusively, also in a race.

    Some S3-compatible servers accept the header of a conditional write and ignore it; some clients check first and
    write then.
    """
    token = random_token()
    first, race = f"{keys.PROBE}{token}-first", f"{keys.PROBE}{token}-race"
    made = store.create(first, b"1")
    try:
        if not made or store.create(first, b"2") or store.get(first) != b"1":
            raise StoreError(f"{store.url} ignores create-only writes: a second create of {first} won. {_REMEDY}")
        with ThreadPoolExecutor(_RACERS) as pool:
            won = list(pool.map(lambda i: store.create(race, str(i).encode()), range(_RACERS)))
        if won.count(True) != 1 or store.get(race) != str(won.index(True)).encode():
            raise StoreError(f"{won.count(True)} of {_RACERS} writers at once created {race} in {store.url}. {_REMEDY}")
        listed = [info.key for info in store.list(keys.PROBE) if token in info.key]
        if listed != [first, race]:
            raise StoreError(
                f"{store.url} lists {listed} right after {first} and {race} were written: rounds could not be seen. "
                "Switch listing caches off, or use another store."
            )
    except StoreError:
        with suppress(StoreError):  # an error of the deletion must not hide the first
            _clean(store, first, race)
        raise
    _clean(store, first, race)


def _clean(store: Store, *keys: str) -> None:
    for key in keys:
        store.delete(key)


_REMEDY = (
    "Two replicas could both end a round. Use a store that honours If-None-Match, such as S3, GCS, R2 or MinIO, "
    "or a local folder."
)
