"""Selects the scores and training metrics in a round's manifests by which the guard's state is updated.

Pure: equal manifests give equal verdicts on every replica. A manifest's scores count only for shares that the run's
start record and the roster assign to its author. `guard.fold` updates the guard.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from pydantic import JsonValue

from diloco_orchestrator.config import GuardConfig, RunConfig
from diloco_orchestrator.errors import RecordTooNew
from diloco_orchestrator.guard.fold import FoldResult, fold
from diloco_orchestrator.guard.per_replica import fold_local, local_gain
from diloco_orchestrator.guard.registry import first_state, rule_of_state
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.guard.shares import deal
from diloco_orchestrator.guard.strangers import StrangersWork, fold_strangers
from diloco_orchestrator.protocol.record_format import LONGEST_REASON
from diloco_orchestrator.protocol.records import Commit, Contribution, Discounted, Quarantine, Score, VaultScore
from diloco_orchestrator.protocol.round_metrics import EXTRA_PREFIX
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import VerdictKind

_SHARES_SHOWN = 4  # in a reason


def fold_round(
    state: dict[str, JsonValue] | None,
    config: GuardConfig,
    round_: int,
    heldout: HeldoutSet | None,
    roster: Sequence[int],
    valid: Sequence[Contribution],
    named: Sequence[Contribution],
    rebuildable: bool = True,
    work: StrangersWork | None = None,
    unheard: Collection[int] = (),
) -> FoldResult | None:
    """The guard's new state and verdict after round `round_`; None in a run without a held-out set.

    Args:
        state: the guard's state in the commit before or at the run's last start or resume; None if neither has one.
        heldout: the run's held-out set, from start.json.
        roster: the replicas among which the round's shares were divided.
        valid: manifests that start from the round's base, whose scores of that base count; in replica order.
        named: manifests that are averaged, whose training metrics count.
        rebuildable: whether the round's base can be rebuilt later (`is_rebuildable`).
        work: what was reported of strangers' contributions; None in a run that does not score them.
        unheard: replicas that score no share for the guard, and whose metrics do not count (`Start.unheard`).
    """
    if heldout is None:
        return None
    known: Mapping[str, Any] = state or {}
    # Strangers' work is scored on as many items as if strangers scored too, so that this costs launched ones no more.
    among_all = deal(len(heldout.shares), roster)
    harm, harmful = fold_strangers(known.get("strangers"), work, heldout, among_all, named) if work else (None, ())
    dealt = deal(len(heldout.shares), [replica_id for replica_id in roster if replica_id not in unheard])
    named = [manifest for manifest in _without(named, harmful) if manifest.replica_id not in unheard]
    named, local, quarantined = _without_suspects(state, config, heldout, dealt, named)
    heard = [manifest for manifest in valid if manifest.replica_id not in unheard]
    scores = [
        score for manifest in heard for score in _allowed(manifest.scores, heldout, dealt.get(manifest.replica_id, ()))
    ]
    folded = fold(
        state,
        config,
        heldout,
        RoundReports(
            round=round_,
            scores=sorted(scores, key=lambda score: score.share),
            in_loop={m.replica_id: m.in_loop for m in named if m.in_loop and m.in_loop.count},
            why_no_metric=_why_no_metric(heldout.metric, named),
            final_evaluation=bool(heard) and all(manifest.kind == "scores" for manifest in heard),
            kl_to_init=_median("kl_to_init", named),
            entropy=_median("entropy", named),
            reward_std=_median("reward_std", named),
            vault=_vault_scores(heldout, dealt, heard) if vault_base(state) is not None else (),
            rebuildable=rebuildable,
            extra={name: _median(EXTRA_PREFIX + name, named) for name in sorted(config.max_extra)},
        ),
    )
    discounted = _discounted(valid, heldout, dealt, folded.far_shares, folded.far_in_loop)
    folded = replace(folded, discounted=discounted, quarantined=harmful)
    if harm is not None:
        folded = replace(folded, state={**folded.state, "strangers": harm})
    verdict = replace(folded.verdict, heldout_root=heldout.root)
    if local is None:
        return replace(folded, verdict=verdict)
    if quarantined and not verdict.fire:
        first = quarantined[0]
        reason = f"replica {first.replica_id} is left out of round {round_}: {first.reason}"
        verdict = replace(verdict, action=VerdictKind.QUARANTINE, replica=first.replica_id, reason=reason)
    together = tuple(sorted((*harmful, *quarantined), key=lambda each: each.replica_id))
    return replace(folded, state={**folded.state, "local": local}, verdict=verdict, quarantined=together)


def fold_of_commit(
    commit: Commit,
    guard: Mapping[str, Any] | None,
    manifests: Mapping[int, Contribution],
    heldout: HeldoutSet | None,
    roster: Sequence[int],
    config: RunConfig,
    outer_step: int,
    work: StrangersWork | None = None,
    unheard: Collection[int] = (),
) -> FoldResult | None:
    """The guard's state and verdict after the round of `commit`, from its manifests; None without a held-out set.

    Args:
        guard: the guard's state before the round.
        manifests: by replica id, without those that cannot be read or that were copied from another key.
        roster: the replicas that the round waited for.
        config: of the leg (start or resume to stop).
        outer_step: outer steps in the base before the round.
        work: what it names of strangers' contributions; None in a run that does not score them.
        unheard: replicas whose scores and metrics do not count.
    """
    contributing = [answer.replica_id for answer in commit.answers if answer.kind in ("delta", "scores")]
    named = contributing if len(contributing) >= config.contributions_needed else []
    valid = [a.replica_id for a in commit.answers if a.kind != "wrong_base"]
    return fold_round(
        first_state(commit.guard, config.guard.rule) if guard is None else dict(guard),
        config.guard,
        commit.round,
        heldout,
        roster,
        [manifests[replica_id] for replica_id in valid if replica_id in manifests],
        [manifests[replica_id] for replica_id in named if replica_id in manifests],
        is_rebuildable(config, outer_step),
        work,
        unheard,
    )


def fields_of(folded: FoldResult | None, guard: Mapping[str, Any] | None) -> dict[str, Any]:
    """The guard's fields of a commit as the result of `fold_of_commit` gives them. `guard`: the guard's state before
    the round.
    """
    if folded is None:
        return {"verdict": None, "guard": guard, "quarantined": (), "discounted": ()}
    names = {"verdict": folded.verdict, "guard": folded.state}
    return {**names, "quarantined": folded.quarantined, "discounted": folded.discounted}


def vault_base(state: Mapping[str, Any] | None) -> int | None:
    """The round whose base is scored, beside the newest, on further held-out items to confirm an alarm; else None.

    `state`: the guard's state before the round.
    """
    return rule_of_state(state, "off", "the guard's state").vault_base(state.get("guard")) if state else None


def outlook(state: Mapping[str, Any] | None, config: GuardConfig) -> str:
    """A sentence of the guard rule that `state` names about what it can judge by now; empty if it is not installed."""
    try:
        return (
            rule_of_state(state, config.rule, "the guard's state").outlook(state.get("guard"), config) if state else ""
        )
    except RecordTooNew:
        return ""


def is_rebuildable(config: RunConfig, outer_step: int) -> bool:
    """Whether the base after `outer_step` outer steps stays in the bucket, as payloads or as a snapshot."""
    return config.retention.payloads == "all" or outer_step % config.snapshot_every == 0


def _vault_scores(
    heldout: HeldoutSet, dealt: Mapping[int, Sequence[int]], valid: Sequence[Contribution]
) -> list[VaultScore]:
    """Scores of the confirmation set's shares, each by the replica it is assigned to, over all items of the share."""
    sizes = heldout.vault.shares if heldout.vault else ()
    found: dict[int, VaultScore] = {}
    for manifest in valid:
        for score in manifest.vault:
            if score.share in dealt.get(manifest.replica_id, ()) and score.count == sizes[score.share]:
                found.setdefault(score.share, score)
    return [found[share] for share in sorted(found)]


def _without_suspects(
    state: Mapping[str, Any] | None,
    config: GuardConfig,
    heldout: HeldoutSet,
    dealt: Mapping[int, Sequence[int]],
    named: Sequence[Contribution],
) -> tuple[Sequence[Contribution], dict[str, Any] | None, tuple[Quarantine, ...]]:
    """(manifests without those that the per-replica guard quarantines, that guard's state, the quarantined ones).

    `named`: manifests to judge. `dealt`: replica id -> the held-out shares assigned to it. The state is None, and none
    is quarantined, in a run without that guard.
    """
    if not config.per_replica:
        return named, None, ()
    gains = []
    for manifest in named:
        shares = dealt.get(manifest.replica_id, ())
        base = _allowed(manifest.scores, heldout, shares)
        gain = local_gain(manifest.replica_id, base, _allowed(manifest.local_scores, heldout, shares))
        gains += [] if gain is None else [gain]
    local, quarantined = fold_local((state or {}).get("local"), gains)
    return _without(named, quarantined), local, quarantined


def _without(named: Sequence[Contribution], left_out: Sequence[Quarantine]) -> list[Contribution]:
    out = {each.replica_id for each in left_out}
    return [manifest for manifest in named if manifest.replica_id not in out]


def _allowed(scores: Sequence[Score], heldout: HeldoutSet, dealt: Sequence[int]) -> list[Score]:
    """`scores` of held-out shares that are assigned to the manifest's author (`dealt`), each once and whole."""
    first = {score.share: score for score in reversed(scores)}
    return [first[share] for share in dealt if share in first and first[share].count == heldout.shares[share]]


def _discounted(
    valid: Sequence[Contribution],
    heldout: HeldoutSet,
    dealt: Mapping[int, Sequence[int]],
    far_shares: Collection[int],
    far_metrics: Collection[int],
) -> tuple[Discounted, ...]:
    """The manifests of which a score or metric is clipped or ignored, in replica_id order, each with the reasons.

    For readers of the commit only: nothing depends on it.

    Args:
        valid: manifests whose scores are of the round's base, in replica_id order.
        dealt: replica id -> the shares assigned to it.
        far_shares: shares whose score is clipped, because it is far from all others (`ClippedMean.far`).
        far_metrics: replicas whose training metric is.
    """
    found = []
    for manifest in valid:
        own = dealt.get(manifest.replica_id, ())
        reasons = _why_discounted(manifest, heldout, own, far_shares)
        if manifest.in_loop and manifest.in_loop.count and not math.isfinite(manifest.in_loop.mean):
            reasons.append("its training metric is not finite")
        if manifest.replica_id in far_metrics:
            reasons.append("its training metric is far beyond the others' and is clipped")
        if reasons:
            found.append(Discounted(replica_id=manifest.replica_id, reason="; ".join(reasons)[:LONGEST_REASON]))
    return tuple(found)


def _why_discounted(
    manifest: Contribution, heldout: HeldoutSet, own: Sequence[int], far_shares: Collection[int]
) -> list[str]:
    reasons = []
    if foreign := sorted({score.share for score in manifest.scores} - set(own)):
        shown = ", ".join(map(str, foreign[:_SHARES_SHOWN])) + (", …" if len(foreign) > _SHARES_SHOWN else "")
        reasons.append(f"it scores shares that it was not dealt ({shown})")
    first = {score.share: score for score in reversed(manifest.scores)}
    for share in [share for share in own if share in first]:
        score, items = first[share], heldout.shares[share]
        if score.count != items:
            reasons.append(f"its score of share {share} is over {score.count} items, of {items}, and does not count")
        elif not math.isfinite(score.mean):
            reasons.append(f"its score of share {share} is not finite")
        elif share in far_shares:
            reasons.append(f"its score of share {share} is far beyond the others' and is clipped")
    return reasons


def _why_no_metric(metric: str, named: Sequence[Contribution]) -> str:
    """Reason why a round has no training metric `metric`: most often its replicas observed the other one."""
    other = "reward" if metric == "loss" else "loss"
    if any(other in manifest.metrics for manifest in named):
        return (
            f"replicas observe {other}, and held-out is scored as {metric}: call observe({metric}=…), or "
            f'attach(in_loop="{other}") with a heldout function that returns it'
        )
    return f"no training metric was observed: call observe({metric}=…) after each inner step"


def _median(name: str, named: Sequence[Contribution]) -> float | None:
    """The median over contributions of a metric's mean; None unless more than half of them observed it.

    It is NaN if most of these are not finite. Of three replicas or more, no single one can move the median beyond the
    others' range or introduce a metric that the others do not observe.
    """
    means = [metric.mean for manifest in named if (metric := manifest.metrics.get(name)) and metric.count]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not means or 2 * len(means) <= len(named):
        return None
    return median(finite) if 2 * len(finite) >= len(means) and finite else math.nan
