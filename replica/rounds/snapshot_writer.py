"""`SnapshotWriter`: writes snapshots of the global model when it is this replica's turn. The first complete one wins.

What a snapshot holds is in `snapshots.layout`; which snapshots are deleted is decided by retention.
"""

import logging

from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.replica.rounds.global_model import GlobalModel
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.rebuild import Tip

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_PATIENCE_S = 30.0  # waiting time for each replica with a lower id, which may be writing the last snapshot


class SnapshotWriter:
    """Writes snapshots for one replica. `files`: what a snapshot holds beside the model's tensors."""

    def __init__(self, model: GlobalModel, files: ModelFiles) -> None:
        self._model = model
        self._files = files

    def write_if_due(self) -> None:
        """Write the last round's snapshot if one is due and this replica has the lowest id of those averaged."""
        commit = self._model.last.commit if self._model.last else None
        if commit is None or not commit.applied or commit.outer_step % self._attempt.config.snapshot_every:
            return
        if min(a.replica_id for a in commit.answers if a.averaged) == self._attempt.replica_id:
            self._write(self._model.tip)

    def write_last(self) -> None:
        """After the stop: write the last base's snapshot unless it appears within 30 s per replica with a lower id."""
        assert self._model.last is not None
        tip = self._model.tip
        self._attempt.pulse.phase = "snapshot"
        before_us = sum(a.replica_id < self._attempt.replica_id for a in self._model.last.commit.answers)
        self._wait(tip, _PATIENCE_S * before_us)
        self._write(tip)

    @property
    def _attempt(self) -> Attempt:
        return self._model.attempt

    def _wait(self, tip: Tip, patience_s: float) -> None:
        clock = self._attempt.clock
        until, pause = clock.now() + patience_s, _FIRST_PAUSE_S
        while clock.now() < until and not self._attempt.should_leave() and not self._exists(tip):
            clock.sleep(pause)
            pause = min(1.5 * pause, self._attempt.config.timing.poll_s)

    def _exists(self, tip: Tip) -> bool:
        return tip.base_round in self._attempt.log.snapshots()

    def _write(self, tip: Tip) -> None:
        if not self._exists(tip):
            attempt = self._attempt
            write_snapshot(
                attempt.store, tip.base_round, tip.base, tip.digest, self._files, attempt.stamp, attempt.object_limit
            )
            log.info("snapshot %d: base %s", tip.base_round, tip.digest[:12])
