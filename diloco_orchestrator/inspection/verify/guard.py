"""Checks a commit against its manifests and bases: guard state, verdict, averaged contributions, base digests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_orchestrator.guard.round_fold import fields_of, fold_of_commit
from diloco_orchestrator.inspection.verify.findings import Differs, Verification, equal
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.check_records import Checked
from diloco_orchestrator.protocol.records import Commit, Contribution, HeldoutSet
from diloco_orchestrator.protocol.round_metrics import round_metrics_of
from diloco_orchestrator.protocol.rounds import Action, Decision, Policy, Position
from diloco_orchestrator.protocol.void_commits import Before, LegRules
from diloco_orchestrator.protocol.weights import shares_in


def check_conclusion(
    key: str,
    commit: Commit,
    manifests: Mapping[int, Contribution | None],
    rules: LegRules,
    before: Before,
    heldout: HeldoutSet | None,
    *,
    halt: str,
    void: str = "",
    checks: Sequence[Checked] | None = None,
) -> None:
    """Raise `Differs` unless a commit is what the rules of a round derive from its manifests.

    Args:
        key: the commit's key, for the disagreement.
        manifests: by replica id; None for one that cannot be parsed or was copied from another key.
        rules: settings of its leg (start or resume to stop).
        before: the run's state before the round; its norms are not read.
        heldout: the run's held-out set.
        halt: the reason of the halt request that the commit obeys; empty if it obeys none.
        void: reason why the commit averages nobody although it names contributions; empty if it is not void.
        checks: the check records that it names; None in a run that does not score strangers' contributions.
    """
    config, position, guard = rules.config, before.position, before.guard
    if commit.by_coordinator:
        _check_stop_by_coordinator(key, commit, position, guard)
        return
    policy = Policy.of(config)
    equal(key, "fragment", commit.fragment, position.outer_step % rules.fragments, "the schedule")
    missing = set(manifests) - set(commit.roster)
    if missing:
        raise Differs(key, f"leaves replicas {sorted(missing)} off the next roster, though they answered")
    named = [a.replica_id for a in commit.answers if rounds.contributes(a)]
    named = named if len(named) >= policy.quorum else []
    readable = {replica_id: manifest for replica_id, manifest in manifests.items() if manifest is not None}
    folded = fold_of_commit(commit, guard, readable, heldout, before.roster, config, position.outer_step, checks)
    for name, value in fields_of(folded, guard).items():
        equal(key, name, getattr(commit, name), value, "the scores of its manifests")
    expected = rounds.conclude(
        Decision(Action.COMMIT, "", tuple(named)),
        position,
        outer_steps=rules.outer_steps,
        fired=folded.verdict.reason if folded and folded.verdict.fire else "",
        halt=halt,
    )
    if void:
        return  # its weights do not follow, so what it concludes from them is not taken
    for name in ("applied", "outer_step", "empty_rounds", "stop"):
        equal(key, name, getattr(commit, name), getattr(expected, name), "the rules of a round")
    averaged = [a.replica_id for a in commit.answers if a.averaged]
    left = list(rounds.averaged(named if expected.applied else [], commit.quarantined))
    clipped = shares_in(commit, config).clipped
    equal(key, "clipped", commit.clipped, clipped, "the norms, tokens and payloads of its answers")
    equal(key, "who is averaged", averaged, left, "the answers, the quorum and the guard")
    figures = round_metrics_of([readable[a.replica_id] for a in commit.answers if a.replica_id in readable], averaged)
    equal(key, "figures", commit.figures, figures, "the manifests that it names")


def _check_stop_by_coordinator(key: str, commit: Commit, position: Position, guard: Mapping[str, Any] | None) -> None:
    """Raise `Differs` unless a coordinator's commit averages nobody and leaves base and guard as they were."""
    equal(key, "outer_step", commit.outer_step, position.outer_step, "the round before")
    equal(key, "verdict", commit.verdict, None, "a stop by a coordinator")
    equal(key, "answers", len(commit.answers), 0, "a stop by a coordinator")
    equal(key, "applied", commit.applied, False, "a stop by a coordinator")
    equal(key, "guard", commit.guard, guard, "the round before")
    if commit.stop not in ("halted", "failed"):
        raise Differs(key, f"a coordinator can stop a run as halted or failed, not as {commit.stop!r}")


def check_claims(
    key: str,
    commit: Commit,
    manifests: Mapping[int, Contribution | None],
    digest: str | None,
    done: Verification,
) -> None:
    """Compare the base digests in a round's manifests with `digest`, that of the recomputed base it started from.

    `digest` None: it was not recomputed, so the manifests are compared only with the commit. One replica with another
    digest is tolerated by the protocol, and noted in `done`. Raises `Differs` if the commit averages several replicas
    with its base digest, which is not `digest`, or if more of its manifests name another base digest than the commit's.
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


def _contributes(commit: Commit, replica_id: int) -> bool:
    return any(a.replica_id == replica_id and a.kind in ("delta", "scores") for a in commit.answers)
