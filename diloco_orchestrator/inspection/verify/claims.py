"""Checks what a commit says that makes it void for no replica: claims of its base, clipped replicas, round metrics."""

from collections import Counter
from collections.abc import Collection, Mapping

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.inspection.verify.findings import Differs, Verification, equal
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.protocol.round_metrics import round_metrics_of
from diloco_orchestrator.protocol.rounds import contributes
from diloco_orchestrator.protocol.weights import shares_in


def check_said(key: str, commit: Commit, manifests: Mapping[int, Contribution | None], config: RunConfig) -> None:
    """Raise `Differs` if a commit's next roster, clipped replicas or round metrics do not follow from its manifests.

    The next round must wait for every replica that responded. Replicas do not check these fields, so a commit that is
    wrong in them still counts for the run.

    Args:
        key: the commit's key, for the disagreement.
        manifests: by replica id; None for one that cannot be parsed or was copied from another key.
        config: of its leg (start or resume to stop).
    """
    if commit.by_coordinator:
        return
    missing = set(manifests) - set(commit.roster)
    if missing:
        raise Differs(key, f"leaves replicas {sorted(missing)} off the next roster, though they answered")
    clipped = shares_in(commit, config).clipped
    equal(key, "clipped", commit.clipped, clipped, "the norms, tokens and payloads of its answers")
    averaged = [answer.replica_id for answer in commit.answers if answer.averaged]
    readable = [found for answer in commit.answers if (found := manifests[answer.replica_id]) is not None]
    figures = round_metrics_of(readable, averaged)
    equal(key, "figures", commit.figures, figures, "the manifests that it names")


def check_claims(
    key: str,
    commit: Commit,
    manifests: Mapping[int, Contribution | None],
    digest: str | None,
    invited: Collection[int],
    done: Verification,
) -> None:
    """Compare the base digests in a round's manifests with `digest`, that of the recomputed base it started from.

    `invited`: replicas of strangers, whose claims do not decide which base a round is averaged on.
    `digest` None: it was not recomputed, so the manifests are compared only with the commit. One replica with another
    digest is tolerated by the protocol, and noted in `done`. Raises `Differs` if the commit averages several replicas
    with its base digest, which is not `digest`, or if more of its manifests name another base digest than the commit's.
    """
    claims = {i: m.base_digest for i, m in manifests.items() if m is not None and m.base_digest}
    contributing = {i for i, m in manifests.items() if m is not None and m.kind != "abstention"}
    counted = {i: claims[i] for i in claims if i not in invited} or claims
    _check_group(key, commit, {i: counted[i] for i in counted if i in contributing} or counted)
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
    contributors = [answer.replica_id for answer in commit.answers if contributes(answer)]
    named = [i for i in claims if claims[i] == commit.base_digest and i in contributors]
    if len(named) > 1 and commit.applied:
        who = ", ".join(map(str, named))
        raise Differs(
            key,
            f"base_digest is {str(commit.base_digest)[:12]}, as replicas {who} claim; the outer steps before, computed "
            f"again, give {digest[:12]}",
        )


def _check_group(key: str, commit: Commit, claims: Mapping[int, str]) -> None:
    """Raise `Differs` unless a commit has the base digest that most manifests name, if any two of them agree.

    Also if the commit has none although manifests name some, except for a coordinator's commit. `claims`: base digests
    in the manifests, by replica id.
    """
    sizes = Counter(claims.values())
    largest = max(sizes.values(), default=0)
    if commit.base_digest is None:
        if claims and not commit.by_coordinator:
            raise Differs(key, "names no base_digest, though its manifests claim one")
    elif largest > 1 and sizes[commit.base_digest] < largest:
        raise Differs(key, f"base_digest is {commit.base_digest[:12]}, which fewer manifests claim than another")
