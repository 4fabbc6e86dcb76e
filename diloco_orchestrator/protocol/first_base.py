"""Vote on the first base: which of several start records (start.json) the run uses, and which one a replica adopts.

A start record (`start_records.Start`) is identified by the sha256 of its bytes, which depend on the model and the run
alone, so replicas whose models begin with equal values write equal bytes. Each replica writes two records under its
own key, each once: `Began` names the start record that its model gives, `Follows` the one that it has adopted for
good.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco_orchestrator.protocol.digests import Sha256


@dataclass(frozen=True)
class ChosenStart:
    """The start record (of a first base) that most replicas adopted. `final`: the missing votes cannot change it."""

    sha256: Sha256
    final: bool


def chosen_start(follows: Mapping[int, Sha256], replicas: int) -> ChosenStart | None:
    """The start record (of a first base) that most replicas adopted; in a tie the lowest id's; None without votes.

    `follows`: digest of the adopted start record, by replica id. `replicas`: number of replicas of the run.
    """
    if not follows:
        return None
    counts = Counter(follows[replica_id] for replica_id in sorted(follows))
    (best, most), *others = counts.most_common()  # of equal counts in the order in which they were first seen
    second = others[0][1] if others else 0
    left = replicas - len(follows)
    return ChosenStart(best, left == 0 or second + left < most)


@dataclass(frozen=True)
class StartDecision:
    """The start record (of a first base) that a replica adopts or writes, by digest. None: the replica waits."""

    sha256: Sha256 | None
    why: str


def decide_start(
    own: Sha256 | None,
    began: Mapping[int, Sha256],
    follows: Mapping[int, Sha256],
    offered: Sequence[Sha256],
    replicas: int,
    launched: Collection[int],
    mine: Sha256 | None,
    waited: bool,
) -> StartDecision:
    """The start record that one replica adopts, or None: it waits. All start records are given by digest.

    Args:
        own: that of this replica's model; None if its base is not the `first_base` of the settings. Then the replica
            adopts the first in `offered`, which all have that base, or waits for one.
        began: that of each replica's model, as its `Began` record names it, this replica included.
        follows: the one that each replica has adopted for good.
        offered: those that exist in the bucket, the earliest first.
        replicas: number of replicas of the run.
        launched: replicas that have an attempt; votes of other replicas are not waited for.
        mine: the one that an earlier attempt of this replica has adopted; None if there is none.
        waited: whether this replica has waited for votes for as long as the first round may take.
    """
    half = replicas / 2
    for sha256, count in Counter(follows.values()).items():
        if count > half and sha256 in offered:
            return StartDecision(sha256, f"{count} of {replicas} replicas follow it")
    if mine in offered:
        return StartDecision(mine, "an earlier attempt of this replica follows it")
    if own is None:
        why = (
            "its base is the one that first_base names"
            if offered
            else "no start has the base that first_base names yet"
        )
        return StartDecision(offered[0] if offered else None, why)
    if own in offered:
        return StartDecision(own, "this replica begins with the same values")
    voices = {**began, **follows}
    said = Counter(voices.values())
    if said[own] > half:
        return StartDecision(own, f"{said[own]} of {replicas} replicas begin with these values")
    others = [sha256 for sha256 in offered if said[sha256]]
    if not others:
        return StartDecision(own, "no launched replica began with another that is there")
    best = max(others, key=lambda sha256: said[sha256])  # of equal ones the first
    if said[best] > half:
        return StartDecision(best, f"{said[best]} of {replicas} replicas begin with it")
    if voices.keys() >= set(launched):
        return StartDecision(best, "all launched replicas have said what they begin with, and no more than half agree")
    if waited:
        return StartDecision(best, f"{said.total()} of {replicas} replicas have started, and no more than half agree")
    return StartDecision(None, f"{said.total()} of {replicas} replicas have said what they begin with")
