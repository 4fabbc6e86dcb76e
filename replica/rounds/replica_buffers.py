"""`ReplicaBuffers`: the persistent buffers of one replica's model, such as BatchNorm's running statistics.

A replica trains with its own buffers and publishes them with each contribution; a base is scored with the buffers that
`snapshots.buffers` assigns to it.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.contribution_history import ContributionHistory
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.snapshots.buffers import buffers_of_base, read_buffers
from diloco_orchestrator.snapshots.layout import ModelFiles

log = logging.getLogger(__name__)

_UNREADABLE = (PayloadCorrupt, RecordInvalid, ObjectMissing)


class ReplicaBuffers:
    """Publishes, restores and swaps the persistent buffers of one replica's model.

    A model without persistent buffers costs no request.
    """

    def __init__(self, attempt: Attempt, tip: HeldTip, history: ContributionHistory, files: ModelFiles) -> None:
        assert files.untrained is not None, "a replica has the live model"
        self._live = files.untrained.buffers
        self._attempt = attempt
        self._tip = tip
        self._history = history

    def changed(self) -> dict[str, torch.Tensor]:
        """Copies of the model's buffers that differ from those at the run's start."""
        return self._live.changed()

    def resume(self) -> None:
        """Set the model's buffers to those of this replica's newest contribution, or without one to the base's."""
        if not self._live.first:
            return
        newest = self._history.newest_delta()
        if newest is not None:
            try:
                self._live.load(read_buffers(self._attempt.store, newest))
                return
            except _UNREADABLE as error:
                log.warning(
                    "this replica's buffers of round %d are gone, those of the base are taken: %s", newest.round, error
                )
        self._live.load(self._of_base() or {})

    @contextmanager
    def showing_base(self) -> Iterator[None]:
        """Context in which the model has the base's buffers (its own if those are unreadable), then its own again."""
        of_base = self._of_base() if self._live.first else None
        if of_base is None:
            yield
            return
        own = self._live.changed()
        self._live.load(of_base)
        try:
            yield
        finally:
            self._live.load(own)

    def _of_base(self) -> Mapping[str, torch.Tensor] | None:
        """The buffers of the base that the open round starts from; None if they cannot be read."""
        try:
            return buffers_of_base(self._attempt.log, self._tip.value.base_round)
        except _UNREADABLE as error:
            log.error("the buffers of the base after round %d: %s", self._tip.value.base_round, error)
            return None
