"""Whose scores or training metrics the guard does not fold as they are, and why: for the commit and its readers.

Pure. The fold decides what counts (`guard.round_fold`, `guard.robust`); nothing is decided here.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from diloco_orchestrator.protocol.record_format import LONGEST_REASON
from diloco_orchestrator.protocol.records import Contribution, Discounted, HeldoutSet

_SHOWN = 4  # shares in a reason


def discounted(
    valid: Sequence[Contribution],
    heldout: HeldoutSet,
    dealt: Mapping[int, Sequence[int]],
    far_shares: Collection[int],
    far_metrics: Collection[int],
) -> tuple[Discounted, ...]:
    """The manifests of which something is not folded as it is, in replica_id order, each with the reasons.

    Args:
        valid: manifests whose scores are of the round's base, in replica_id order.
        dealt: by replica id, the shares that it was to score.
        far_shares: whose score is clipped because it is far beyond all others (`ClippedMean.far`).
        far_metrics: replicas whose training metric is.
    """
    found = []
    for manifest in valid:
        own = dealt.get(manifest.replica_id, ())
        reasons = _of_scores(manifest, heldout, own, far_shares)
        if manifest.in_loop and manifest.in_loop.count and not math.isfinite(manifest.in_loop.mean):
            reasons.append("its training metric is not finite")
        if manifest.replica_id in far_metrics:
            reasons.append("its training metric is far beyond the others' and is clipped")
        if reasons:
            found.append(Discounted(replica_id=manifest.replica_id, reason="; ".join(reasons)[:LONGEST_REASON]))
    return tuple(found)


def _of_scores(
    manifest: Contribution, heldout: HeldoutSet, own: Sequence[int], far_shares: Collection[int]
) -> list[str]:
    reasons = []
    if foreign := sorted({score.share for score in manifest.scores} - set(own)):
        shown = ", ".join(map(str, foreign[:_SHOWN])) + (", …" if len(foreign) > _SHOWN else "")
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
