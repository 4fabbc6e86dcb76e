"""The heartbeat of one attempt: its content (`Pulse`) and its writer.

The caller sets the interval; the coordinator decides when an attempt counts as hung.
"""

import logging
import math
from dataclasses import dataclass

from diloco_orchestrator.errors import StoreError
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)


@dataclass
class Pulse:
    """The content of the next heartbeat. Written by the training thread, read by the heartbeat's thread."""

    phase: str = "starting"  # starting, scoring, training, waiting or snapshot
    round: int = 0
    inner_step: int = 0  # of the open round
    loss: float | None = None


class HeartbeatWriter:
    """Overwrites the heartbeat of one attempt with a higher counter at every call of `write`.

    The writer runs in a thread of its own: `stamp` must not be the training thread's.
    """

    def __init__(self, store: Store, replica_id: int, attempt: int, pulse: Pulse, stamp: Stamp) -> None:
        self._writer = Writer.of_attempt(store, replica_id, attempt)
        self._replica_id = replica_id
        self._attempt = attempt
        self._pulse = pulse
        self._stamp = stamp
        self._counter = 0

    def write(self) -> None:
        """Write one heartbeat. A failed write is logged and counts as a missed heartbeat."""
        self._counter += 1
        pulse = self._pulse
        heartbeat = Heartbeat(
            **self._stamp(),
            replica_id=self._replica_id,
            attempt=self._attempt,
            counter=self._counter,
            phase=pulse.phase,
            round=pulse.round,
            inner_step=pulse.inner_step,
            loss=pulse.loss if pulse.loss is not None and math.isfinite(pulse.loss) else None,
        )
        try:
            self._writer.overwrite(heartbeat)
        except StoreError as error:
            log.warning("a heartbeat was not written: %s", error)
