"""Collects what a round's manifests hold for the guard: which scores and training metrics count.

Pure: equal manifests give equal verdicts everywhere. The fold itself is `guard.fold`'s.
"""

from collections.abc import Sequence

from pydantic import JsonValue

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.fold import FoldResult, fold
from diloco_orchestrator.protocol.records import Contribution, Metric


def fold_round(
    state: dict[str, JsonValue] | None,
    config: GuardConfig,
    round_: int,
    valid: Sequence[Contribution],
    named: Sequence[Contribution],
) -> FoldResult | None:
    """The guard after round `round_`; None while nobody ever scored.

    Args:
        state: of the commit before, or that the leg began with; None if neither has one.
        valid: manifests that start from the round's base, whose scores of that base count; in replica order.
        named: manifests that are averaged, whose training metrics count.
    """
    # Two manifests hold the same share if their authors dealt it by different rosters: the lower replica id counts.
    firsts = {score.share: score for manifest in reversed(valid) for score in manifest.scores}
    if not firsts and state is None:
        return None
    return fold(
        state,
        config,
        metric=valid[0].metric if valid else "loss",
        round_=round_,
        scores=[firsts[share] for share in sorted(firsts)],
        in_loop=Metric.merged(manifest.in_loop for manifest in named),
        total_items=max((manifest.heldout_items for manifest in valid), default=0),
        kl_to_init=_mean("kl_to_init", named),
        entropy=_mean("entropy", named),
        reward_std=_mean("reward_std", named),
    )


def _mean(name: str, named: Sequence[Contribution]) -> float | None:
    """The mean of an observed metric over all contributions; None if nobody observed it, NaN if it is not finite."""
    merged = Metric.merged(manifest.metrics.get(name) for manifest in named)
    return merged.mean if merged else None
