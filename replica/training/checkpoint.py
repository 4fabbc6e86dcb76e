"""Saves a replica's own state with its contributions and brings it back: optimizer, schedule, local parameters."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.outer_loop import OuterLoop
from diloco_orchestrator.replica.training.tensor_tree import pack, unpack

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A state that was loaded, and the contribution that it came with."""

    manifest: Contribution
    local: Mapping[str, torch.Tensor]  # the model as training left it; empty where the base is all there is to it


class OwnState:
    """What a restarted attempt needs beside the base, the data cursor and the random generators."""

    def __init__(
        self,
        participant: Participant,
        loop: OuterLoop,
        optimizer: torch.optim.Optimizer,
        stateful: Mapping[str, Any],
    ) -> None:
        self._participant = participant
        self._loop = loop
        self._optimizer = optimizer
        self._stateful = stateful

    def to_save(self) -> bytes | None:
        """The state as bytes, if the open round's answer is to save one."""
        config, outer_step = self._participant.attempt.config, self._participant.position.outer_step
        beside_snapshot = (outer_step + 1) % config.snapshot_every == 0
        due = config.saves_state == "round" or (config.saves_state == "snapshot" and beside_snapshot)
        if self._participant.closing or not due:
            return None
        return pack(
            {
                "optimizer": self._optimizer.state_dict(),
                "stateful": {name: each.state_dict() for name, each in sorted(self._stateful.items())},
                "local": self._loop.local_values() if self._loop.keeps_local_values else {},
            }
        )

    def load(self) -> Saved | None:
        """Load optimizer and schedule as they were at this replica's newest contribution, if it saved them."""
        own = self._participant.contributor.history
        manifest = own.newest_delta(self._participant.round)
        if manifest is None or manifest.state is None:
            return None
        try:
            tree = unpack(own.read_state(manifest), f"the state of round {manifest.round}")
        except (PayloadCorrupt, RecordInvalid) as error:
            log.error("the inner optimizer begins anew: %s", error)
            return None
        self._optimizer.load_state_dict(tree["optimizer"])
        for name, each in self._stateful.items():
            each.load_state_dict(tree["stateful"][name])
        log.info("the state that attempt %d saved in round %d is loaded", manifest.attempt, manifest.round)
        return Saved(manifest, tree["local"])

    def drop_poisoned(self) -> None:
        """Let what is not finite in the inner optimizer start anew."""
        state = self._optimizer.state
        poisoned = [parameter for parameter in state if not _all_finite(state[parameter])]
        for parameter in poisoned:
            del state[parameter]
        log.warning("the inner optimizer's state of %d parameters was not finite and starts anew", len(poisoned))


def _all_finite(state: Mapping[str, Any]) -> bool:
    floats = (v for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
    return all(bool(torch.isfinite(value).all()) for value in floats)
