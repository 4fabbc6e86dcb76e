"""What an answer says beside its pseudo-gradient, and how much it weighs in the average."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Metric, Origin, Progress, Score


@dataclass(frozen=True)
class ContributionFields:
    """What an answer says beside its pseudo-gradient. `in_loop` and `scores` are as published: higher is better."""

    steps: int = 0
    tokens: int = 0  # of this round
    metric: str = "loss"
    in_loop: Metric | None = None
    scores: tuple[Score, ...] = ()
    heldout_items: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    progress: Progress | None = None
    state: bytes | None = None  # to be saved with the answer


def weight_of(kind: str, report: ContributionFields, origins: Sequence[Origin], config: RunConfig) -> float:
    """By tokens, or 1 for a whole round; less for a partial one, by the inner steps that its payload lacks.

    Raises `ConfigError` where tokens decide and none were told.
    """
    if kind != "delta" or not report.steps:
        return 1.0
    steps = sum(origin.steps for origin in origins)
    if config.weights == "uniform":
        return 1.0 - max(0, config.round_steps - steps) / config.sync_every
    if report.tokens < 1:
        raise ConfigError(
            'weights="tokens", but observe(tokens=...) told no token in this round. Tell them, or use "uniform".'
        )
    return report.tokens * steps / report.steps
