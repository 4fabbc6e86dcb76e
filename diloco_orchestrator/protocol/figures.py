"""`figures_of`: the figures that a commit holds for readers, computed from the manifests that it names.

With it, status, trackers and costs need commits only. `inspection.verify` computes it again.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from diloco_orchestrator.errors import nearest
from diloco_orchestrator.protocol.extra_metrics import mean_of, means_of
from diloco_orchestrator.protocol.record_format import MOST_COUNTED
from diloco_orchestrator.protocol.records import Contribution, Disagreeing, Metric, RoundFigures
from diloco_orchestrator.protocol.replica_names import replicas


def figures_of(manifests: Sequence[Contribution], averaged: Collection[int]) -> RoundFigures:
    """The figures of a round.

    `manifests`: those that its commit names and that can be read, in replica_id order. `averaged`: the replicas whose
    work is in the mean.
    """
    return RoundFigures(
        loss=_mean("loss", manifests),
        reward=_mean("reward", manifests),
        not_finite=_not_finite(manifests),
        in_loop=mean_of(metric.mean for manifest in manifests if (metric := manifest.in_loop)),
        tokens=sum(_tokens(manifest) for manifest in manifests if manifest.replica_id in averaged),
        dropped_steps=sum(origin.steps for manifest in manifests for origin in manifest.dropped),
        payload_bytes=sum(shard.size for m in manifests if m.payload for shard in m.payload.shards),
        disagreeing=_disagreeing(manifests),
        extra=means_of(manifests),
    )


def _mean(name: str, manifests: Sequence[Contribution]) -> float | None:
    """The mean of an observed metric over all manifests; None if nobody observed it or if it is not finite."""
    merged = Metric.merged(manifest.metrics.get(name) for manifest in manifests)
    return merged.mean if merged is not None and math.isfinite(merged.mean) else None


def _not_finite(manifests: Sequence[Contribution]) -> dict[str, tuple[int, ...]]:
    """Which replicas observed a metric that is NaN or infinite, by its name; its sum is None then."""
    found: dict[str, tuple[int, ...]] = {}
    for manifest in manifests:
        for name, metric in manifest.metrics.items():
            if metric.sum is None and metric.count:
                found[name] = (*found.get(name, ()), manifest.replica_id)
    return found


def not_finite_words(figures: RoundFigures) -> list[str]:
    """A sentence for each metric of a round that is NaN or infinite."""
    return [f"{name} of {replicas(whose)} is NaN or infinite" for name, whose in sorted(figures.not_finite.items())]


def never_observed(metric: str, observed: Collection[str]) -> str:
    """Warning of a metric that `attach(in_loop=...)` names and no `observe` reports. `observed`: those reported."""
    close = nearest(metric, observed)
    known = f"observed: {', '.join(sorted(observed))}" if observed else "nothing was observed"
    meant = " or ".join(
        [f"observe({metric}=...)", *(f"in_loop={name!r}" for name in ("loss", "reward") if name in observed)]
    )
    hint = f" Did you mean {close!r}?" if close else ""
    return (
        f"in_loop={metric!r} was never observed ({known}), so that the kill-switch cannot compare training with the "
        f"held-out score: write {meant}.{hint}"
    )


def _disagreeing(manifests: Sequence[Contribution]) -> tuple[Disagreeing, ...]:
    """Replicas left out of the round before, as most manifests say that name any; of equally many the first.

    Machines compute the same numbers from the same payloads, so that honest manifests are equal here.
    """
    said = Counter(m.disagreeing for m in manifests if m.disagreeing and m.disagreeing[0].round < m.round)
    return max(said, key=said.__getitem__, default=())


def _tokens(manifest: Contribution) -> int:
    tokens = manifest.metrics.get("tokens")
    return 0 if tokens is None else min(max(0, int(tokens.sum or 0)), MOST_COUNTED)
