"""Selects which scores and training metrics of a round's manifests the guard folds.

Pure: equal manifests give equal verdicts on every replica. The fold itself is in `guard.fold`.
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
    """The guard's new state and verdict after round `round_`; None while no replica has ever sent a score.

    Args:
        state: the guard's state in the commit before or at the start of the leg; None if neither has one.
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
