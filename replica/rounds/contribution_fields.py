"""`ContributionFields`: the content of a manifest beside the pseudo-gradient; and the weight in the average."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Consumed, Metric, Progress, Score, VaultScore
from diloco_orchestrator.snapshots.saved_state import Buffers


@dataclass(frozen=True)
class ContributionFields:
    """The training loop's part of a manifest. `in_loop` and `scores` are as published: higher is better."""

    steps: int = 0  # inner steps since the replica's last contribution
    tokens: int = 0  # of this round
    in_loop: Metric | None = None
    scores: tuple[Score, ...] = ()
    local_scores: tuple[Score, ...] = ()  # of the local parameters, on the shares of `scores`
    vault: tuple[VaultScore, ...] = ()  # of the base, if an alarm of the guard waits for them
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    consumed: Consumed | None = None  # items of these steps, compared with the held-out set
    progress: Progress | None = None
    state: Buffers | None = None  # bytes to save beside the payload; None: none
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the model, that differ from the first ones


def check_tokens(kind: str, fields: ContributionFields, config: RunConfig) -> None:
    """Raise `ConfigError` if contributions weigh as much as their tokens, and this one has none."""
    if kind == "delta" and fields.steps and config.weights == "tokens" and fields.tokens < 1:
        raise ConfigError(
            'weights="tokens", but observe(tokens=...) reported no token in this round. Report them, or use "uniform".'
        )
