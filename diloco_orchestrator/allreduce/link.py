"""`agreed_link`: how fast a fleet's store is, measured by one of its ranks and the same for all of them.

`path="auto"` chooses by it how all ranks average. So the record counts that was created first, whoever measured.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median

from diloco_orchestrator.allreduce.dealing import ASSUMED, SLOWEST, Link, batches
from diloco_orchestrator.clock import Background, Clock, in_parallel
from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, StoreDenied
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import MeasuredLink
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

# Some objects at the same time, like payloads in a round. All ranks that begin together measure together, so that what
# they share is shared in the measurement.
_SIZE, _WRITTEN, _LOOKS = 2 * 2**20, 4, 16  # bytes of an object; objects; small requests
# What took fewer latencies is moved again, 128 MiB then: it says little about a wide and far link.
_FEW_LATENCIES, _AGAIN = 6.0, 16
_MOST_WAITED = 0.75  # of a transfer's time is latency
_LEAST_S = 1e-4  # of a request, or a transfer, in a folder or by a clock that does not move


def agreed_link(
    store: Store, clock: Clock, background: Background, stamp: Stamp, rank: int, write: Callable[[MeasuredLink], object]
) -> Link:
    """The link by which all ranks choose: the recorded one; where none is, this rank measures its own and records it.

    Measured are small requests, 8 or 136 MiB up and as much down, over objects that are deleted again. A record that
    cannot be read counts, for all ranks alike, as the link that is assumed without one. `write`: creates the record.
    """
    if (known := recorded_link(store)) is not None:
        return known
    try:
        link = _measured(store, clock, background, stamp.unforeseen())
    except StoreDenied as error:
        log.warning("the link to the store is not measured, but taken for that of 50 ms and 500 Mb/s: %s", error)
        link = ASSUMED
    with suppress(StoreDenied):
        write(MeasuredLink(**stamp(), rank=rank, latency_s=link.latency_s, up=link.up, down=link.down))
    return recorded_link(store) or ASSUMED


def recorded_link(store: Store) -> Link | None:
    """The link in the bucket's record; None if there is no record."""
    try:
        found = MeasuredLink.from_bytes(store.get(keys.LINK, 0, most_bytes(keys.LINK) + 1), keys.LINK)
    except ObjectMissing:
        return None
    except RecordInvalid as error:
        log.warning("the link is taken for that of 50 ms and 500 Mb/s: %s", error)
        return ASSUMED
    return Link(found.latency_s, found.up, found.down)


def _measured(store: Store, clock: Clock, background: Background, token: str) -> Link:
    """This rank's own link. Its objects cannot be compressed."""
    names = [f"{keys.PROBE}{token}-{index}" for index in range(_WRITTEN)]
    data = [hashlib.shake_128(name.encode()).digest(_SIZE) for name in names]

    def took_s(call: Callable[[], object]) -> float:
        began = clock.now()
        call()
        return clock.now() - began

    def look() -> None:
        with suppress(ObjectMissing):
            store.get(names[0])

    def read(name: str) -> int:
        return len(store.get(name))  # nothing is kept

    def together_s(calls: Sequence[Callable[[], object]]) -> float:
        return took_s(partial(in_parallel, background, calls))

    looks = [partial(took_s, look)] * _LOOKS
    in_parallel(background, looks)  # which open the connections
    latency_s = max(median(in_parallel(background, looks)), _LEAST_S)

    def moved(calls: Sequence[Callable[[], object]]) -> float:
        """Bytes a second of requests that move an object each; what they wait for beside is as `predicted_s` has it."""
        again = False
        while (took := together_s(calls)) < _FEW_LATENCIES * latency_s and not again:
            calls, again = [*calls] * _AGAIN, True
        waited_s = SLOWEST * batches(len(calls)) * latency_s
        return len(calls) * _SIZE / max(took - waited_s, (1 - _MOST_WAITED) * took, _LEAST_S)

    try:
        up = moved([partial(store.put, *each) for each in zip(names, data, strict=True)])
        down = moved([partial(read, name) for name in names])
    finally:
        in_parallel(background, [partial(_drop, store, name) for name in names])
    return Link(latency_s, up, down)


def _drop(store: Store, name: str) -> None:
    """Delete a test object, or empty it where replicas may not delete."""
    try:
        store.delete(name)
    except StoreDenied:
        with suppress(StoreDenied):
            store.put(name, b"")
