"""Checks what manifests and commits claim of bases against the bases computed again."""

from collections import Counter
from collections.abc import Mapping

from diloco_orchestrator.inspection.verify.findings import Differs, Verification
from diloco_orchestrator.protocol.records import Commit, Contribution


def check_claims(
    key: str,
    commit: Commit,
    manifests: Mapping[int, Contribution | None],
    digest: str | None,
    done: Verification,
) -> None:
    """Compare the claims of a round with `digest`, that of the base it started from; None if that was not derived.

    A wrong claim of one replica is what the rules of claims expect, and is noted. Raises `Differs` if several replicas
    were averaged on a wrong claim, or if the commit's claim is not one that most of its manifests share.
    """
    claims = {i: m.base_digest for i, m in manifests.items() if m is not None and m.base_digest}
    contributing = {i for i, m in manifests.items() if m is not None and m.kind != "abstention"}
    _check_group(key, commit, {i: claims[i] for i in claims if i in contributing} or claims)
    if digest is None:
        return
    for replica_id, claim in sorted(claims.items()):
        if claim != digest:
            done.checked["wrong claims"] += 1
            done.notes.append(
                f"round {commit.round}: replica {replica_id} claimed base {claim[:12]}; computed again it is "
                f"{digest[:12]}"
            )
    if commit.base_digest in (None, digest):
        return
    named = [i for i in claims if claims[i] == commit.base_digest and _contributes(commit, i)]
    if len(named) > 1 and commit.applied:
        who = ", ".join(map(str, named))
        raise Differs(
            key,
            f"base_digest is {str(commit.base_digest)[:12]}, as replicas {who} claim; the outer steps before, computed "
            f"again, give {digest[:12]}",
        )


def _check_group(key: str, commit: Commit, claims: Mapping[int, str]) -> None:
    """Raise `Differs` unless the commit names a claim that most of its manifests share, if any two of them agree."""
    sizes = Counter(claims.values())
    largest = max(sizes.values(), default=0)
    if commit.base_digest is None:
        if claims and not commit.by_coordinator:
            raise Differs(key, "names no base_digest, though its manifests claim one")
    elif largest > 1 and sizes[commit.base_digest] < largest:
        raise Differs(key, f"base_digest is {commit.base_digest[:12]}, which fewer manifests claim than another")


def _contributes(commit: Commit, replica_id: int) -> bool:
    return any(a.replica_id == replica_id and a.kind in ("delta", "scores") for a in commit.answers)
