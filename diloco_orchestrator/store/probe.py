"""Checks before a run that a store keeps the promises that the protocol relies on. Deletes its test objects."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from diloco_orchestrator.clock import Background, ThreadBackground, in_parallel, random_token
from diloco_orchestrator.errors import ObjectMissing, StoreDenied, StoreError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

_RACERS = 8


def probe(store: Store, background: Background | None = None) -> None:
    """Raise `StoreError` unless the store can be written, listed and read, and creates exclusively, also in a race.

    Some S3-compatible servers accept the header of a conditional write and ignore it; some clients check first and
    write then. Takes four round trips. `background`: runs the writers of the race; by default threads.
    """
    background, token = background or ThreadBackground(), random_token()
    first, race = f"{keys.PROBE}{token}-first", f"{keys.PROBE}{token}-race"
    try:
        _check(store, background, first, race)
    except StoreError:
        with suppress(StoreError):  # an error of the deletion must not hide the first
            _clean(store, background, first, race)
        raise
    try:
        _clean(store, background, first, race)
    except StoreDenied as error:  # a run deletes nothing unless its retention says so
        log.warning("%s and %s stay in %s, whose credentials may not delete: %s", first, race, store.url, error)


def _check(store: Store, background: Background, first: str, race: str) -> None:
    racing = store.without_read_back()  # a loser's bytes are never its own
    racers = [partial(racing.create, race, str(number).encode()) for number in range(_RACERS)]
    # Without the right to list, S3 answers 403 for what is missing, which replicas ask for all the time.
    looks = partial(_look_for, store, f"{keys.PROBE}{random_token()}-missing")
    made, *won, _ = in_parallel(background, [partial(store.create, first, b"1"), *racers, looks])
    calls: Sequence[Callable[[], Any]] = (
        partial(racing.create, first, b"2"),
        partial(store.get, race),
        partial(_listed, store, (first, race)),
    )
    again, kept, listed = in_parallel(background, calls)
    if not made or again or store.get(first) != b"1":
        raise StoreError(f"{store.url} ignores create-only writes: a second create of {first} won. {_REMEDY}")
    # Nobody won if the winner's reply was lost: its repetition found the object there.
    if won.count(True) > 1 or (any(won) and kept != str(won.index(True)).encode()):
        raise StoreError(f"{won.count(True)} of {_RACERS} writers at once created {race} in {store.url}. {_REMEDY}")
    if listed != [first, race]:
        raise StoreError(
            f"{store.url} lists {listed} right after {first} and {race} were written: rounds could not be seen. "
            "Switch listing caches off, or use another store."
        )


def _look_for(store: Store, key: str) -> bool:
    with suppress(ObjectMissing):
        store.get(key)
    return False


def _listed(store: Store, wanted: Sequence[str]) -> list[str]:
    return [info.key for info in store.list(keys.PROBE) if info.key in wanted]


def _clean(store: Store, background: Background, *keys: str) -> None:
    in_parallel(background, [partial(store.delete, key) for key in keys])


_REMEDY = (
    "Two replicas could both end a round. Use a store that honours If-None-Match, such as S3, GCS, R2 or MinIO, "
    "or a local folder."
)
