"""Snapshots of the global model, written by whichever replica's turn it is; any other may take its place.

The first complete one wins. Knows nothing of rounds but the commit that made the base.
"""

import logging

from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.rebuild import Tip

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_PATIENCE_S = 30.0  # per replica before us that may be writing the last snapshot


class SnapshotWriter:
    """The part of one replica. `files`: what lies beside the model's tensors."""

    def __init__(self, attempt: Attempt, files: ModelFiles) -> None:
        self._attempt = attempt
        self._files = files

    def write_if_due(self, commit: Commit, tip: Tip) -> None:
        """After an applied round, if it is due and ours to write: the lowest replica named in the commit."""
        if not commit.applied or commit.outer_step % self._attempt.config.snapshot_every:
            return
        if min(a.replica_id for a in commit.answers if a.averaged) == self._attempt.replica_id:
            self._write(tip)

    def write_last(self, commit: Commit, tip: Tip) -> None:
        """After the stop: leave it to the replicas with lower ids, as long as they may be alive."""
        self._attempt.pulse.phase = "snapshot"
        before_us = sum(a.replica_id < self._attempt.replica_id for a in commit.answers)
        self._wait(tip, _PATIENCE_S * before_us)
        self._write(tip)

    def _wait(self, tip: Tip, patience_s: float) -> None:
        clock = self._attempt.clock
        until, pause = clock.now() + patience_s, _FIRST_PAUSE_S
        while clock.now() < until and not self._attempt.should_leave() and not self._is_there(tip):
            clock.sleep(pause)
            pause = min(1.5 * pause, self._attempt.config.timing.poll_s)

    def _is_there(self, tip: Tip) -> bool:
        return tip.base_round in self._attempt.log.snapshots()

    def _write(self, tip: Tip) -> None:
        if not self._is_there(tip):
            attempt = self._attempt
            write_snapshot(attempt.store, tip.base_round, tip.base, tip.digest, self._files, attempt.stamp)
            log.info("snapshot %d: base %s", tip.base_round, tip.digest[:12])
