"""`leave_if_arithmetic_differs`: stops a replica whose machine computes other bits than the others' do.

A bit that was wrong once in a machine's memory is healed by `GlobalModel.heal` and removes nobody.
"""

from collections.abc import Sequence

from diloco_orchestrator.errors import BaseDiverged
from diloco_orchestrator.protocol.claims import (
    MAX_WRONG_BASES,
    WITHIN_ROUNDS,
    BaseClaim,
    is_outvoted,
    wrong_bases,
)
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.replica.rounds.global_model import GlobalModel


def leave_if_arithmetic_differs(model: GlobalModel, commit: Commit, claims: Sequence[BaseClaim], quorum: int) -> None:
    """Raise `BaseDiverged` if the arithmetic of this machine, not only a bit in its memory, differs from others'.

    Known from the third "wrong_base" within nine rounds, or from a rebuild that starts before the dispute and gives the
    same claim again. `commit`: names this replica as a "wrong_base". `claims`: of its round.
    """
    attempt = model.attempt
    own = next((claim for claim in claims if claim.replica_id == attempt.replica_id), None)
    if own is None or not is_outvoted(own, commit, claims, quorum):
        return
    first = max(attempt.begin.after_round + 1, commit.round - WITHIN_ROUNDS + 1)
    times = wrong_bases([*(model.commit_of(r) for r in range(first, commit.round)), commit], attempt.replica_id)
    if times < MAX_WRONG_BASES and model.rebuilt_from_older() != own.digest:
        return
    groups = "; ".join(_group_words(claims, digest) for digest in sorted({claim.digest for claim in claims}))
    raise BaseDiverged(
        f"replica {attempt.replica_id} claims base {own.digest[:12]} before round {commit.round}, the commit names "
        f"{str(commit.base_digest)[:12]} ({groups}; {times} of the last {WITHIN_ROUNDS} rounds so). Rebuilt from the "
        "bucket it stays another: the arithmetic of this machine differs. Compare `diloco doctor` here and there (CPU, "
        "torch version, flush-to-zero). Committed rounds are safe; the run goes on without it."
    )


def _group_words(claims: Sequence[BaseClaim], digest: str) -> str:
    ids = ", ".join(str(claim.replica_id) for claim in claims if claim.digest == digest)
    return f"{digest[:12]} is claimed by replicas {ids}"
