"""`resume_point`: where an attempt's training begins, decided once from the bucket before the first batch.

Changes nothing; `session` applies the result.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from diloco_orchestrator.protocol.records import Progress
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.checkpoint import Checkpoint, SavedState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """The round at which an attempt continues its replica's training, and the state it continues from."""

    round: int  # the round to train or to wait for; one before the open round in one case below
    progress: Progress | None  # cursor, random generators and counters; None: the replica has published nothing yet
    state: SavedState | None  # inner optimizer and stateful objects; None: they start new
    local: Mapping[str, torch.Tensor] = field(default_factory=dict)  # local parameters; empty: those of the base
    from_base: frozenset[int] = frozenset()  # synchronised since `local` was saved: loaded from the base
    already_contributed: bool = False  # an earlier attempt has contributed to `round`


def resume_point(participant: Participant, checkpoint: Checkpoint, *, overlaps: bool) -> ResumePoint:
    """Decide where this attempt continues. `overlaps`: whether a delay or alpha is set.

    If an earlier attempt has contributed to the open round, its state with local parameters lets this attempt continue
    directly behind that contribution; without local parameters it only waits for the round's end.

    With a delay or alpha the base alone does not determine local parameters after a synchronisation. So a contribution
    to the round *before* the open one, in the same leg, is continued from too: that round is opened again and closed by
    its commit, as in the attempt that made the contribution.

    Otherwise, with fragments, local parameters are those of the last contribution, except the fragment that moved
    since.

    A state whose contribution is not this replica's newest response says nothing about local parameters: after an
    abstention, a response from a wrong base, or scores, they are the base's.
    """
    open_round, leg = participant.round, participant.attempt.begin
    existing = participant.contributor.existing()
    newest = participant.contributor.history.newest(open_round)
    state = checkpoint.read_newest()
    if existing is None and participant.contributor.existing() is not None:
        # An earlier attempt that is still alive contributed between these reads: they belong to two points.
        return resume_point(participant, checkpoint, overlaps=overlaps)
    if existing is not None and existing.attempt > participant.attempt.number:
        participant.attempt.check_superseded()
    point = ResumePoint(
        open_round, newest.progress if newest else None, state, already_contributed=existing is not None
    )
    if newest is not None and state is None and participant.attempt.config.fragments > 1:
        log.warning(
            "what was trained in fragments since each of them moved last is dropped: no state was saved with the "
            'newest contribution. replica_state="round" saves one every time.'
        )
    if state is None or not state.local:
        return point
    last = state.contribution
    if existing is not None and existing != last:
        return point
    just_before = overlaps and last.leg == leg.leg and last.round == open_round - 1
    if last.round == open_round or just_before:
        return replace(point, round=last.round, local=state.local, already_contributed=True)
    if existing is None and last.round in (open_round - 1, leg.from_round):
        return replace(point, local=state.local, from_base=frozenset({last.fragment}))
    return point
