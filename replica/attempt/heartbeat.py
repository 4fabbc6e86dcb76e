"""The heartbeat of one attempt: its content (`Pulse`), and its writer, which is called at intervals."""

import logging
import math
from dataclasses import dataclass

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import StoreError
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.pace import apart_s, heartbeat_s
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)


@dataclass
class Pulse:
    """The content of the next heartbeat, which the training thread writes and the heartbeat's thread reads."""

    phase: str = "starting"  # starting, scoring, training, publishing, waiting or snapshot
    round: int = 0
    inner_step: int = 0  # of the open round
    loss: float | None = None
    round_s: float = 0.0  # seconds of a usual round; 0 while that is not known
    vacated: bool = False  # whether the run was scaled down and this attempt leaves; set by the heartbeat's thread


class HeartbeatWriter:
    """Overwrites the heartbeat record of one attempt with a higher counter, at the first `beat` and whenever one is
    due.

    In a run that can be scaled, it also checks after each heartbeat whether this attempt's replica id was vacated: a
    provider may end a process that it cancels at once, and what the process has trained would be lost.

    The writer runs in a thread of its own: `stamp` must not be the training thread's.
    """

    def __init__(
        self, store: Store, replica_id: int, attempt: int, pulse: Pulse, stamp: Stamp, config: RunConfig
    ) -> None:
        self._writer = Writer.of_attempt(store, replica_id, attempt)
        self._records = AttemptRecords(store)
        self._replica_id = replica_id
        self._attempt = attempt
        self._pulse = pulse
        self._stamp = stamp
        self._config = config
        self._apart_s = apart_s(config, store.requests_allowed)
        self._counter = 0
        self._calls = 0  # of `beat`
        self._skipped = 0  # calls of `beat` since the last heartbeat

    def beat(self) -> None:
        """Write a heartbeat record if one is due. Call it every `timing.heartbeat_s` seconds.

        While the length of a round is not known, heartbeats are a quarter of the time since the first call apart, so
        that the start and the first steps are seen as they come.
        """
        call_s = self._config.timing.heartbeat_s
        self._calls += 1
        self._skipped += 1
        every_s = heartbeat_s(self._config, self._pulse.round_s or self._calls * call_s / 8, self._apart_s)
        if not self._counter or self._skipped * call_s >= every_s:
            self._skipped = 0
            self.write()

    def write(self) -> None:
        """Write one heartbeat. A failed write is logged and counts as a missed heartbeat."""
        self._counter += 1
        pulse = self._pulse
        loss = pulse.loss  # once: the training thread may write another value, or None, in between
        heartbeat = Heartbeat(
            **self._stamp(),
            replica_id=self._replica_id,
            attempt=self._attempt,
            counter=self._counter,
            phase=pulse.phase,
            round=pulse.round,
            inner_step=pulse.inner_step,
            loss=loss if loss is not None and math.isfinite(loss) else None,
        )
        try:
            self._writer.overwrite(heartbeat)
            if self._config.max_replicas is not None and not pulse.vacated:
                cancel = self._records.cancel(self._replica_id, self._attempt)
                pulse.vacated = cancel is not None and cancel.vacates
        except StoreError as error:
            log.warning("a heartbeat was not written: %s", error)
