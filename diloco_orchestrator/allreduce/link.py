"""`agreed_link`: how fast a fleet's store is, measured by one of its ranks and the same for all of them.

`path="auto"` chooses by it how all ranks average. So the record counts that was created first, whoever measured.
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise

from diloco_orchestrator.allreduce.dealing import ASSUMED, Link
from diloco_orchestrator.clock import Background, Clock, in_parallel
from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, StoreDenied
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import MeasuredLink
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

# As payloads are written and read in a round: some objects at the same time. All ranks that begin together measure
# together, so that what they share is shared in the measurement.
_WRITTEN, _READ, _SIZE = 4, 16, 2 * 2**20
_LEAST_S = 1e-4  # of a request, and of a byte's part in a transfer: a folder, or a clock that stands still


def agreed_link(
    store: Store, clock: Clock, background: Background, stamp: Stamp, rank: int, write: Callable[[MeasuredLink], object]
) -> Link:
    """The link by which all ranks choose: the recorded one; where none is, this rank measures its own and records it.

    8 MiB up and 16 MiB down are measured, over objects that are deleted again. A record that cannot be read counts, for
    all ranks alike, as the link that is assumed without one. `write`: creates the record.
    """
    began = clock.now()
    if (known := recorded_link(store)) is not None:
        return known
    latency_s = max(clock.now() - began, _LEAST_S)
    link = _measured(store, clock, background, stamp.unforeseen(), latency_s)
    write(MeasuredLink(**stamp(), rank=rank, latency_s=link.latency_s, up=link.up, down=link.down))
    return recorded_link(store) or link


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


def _measured(store: Store, clock: Clock, background: Background, token: str, latency_s: float) -> Link:
    """This rank's own link. Its objects cannot be compressed."""
    names = [f"{keys.PROBE}{token}-{index}" for index in range(_WRITTEN)]
    data = [hashlib.shake_128(name.encode()).digest(_SIZE) for name in names]
    reads = [partial(store.get, name, start, start + _SIZE // 2) for name in names for start in (0, _SIZE // 2)]
    times = [clock.now()]
    try:
        in_parallel(background, [partial(store.put, *each) for each in zip(names, data, strict=True)])
        times.append(clock.now())
        in_parallel(background, reads * (_READ // len(reads)))
        times.append(clock.now())
    except StoreDenied as error:
        log.warning("the link to the store is not measured, but taken for that of 50 ms and 500 Mb/s: %s", error)
        return ASSUMED
    finally:
        with suppress(StoreDenied):
            in_parallel(background, [partial(store.delete, name) for name in names])
    wrote_s, read_s = (max(b - a - latency_s, (b - a) / 2, _LEAST_S) for a, b in pairwise(times))
    return Link(latency_s, _WRITTEN * _SIZE / wrote_s, _READ * _SIZE / 2 / read_s)
