"""The other thing that a round reduces: the scores in its manifests, folded into one state of the guard.

Pure: the same manifests give the same verdict everywhere.
"""

from collections.abc import Sequence

from pydantic import JsonValue

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.fold import FoldResult, GuardSettings, InLoop, ShareScore, fold
from diloco_orchestrator.protocol.records import Contribution, Metric

_DEFAULT_GAP = {"loss": 0.5, "reward": 0.10}  # nats per token; of a reward in [0, 1]


def fold_round(
    state: dict[str, JsonValue] | None,
    config: GuardConfig,
    round_: int,
    valid: Sequence[Contribution],
    named: Sequence[Contribution],
) -> FoldResult | None:
    """The guard after a round; None while nobody ever scored.

    `valid`: manifests that start from the round's base, whose scores of that base count. `named`: those averaged,
    whose in-loop metric counts.
    """
    # A share that was dealt anew may come twice; the first in replica order counts, wherever it is folded.
    firsts = {s.share: s for manifest in reversed(valid) for s in manifest.scores}
    scores = [ShareScore(s.share, s.sum, s.count) for s in firsts.values()]
    if not scores and state is None:
        return None
    in_loop = merge([manifest.in_loop for manifest in named])
    return fold(
        state,
        settings(config, valid[0].metric if valid else "loss"),
        round_=round_,
        shares=sorted(scores, key=lambda score: score.share),
        in_loop=InLoop(in_loop.sum, in_loop.count) if in_loop else None,
        total_items=max((manifest.heldout_items for manifest in valid), default=0),
        kl_to_init=_mean([manifest.metrics.get("kl_to_init") for manifest in named]),
        entropy=_mean([manifest.metrics.get("entropy") for manifest in named]),
        reward_std=_mean([manifest.metrics.get("reward_std") for manifest in named]),
    )


def settings(config: GuardConfig, metric: str) -> GuardSettings:
    """The guard's numbers for a metric ("loss" or "reward")."""
    gap = _DEFAULT_GAP[metric] if config.max_proxy_real_gap is None else config.max_proxy_real_gap
    return GuardSettings(
        kl_hard_stop=config.kl_hard_stop,
        max_proxy_real_gap=gap,
        min_steps=config.min_steps,
        decline_patience=config.decline_patience,
        ema_alpha=config.ema_alpha,
        rise_eps=config.rise_eps,
    )


def merge(metrics: Sequence[Metric | None]) -> Metric | None:
    """Sums and counts added up; not finite if one is; None if there is none."""
    present = [metric for metric in metrics if metric is not None and metric.count]
    if not present:
        return None
    count = sum(metric.count for metric in present)
    if any(metric.sum is None for metric in present):
        return Metric(sum=None, count=count)
    return Metric(sum=sum(metric.sum or 0.0 for metric in present), count=count)


def _mean(metrics: Sequence[Metric | None]) -> float | None:
    merged = merge(metrics)
    if merged is None:
        return None
    return float("nan") if merged.sum is None else merged.sum / merged.count
