"""`round_metrics_of`: the metrics of a round (loss, tokens, bytes) that its commit holds, from the round's manifests.

So status, trackers and cost reports read commits only. `inspection.verify` computes the metrics again.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from diloco_orchestrator.errors import ConfigError, RecordInvalid, nearest
from diloco_orchestrator.protocol.record_format import MOST_COUNTED, canonical_json
from diloco_orchestrator.protocol.records import Contribution, Disagreeing, Metric, RoundMetrics
from diloco_orchestrator.protocol.replica_names import replicas
from diloco_orchestrator.protocol.start_records import HeldoutSet


def round_metrics_of(manifests: Sequence[Contribution], averaged: Collection[int]) -> RoundMetrics:
    """The metrics of a round for its commit, from its readable manifests; `averaged`: ids of the averaged replicas."""
    return RoundMetrics(
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
    """The mean of an observed metric over all manifests; None if no replica observed it or if it is not finite."""
    merged = Metric.merged(manifest.metrics.get(name) for manifest in manifests)
    return merged.mean if merged is not None and math.isfinite(merged.mean) else None


def _not_finite(manifests: Sequence[Contribution]) -> dict[str, tuple[int, ...]]:
    """Replicas that observed NaN or infinity, by metric name. In a manifest such a metric has the sum None."""
    found: dict[str, tuple[int, ...]] = {}
    for manifest in manifests:
        for name, metric in manifest.metrics.items():
            if metric.sum is None and metric.count:
                found[name] = (*found.get(name, ()), manifest.replica_id)
    return found


def not_finite_words(figures: RoundMetrics) -> list[str]:
    """A sentence for each metric of a round that is NaN or infinite; `figures`: the round's metrics from its commit."""
    return [f"{name} of {replicas(whose)} is NaN or infinite" for name, whose in sorted(figures.not_finite.items())]


def never_observed(metric: str, observed: Collection[str]) -> str:
    """The warning that `observe` never reported the metric of `attach(in_loop=metric)`. `observed`: those reported."""
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
    """Replicas that `aggregate="agreeing_mean"` left out of the last round, as the manifests of this round list them.

    Of several lists that of most manifests counts, in a tie the first. Honest manifests agree, because equal payloads
    give equal numbers.
    """
    said = Counter(m.disagreeing for m in manifests if m.disagreeing and m.disagreeing[0].round < m.round)
    return max(said, key=said.__getitem__, default=())


def _tokens(manifest: Contribution) -> int:
    tokens = manifest.metrics.get("tokens")
    return 0 if tokens is None else min(max(0, int(tokens.sum or 0)), MOST_COUNTED)


# -- what a commit repeats of a manifest -------------------------------------------------------------------------------

# Bytes of one replica: 1,024 replicas fill half of the longest commit with these. A carry lists at most 32 rounds.
_MOST_ORIGINS = 4096
_MOST_NAMES = 8192  # of metrics, most of which all replicas have in common; ours and 16 of a user's take about 700


def check_repeatable(manifest: Contribution, replicas: int, where: str) -> None:
    """Raise `RecordInvalid` if what a commit repeats of `manifest`, at `where`, does not fit beside the others'.

    A commit that is longer than one may be is void, so such a manifest counts as one that cannot be read. `replicas`:
    number of replicas of the run.
    """
    origins = len(canonical_json({"origins": [each.model_dump() for each in manifest.origins]}))
    names = sum(len(name.encode()) for name in manifest.metrics)
    if origins > _MOST_ORIGINS or names > _MOST_NAMES or len(manifest.disagreeing) > replicas:
        raise RecordInvalid(
            f"{where} has {origins} bytes of origins (at most {_MOST_ORIGINS}), {names} of metrics' names (at most "
            f"{_MOST_NAMES}), and {len(manifest.disagreeing)} replicas that disagree: no commit can repeat so much."
        )


# -- metrics of the user's own -----------------------------------------------------------------------------------------

EXTRA_PREFIX = "extra."  # of their names in manifests, so that none can be taken for a metric of ours
_MOST = 16  # names in a round
_NAME = re.compile(r"[a-z_]{1,32}")


def check_name(name: str) -> str:
    """Return a user's metric name. Raises `ConfigError` unless it is 1 to 32 lower-case letters and underscores."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"the extra metric {name!r}: use 1 to 32 lower-case letters a to z and underscores.")
    return name


def checked_extra(extra: Mapping[str, float], known: int = 0) -> dict[str, float]:
    """The user's metrics of one inner step (`observe(extra=…)`), under the names that manifests use.

    `known`: number of other such names in this round. Raises `ConfigError` for a bad name, more than 16 names, and a
    value that is not finite.
    """
    if len(extra) + known > _MOST:
        raise ConfigError(f"{len(extra) + known} extra metrics in one round: {_MOST} are the most. Leave some out.")
    for name, value in extra.items():
        if not math.isfinite(value):
            raise ConfigError(f"the extra metric {check_name(name)!r} is {value}: leave out what was not measured.")
    return {EXTRA_PREFIX + check_name(name): float(value) for name, value in extra.items()}


def means_of(manifests: "Sequence[Contribution]") -> dict[str, float]:
    """The mean over replicas of each user-defined metric's mean in the round, by name."""
    found: dict[str, list[float]] = {}
    for manifest in manifests:
        for name, metric in manifest.metrics.items():
            if name.startswith(EXTRA_PREFIX):
                found.setdefault(name.removeprefix(EXTRA_PREFIX), []).append(metric.mean)
    means = {name: mean_of(values) for name, values in sorted(found.items())}
    return {name: mean for name, mean in means.items() if mean is not None}


def mean_of(values: Iterable[float]) -> float | None:
    """The mean of the finite ones of `values`; None if there are none. The mean is finite too."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    try:
        return math.fsum(finite) / len(finite)
    except OverflowError:  # a sum of numbers that replicas made up
        return math.fsum(value / len(finite) for value in finite)


def sign_of(heldout: HeldoutSet) -> float:
    """The factor from a stored score to the metric's own sign: -1 for a loss, stored negated; 1 for a reward."""
    return -1.0 if heldout.metric == "loss" else 1.0
