"""Snapshots of the global model, written by whichever replica's turn it is; any other may take its place.

The first complete one wins. Knows nothing of rounds but the commit that made the base.
"""

import logging

from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.replica.process.attempt import Seat
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.rebuild import Tip

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_PATIENCE_S = 30.0  # per replica before us that may be writing the last snapshot


class OwnSnapshots:
    """The part of one replica. `files`: what lies beside the model's tensors."""

    def __init__(self, seat: Seat, files: ModelFiles) -> None:
        self._seat = seat
        self._files = files

    def write_if_due(self, commit: Commit, tip: Tip) -> None:
        """After an applied round, if it is due and ours to write: the lowest replica named in the commit."""
        if not commit.applied or commit.outer_step % self._seat.config.snapshot_every:
            return
        if min(a.replica_id for a in commit.answers if a.averaged) == self._seat.replica_id:
            self._write(tip)

    def write_last(self, commit: Commit, tip: Tip) -> None:
        """After the stop: leave it to the replicas with lower ids, as long as they may be alive."""
        self._seat.pulse.phase = "snapshot"
        before_us = sum(a.replica_id < self._seat.replica_id for a in commit.answers)
        self._wait(tip, _PATIENCE_S * before_us)
        self._write(tip)

    def _wait(self, tip: Tip, patience_s: float) -> None:
        clock = self._seat.clock
        until, pause = clock.now() + patience_s, _FIRST_PAUSE_S
        while clock.now() < until and not self._seat.should_leave() and not self._is_there(tip):
            clock.sleep(pause)
            pause = min(1.5 * pause, self._seat.config.timing.poll_s)

    def _is_there(self, tip: Tip) -> bool:
        return tip.base_round in self._seat.log.snapshots()

    def _write(self, tip: Tip) -> None:
        if not self._is_there(tip):
            seat = self._seat
            write_snapshot(seat.store, tip.base_round, tip.base, tip.digest, self._files, seat.stamp)
            log.info("snapshot %d: base %s", tip.base_round, tip.digest[:12])
