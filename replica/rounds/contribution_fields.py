"""`ContributionFields`: what a contribution says beside its pseudo-gradient; and how much it weighs in the average."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Metric, Origin, Progress, Score


@dataclass(frozen=True)
class ContributionFields:
    """What the training loop knows of its round. `in_loop` and `scores` are as published: higher is better."""

    steps: int = 0  # inner steps that no contribution has named yet
    tokens: int = 0  # of this round
    metric: str = "loss"
    in_loop: Metric | None = None
    scores: tuple[Score, ...] = ()
    heldout_items: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    progress: Progress | None = None
    state: bytes | None = None  # to be saved beside the payload


def weight_of(kind: str, fields: ContributionFields, origins: Sequence[Origin], config: RunConfig) -> float:
    """The weight of a contribution whose payload holds the work of `origins`.

    With `weights="uniform"` 1, less for a partial round by the share of `sync_every` that the payload lacks. With
    `weights="tokens"` the round's tokens, scaled up by the carried steps; raises `ConfigError` if there are none.
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
