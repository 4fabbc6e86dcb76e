"""`ContributionFields`: the content of a manifest beside the pseudo-gradient; and the weight in the average."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Metric, Origin, Progress, Score
from diloco_orchestrator.snapshots.saved_state import Buffers


@dataclass(frozen=True)
class ContributionFields:
    """The training loop's part of a manifest. `in_loop` and `scores` are as published: higher is better."""

    steps: int = 0  # inner steps since the replica's last contribution
    tokens: int = 0  # of this round
    metric: str = "loss"
    in_loop: Metric | None = None
    scores: tuple[Score, ...] = ()
    heldout_items: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    progress: Progress | None = None
    state: Buffers | None = None  # bytes to save beside the payload; None: none


def weight_of(kind: str, fields: ContributionFields, origins: Sequence[Origin], config: RunConfig) -> float:
    """The weight of a contribution whose payload holds the work of `origins`.

    With `weights="uniform"`: 1, less for a partial contribution by the share of `sync_every` that the payload lacks.
    With `weights="tokens"`: the round's tokens, scaled up by the carried steps. Raises `ConfigError` if there are no
    tokens.
    """
    if kind != "delta" or not fields.steps:
        return 1.0
    steps = sum(origin.steps for origin in origins)
    if config.weights == "uniform":
        return 1.0 - max(0, config.round_steps - steps) / config.sync_every
    if fields.tokens < 1:
        raise ConfigError(
            'weights="tokens", but observe(tokens=...) reported no token in this round. Report them, or use "uniform".'
        )
    return fields.tokens * steps / fields.steps
