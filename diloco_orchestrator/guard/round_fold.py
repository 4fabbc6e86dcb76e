"""Selects which scores and training metrics of a round's manifests the guard folds.

Pure: equal manifests give equal verdicts on every replica. Nothing that a manifest says counts beyond what the run's
start and the roster allow its author. The fold itself is in `guard.fold`.
"""

import math
from collections.abc import Sequence

from pydantic import JsonValue

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.fold import Evidence, FoldResult, fold
from diloco_orchestrator.guard.robust import median
from diloco_orchestrator.guard.shares import deal
from diloco_orchestrator.protocol.extra_metrics import PREFIX
from diloco_orchestrator.protocol.records import Contribution, HeldoutSet, Score


def fold_round(
    state: dict[str, JsonValue] | None,
    config: GuardConfig,
    round_: int,
    heldout: HeldoutSet | None,
    roster: Sequence[int],
    valid: Sequence[Contribution],
    named: Sequence[Contribution],
) -> FoldResult | None:
    """The guard's new state and verdict after round `round_`; None in a run without a held-out set.

    Args:
        state: the guard's state in the commit before or at the start of the leg; None if neither has one.
        heldout: the run's held-out set, as start.json fixes it.
        roster: of the round, over which its shares were dealt.
        valid: manifests that start from the round's base, whose scores of that base count; in replica order.
        named: manifests that are averaged, whose training metrics count.
    """
    if heldout is None:
        return None
    dealt = deal(len(heldout.shares), roster)
    scores = [score for manifest in valid for score in _allowed(manifest, heldout, dealt.get(manifest.replica_id, ()))]
    return fold(
        state,
        config,
        heldout,
        Evidence(
            round=round_,
            scores=sorted(scores, key=lambda score: score.share),
            in_loop=[manifest.in_loop for manifest in named if manifest.in_loop and manifest.in_loop.count],
            closing=bool(valid) and all(manifest.kind == "scores" for manifest in valid),
            kl_to_init=_median("kl_to_init", named),
            entropy=_median("entropy", named),
            reward_std=_median("reward_std", named),
            extra={name: _median(PREFIX + name, named) for name in sorted(config.max_extra)},
        ),
    )


def _allowed(manifest: Contribution, heldout: HeldoutSet, dealt: Sequence[int]) -> list[Score]:
    """The scores of shares that were dealt to a manifest's author, each once and over all items of its share."""
    first = {score.share: score for score in reversed(manifest.scores)}
    return [first[share] for share in dealt if share in first and first[share].count == heldout.shares[share]]


def _median(name: str, named: Sequence[Contribution]) -> float | None:
    """The median over contributions of an observed metric's mean; None if nobody observed it.

    NaN if most of them are not finite. With three replicas or more, one alone cannot move it beyond the others.
    """
    means = [metric.mean for manifest in named if (metric := manifest.metrics.get(name)) and metric.count]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not means:
        return None
    return median(finite) if 2 * len(finite) >= len(means) and finite else math.nan
