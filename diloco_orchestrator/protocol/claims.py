"""Which base (global parameters) a round averages on when replicas disagree, and which replica must rebuild its base.

The *base claim* of a replica is the digest of the base that its contribution was formed on. These functions compare
claims without clock, store or tensors; the base is rebuilt by `snapshots.rebuild`.
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
    """The digest of the base that the author of one manifest trained from."""

    replica_id: int
    digest: str
    kind: str  # of the contribution: "delta", "abstention", "scores"
    rebuilt_after: int  # the commit up to which the author last rebuilt its base

    @classmethod
    def of(cls, manifest: Contribution) -> "BaseClaim":
        return cls(manifest.replica_id, manifest.base_digest, manifest.kind, manifest.rebuilt_after)

    def is_fresh(self, round_: int) -> bool:
        """Whether the author last rebuilt its base from the bucket at most `_FRESH_ROUNDS` rounds before `round_`."""
        return self.rebuilt_after >= round_ - _FRESH_ROUNDS


def that_count(claims: Sequence[BaseClaim], invited: Collection[int]) -> list[BaseClaim]:
    """The claims by which a round's base is decided: those of launched replicas; all where no such replica claims.

    `invited`: replicas of strangers, of which one person could run more than were launched.
    """
    return [claim for claim in claims if claim.replica_id not in invited] or list(claims)


def shared_claim(claims: Sequence[BaseClaim], own: str, *, own_is_rebuilt: bool) -> str | None:
    """The base digest that most manifests name, which the commit names too; None without manifests.

    Manifests without a contribution (abstentions) count only if there are no others. In a tie `own`, the digest of this
    replica's base, wins, else the digest of the lowest replica id. `own_is_rebuilt`: `own` was rebuilt from the bucket
    in this round; it is then returned if no two manifests agree, so that a commit averages nobody if no manifest names
    `own`.
    """
    counted = _counted(claims)
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


def _counted(claims: Sequence[BaseClaim]) -> list[BaseClaim]:
    """Those of `claims` that come with a contribution; all of them if none does."""
    return [claim for claim in claims if claim.kind != "abstention"] or list(claims)


def is_tied(claims: Sequence[BaseClaim], replica_id: int, own: str) -> bool:
    """Whether a replica's contribution names its base, and as many name another base as name that one.

    Who is right in a tie is not known before another replica claims a base. `own`: digest of the replica's base, which
    differs from that in its manifest if the base was wrong and a rebuild corrected it: such a replica knows.
    """
    sizes = Counter(claim.digest for claim in _counted(claims))
    if not any(claim.replica_id == replica_id and claim.digest == own for claim in _counted(claims)):
        return False
    return sizes[own] == max(sizes.values()) and list(sizes.values()).count(sizes[own]) > 1


def contradictions(claims: Iterable[BaseClaim], own: str, asked: Collection[str] = ()) -> frozenset[str]:
    """Digests of other bases than `own`, because of which a replica with the base `own` must rebuild it; empty if it
    need not.

    It need not if more manifests name `own` as the base that they trained from than any other digest. `asked`: digests
    because of which the base was rebuilt in this round already; they are left out.
    """
    sizes = Counter(claim.digest for claim in claims)
    others = sizes.keys() - {own}
    if not others or sizes[own] > max(sizes[digest] for digest in others):
        return frozenset()
    return frozenset(others - set(asked))


def judged(answers: Sequence[Answer], claims: Iterable[BaseClaim], shared: str | None) -> tuple[Answer, ...]:
    """The replicas' responses `answers`, where the kind of those that trained from another base than `shared` is
    "wrong_base".

    `claims`: base digests that the manifests name. `shared`: base digest that the commit names. Responses of the kind
    "unverifiable" keep it.
    """
    outside = {claim.replica_id for claim in claims if claim.digest != shared}
    return tuple(
        answer.model_copy(update={"kind": "wrong_base", "reason": "it claims another base than most others"})
        if answer.replica_id in outside and answer.kind in ("delta", "scores", "abstention")
        else answer
        for answer in answers
    )


def is_outvoted(own: BaseClaim, commit: Commit, claims: Iterable[BaseClaim], quorum: int) -> bool:
    """Whether a commit shows that the replica with base digest `own` computes wrong bits even from a fresh rebuild.

    True if the replica rebuilt its base for this round, the commit lists its response and names another base, and
    either the averaged manifests outnumber those that claim `own`, or nobody claims a third base and all authors of
    averaged manifests had rebuilt their bases too, or there are none for lack of `quorum` contributions. Who claims a
    third base may claim `own` after a rebuild. `claims`: all base claims of the round.
    """
    if commit.base_digest is None or own.digest == commit.base_digest or own.kind == "abstention":
        return False
    if not own.is_fresh(commit.round) or all(a.replica_id != own.replica_id for a in commit.answers):
        return False
    everybody = list(claims)
    contributing = {a.replica_id for a in commit.answers if a.kind in ("delta", "scores")}
    named = [claim for claim in everybody if claim.replica_id in contributing and len(contributing) >= quorum]
    group = sum(claim.digest == own.digest for claim in everybody)
    if len(named) > group:
        return True
    others = {claim.digest for claim in everybody} - {own.digest, commit.base_digest}
    return not others and all(claim.is_fresh(commit.round) for claim in named)


def wrong_bases(commits: Iterable[Commit], replica_id: int) -> int:
    """Number of `commits` that list the response of a replica as trained from a base with a wrong digest."""
    return sum(a.kind == "wrong_base" for commit in commits for a in commit.answers if a.replica_id == replica_id)
