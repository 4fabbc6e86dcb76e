"""`ReplicaBuffers`: the persistent buffers of one replica's model, such as BatchNorm's running statistics.

A replica trains with its own, published with each contribution; bases are scored with theirs. Which buffers a base has
is said in `snapshots.buffers`.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.replica.rounds.contribution_history import ContributionHistory
from diloco_orchestrator.replica.rounds.global_model import GlobalModel
from diloco_orchestrator.snapshots.buffers import buffers_of_base, read_buffers
from diloco_orchestrator.snapshots.layout import ModelFiles

log = logging.getLogger(__name__)

_UNREADABLE = (PayloadCorrupt, RecordInvalid, ObjectMissing)


class ReplicaBuffers:
    """Publishes, restores and shows buffers. Costs nothing, and no request, for a model without persistent ones."""

    def __init__(self, history: ContributionHistory, model: GlobalModel, files: ModelFiles) -> None:
        assert files.untrained is not None, "a replica has the live model"
        self._live = files.untrained.buffers
        self._history = history
        self._model = model

    def changed(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that differ from the run's first ones."""
        return self._live.changed()

    def resume(self) -> None:
        """Set the model's buffers to those of this replica's newest contribution; without one, to the base's."""
        if not self._live.first:
            return
        newest = self._history.newest_delta(self._model.round, self._model.is_right)
        if newest is not None:
            try:
                self._live.load(read_buffers(self._model.attempt.store, newest))
                return
            except _UNREADABLE as error:
                log.warning(
                    "this replica's buffers of round %d are gone, those of the base are taken: %s", newest.round, error
                )
        self._live.load(self._of_base() or {})

    @contextmanager
    def showing_base(self) -> Iterator[None]:
        """Context in which the model has the base's buffers; afterwards it has its own again."""
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
        """None if they cannot be read."""
        try:
            return buffers_of_base(self._model.attempt.log, self._model.tip.base_round)
        except _UNREADABLE as error:
            log.error("the buffers of the base after round %d: %s", self._model.tip.base_round, error)
            return None
