"""The rules of claims: which base a round starts from, and which replica has to rebuild its base or to leave.

A replica's *claim* is the digest of the base that its contribution was formed on. The functions compare claims; they
use no clock, no store and no tensors. Rebuilding is `snapshots.rebuild`'s.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from diloco_orchestrator.protocol.records import Answer, Commit, Contribution

MAX_WRONG_BASES = 3  # answers "wrong_base" of one replica until it leaves …
WITHIN_ROUNDS = 9  # … within so many rounds
_FRESH_ROUNDS = 2  # a base rebuilt at most so many rounds before the round in dispute counts as rebuilt for it


@dataclass(frozen=True)
class BaseClaim:
    """One manifest's claim of the base that its round starts from."""

    replica_id: int
    digest: str
    kind: str  # of the contribution: "delta", "abstention", "scores"
    rebuilt_after: int  # the commit up to which the author last rebuilt its base

    @classmethod
    def of(cls, manifest: Contribution) -> "BaseClaim":
        return cls(manifest.replica_id, manifest.base_digest, manifest.kind, manifest.rebuilt_after)

    def is_fresh(self, round_: int) -> bool:
        """Whether the author had rebuilt its base shortly before this round."""
        return self.rebuilt_after >= round_ - _FRESH_ROUNDS


def shared_claim(claims: Sequence[BaseClaim], own: str, *, own_is_rebuilt: bool) -> str | None:
    """The claim that most manifests share, which the commit names and averages. None without manifests.

    A decision needs no base of one's own: `own`, the digest of this replica's base, only breaks ties. Among claims that
    `own` is not one of, the lowest replica id breaks them. Abstentions count only where there is nothing else.

    `own_is_rebuilt`: whether `own` was rebuilt from the bucket in this round. If no two manifests agree and nobody
    claims `own`, a rebuilt `own` is returned, so that the commit names nobody.
    """
    counted = [claim for claim in claims if claim.kind != "abstention"] or list(claims)
    if not counted:
        return None
    sizes = Counter(claim.digest for claim in counted)
    largest = max(sizes.values())
    if largest == 1 and own_is_rebuilt:
        return own
    tied = [claim for claim in counted if sizes[claim.digest] == largest]
    if any(claim.digest == own for claim in tied):
        return own
    return min(tied, key=lambda claim: claim.replica_id).digest


def contradictions(claims: Iterable[BaseClaim], own: str, asked: Collection[str] = ()) -> frozenset[str]:
    """The claims for which a replica with base `own` rebuilds its base once a round is ready; empty if it need not.

    Nobody in the strictly largest group rebuilds. `asked`: claims for which it was rebuilt in this round already.
    """
    sizes = Counter(claim.digest for claim in claims)
    others = sizes.keys() - {own}
    if not others or sizes[own] > max(sizes[digest] for digest in others):
        return frozenset()
    return frozenset(others - set(asked))


def judged(answers: Sequence[Answer], claims: Iterable[BaseClaim], shared: str | None) -> tuple[Answer, ...]:
    """The answers, of kind "wrong_base" where the manifest claims another base than `shared`."""
    outside = {claim.replica_id for claim in claims if claim.digest != shared}
    return tuple(
        answer.model_copy(update={"kind": "wrong_base", "reason": "it claims another base than most others"})
        if answer.replica_id in outside and answer.kind in ("delta", "scores", "abstention")
        else answer
        for answer in answers
    )


def is_outvoted(own: BaseClaim, commit: Commit, claims: Iterable[BaseClaim], quorum: int) -> bool:
    """Whether a commit gives the replica that claims `own` a reason to doubt its arithmetic, not only its memory.

    True if it had rebuilt its base for this round, and the commit answers it and names manifests with another claim
    that are more than those with its own, or whose authors had all rebuilt their bases too; also if the commit names
    fewer than `quorum`, hence nobody. `claims`: those of the round.
    """
    if commit.base_digest is None or own.digest == commit.base_digest or own.kind == "abstention":
        return False
    if not own.is_fresh(commit.round) or all(a.replica_id != own.replica_id for a in commit.answers):
        return False
    everybody = list(claims)
    contributing = {a.replica_id for a in commit.answers if a.kind in ("delta", "scores")}
    named = [claim for claim in everybody if claim.replica_id in contributing and len(contributing) >= quorum]
    group = sum(claim.digest == own.digest for claim in everybody)
    return len(named) > group or all(claim.is_fresh(commit.round) for claim in named)


def wrong_bases(commits: Iterable[Commit], replica_id: int) -> int:
    """Number of these commits that answer a replica with "wrong_base"."""
    return sum(a.kind == "wrong_base" for commit in commits for a in commit.answers if a.replica_id == replica_id)
