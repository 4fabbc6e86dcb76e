"""Which start record counts, and which one a replica follows: rules over what the launched replicas say.

A start (`records.Start`) is named by the sha256 of its bytes, which depend on nothing but the model and the run:
replicas that begin with the same values write the same bytes. `began` is what a replica would begin with, `follows`
what it has begun with for good; both are written once, under its own key: one replica's credentials are one voice.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco_orchestrator.protocol.digests import Sha256


@dataclass(frozen=True)
class ChosenStart:
    """The first base (start record) that most replicas began from. `final`: the rest cannot change it."""

    sha256: Sha256
    final: bool


def chosen_start(follows: Mapping[int, Sha256], replicas: int) -> ChosenStart | None:
    """The start that most replicas follow, of equal ones that of the lowest `replica_id`; None while nobody does."""
    if not follows:
        return None
    counts = Counter(follows[replica_id] for replica_id in sorted(follows))
    (best, most), *others = counts.most_common()  # of equal counts in the order in which they were first seen
    second = others[0][1] if others else 0
    left = replicas - len(follows)
    return ChosenStart(best, left == 0 or second + left < most)


@dataclass(frozen=True)
class StartDecision:
    """The start that a replica follows, its own if it is to write that one; None: it waits."""

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
    """The start that a replica follows.

    Args:
        own: what this replica would begin with; None if that is not the base that the run's settings name: then every
            start in `offered` has that base, and one of them is followed, or waited for.
        began: what each replica said so far, this one included.
        follows: what each replica follows for good.
        offered: the starts that are there, the first one first.
        replicas: number of replicas of the run.
        launched: the replicas that somebody has launched: the others are not waited for.
        mine: what an earlier attempt of this replica follows, if one did.
        waited: whether this replica has waited for the others for as long as a first round may.
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
