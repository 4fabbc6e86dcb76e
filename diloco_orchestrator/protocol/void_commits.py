"""Check that a commit follows from the log before it: its outer step, its stop, and the next round's roster.

Pure functions. A commit that contradicts the rules of a round is *void* for every reader: it ends its round, averages
nobody, stops nothing, and leaves the guard's state unchanged. `guard.round_fold` checks verdicts against manifests,
`protocol.weights` checks weights.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.check_records import Checked, barred_after
from diloco_orchestrator.protocol.record_format import By
from diloco_orchestrator.protocol.records import Begin, Commit, Contribution, UsualNorms
from diloco_orchestrator.protocol.rounds import MAX_EMPTY_ROUNDS, Policy, Position, is_final_evaluation
from diloco_orchestrator.protocol.weights import is_said


@dataclass(frozen=True)
class LegRules:
    """Settings and begin record of a leg (start or resume to stop), which fix what its commits may contain."""

    begin: Begin
    begin_sha256: str
    config: RunConfig  # of the leg
    fragments: int  # that rounds synchronise in turn
    scatters: bool = False  # whether rounds are by scatter-reduce
    strangers_rules: int = 0  # of the start record
    unheard: frozenset[int] = frozenset()  # replicas whose scores and metrics the guard does not count

    @property
    def outer_steps(self) -> int:
        """Outer steps of the run up to the end of the leg (start or resume to stop)."""
        return self.begin.from_outer_step + self.begin.outer_steps


@dataclass(frozen=True)
class Before:
    """The state of a run right before one round, as every reader derives it from the commits."""

    position: Position
    guard: Mapping[str, Any] | None
    roster: tuple[int, ...]  # of the round
    norms: UsualNorms | None  # of the leg's rounds so far
    barred: tuple[int, ...] = ()  # replicas that are no dealers in the round


def first_of_leg(rules: LegRules, position: Position) -> Before:
    """The state of the run before the first round after a start or resume, which is at `position` in the log."""
    return Before(position, rules.begin.guard, tuple(range(rules.config.replicas)), norms=None)


def why_not_concluded(commit: Commit, before: Before, rules: LegRules) -> str:
    """Reason why a commit contradicts the rules of a round, by the log of commits alone; empty if it does not.

    A halt is accepted without its request: a forger could write the request too, and a request that somebody deletes
    must not undo a stop.
    """
    checks = _of_coordinator(commit, before) if commit.by_coordinator else _of_replica(commit, before, rules)
    everywhere = _everywhere(commit, before, rules)
    return next((why for why in (*everywhere, *checks) if why), "")


def why_answers_differ(commit: Commit, manifests: Mapping[int, Contribution]) -> str:
    """The first difference between the responses in a commit and the manifests that they name; empty if there is none.

    `manifests`: by replica id, without manifests that name another round, leg or replica.
    """
    for answer in commit.answers:
        i, manifest = answer.replica_id, manifests.get(answer.replica_id)
        if manifest is None:
            if rounds.contributes(answer):
                return f"it names replica {i}, whose manifest is of another round, leg or replica"
            continue
        if not is_said(answer, manifest):
            return f"it has other steps, tokens, norm or payload of replica {i} than the manifest that it names"
        theirs = manifest.kind, manifest.attempt, manifest.fragment
        if answer.averaged and (theirs != ("delta", answer.attempt, commit.fragment) or manifest.payload is None):
            return f"it averages replica {i}, whose manifest is no contribution to it"
        if rounds.contributes(answer) and manifest.base_digest != commit.base_digest:
            return f"it claims another base than replica {i}, whose contribution it names"
    return ""


def why_barred_differ(commit: Commit, before: Before, checks: Iterable[Checked]) -> str:
    """Reason why the replicas that a commit excludes from averaging for others do not follow from `checks`; else empty.

    `checks`: the replicas' findings about published averages that the commit names.
    """
    return _differs("list of who is barred", commit.barred or (), barred_after(before.barred, before.roster, checks))


def why_average_differs(commit: Commit, codec: str | None) -> str:
    """Reason why a commit's average is encoded in another codec than the run's settings give; empty if it is not.

    `codec`: the one that the settings give; None: none. A commit may name none: earlier versions encoded no average.
    """
    return "" if commit.average_codec is None else _differs("codec of the average", commit.average_codec, codec)


def why_unread(
    commit: Commit, manifests: Mapping[int, Contribution], checks: Iterable[Checked], barred: Collection[int] = ()
) -> str:
    """The first payload shard that a commit averages and nobody but its author has verified; empty if there is none.

    Empty too for a commit that averages its writer alone. For rounds by scatter-reduce, in which nobody reads all
    payloads.

    Args:
        manifests: those that the commit names, by replica id.
        checks: the replicas' findings that the commit names.
        barred: replicas whose findings do not count, because they published or reported false averages.
    """
    averaged = [answer for answer in commit.answers if answer.averaged]
    if commit.by.who is not None and [answer.replica_id for answer in averaged] == [commit.by.who[0]]:
        return ""
    authors = {(answer.replica_id, answer.manifest_sha256) for answer in averaged}
    good = {
        (found.manifest_sha256, index)
        for checked in checks
        if checked.replica_id not in barred
        for found in checked.read
        if (checked.replica_id, found.manifest_sha256) not in authors
        for index in found.good
    }
    for answer in averaged:
        payload = manifests[answer.replica_id].payload
        for index in range(len(payload.shards) if payload else 0):
            if (answer.manifest_sha256, index) not in good:
                who = f"replica {answer.replica_id}"
                return f"it averages {who}, whose payload shard {index} nobody else has found good by its records"
    return ""


def read_as_void(commit: Commit, before: Before, rules: LegRules, why: str) -> Commit:
    """The commit in place of one that contradicts the log (void): it averages nobody, stops nothing. `why`: reason."""
    position, failed = before.position, _fails_the_run(before)
    return commit.model_copy(
        update={
            "leg": rules.begin.leg,
            "fragment": position.outer_step % rules.fragments,
            "outer_step": position.outer_step,
            # A void commit makes nobody leave the run or rebuild its base.
            "answers": tuple(
                answer.model_copy(update={"averaged": False, "kind": answer.kind.replace("wrong_base", "unverifiable")})
                for answer in commit.answers
            ),
            "base_digest": None,
            "roster": tuple(sorted({*before.roster, *range(rules.config.replicas)})),
            "guard": None if before.guard is None else dict(before.guard),
            "verdict": None,
            "quarantined": (),
            "norms": before.norms,
            "checks": None,
            "barred": before.barred or None,
            "average_codec": None,
            "clipped": (),
            "discounted": (),
            "figures": None,
            "applied": False,
            "empty_rounds": position.empty_rounds + 1,
            "stop": "failed" if failed else position.stop,
            "reason": f"void, so that it averages nobody and stops nothing: {why}{_who_wrote(commit, before, failed)}",
            "previous": position.sha256,
        }
    )


def read_without_weights(commit: Commit, before: Before, why: str) -> Commit:
    """The commit used in place of one whose only fault is its weights: it averages nobody; stop and guard stay.

    `why`: the difference between its weights and those that follow from the run's policy.
    """
    failed = commit.stop == "none" and _fails_the_run(before)
    return commit.model_copy(
        update={
            "empty_rounds": before.position.empty_rounds + 1,
            "stop": "failed" if failed else commit.stop,
            "reason": f"void, so that nobody is averaged: {why}{_who_wrote(commit, before, failed)}",
        }
    )


def _fails_the_run(before: Before) -> bool:
    """Whether one more round that averages nobody is the `MAX_EMPTY_ROUNDS`th in a row, so that the run fails."""
    return before.position.stop == "none" and before.position.empty_rounds + 1 >= MAX_EMPTY_ROUNDS


def _who_wrote(commit: Commit, before: Before, failed: bool) -> str:
    """Advice for the reason of a void commit (it contradicts the log) that makes the run fail; empty for others."""
    if not failed:
        return ""
    return (
        f"; so {before.position.empty_rounds + 1} rounds in a row named nobody. See who wrote "
        f"{keys.commit(commit.round)} and those before, keep them from writing there, and resume the run"
    )


NOBODY = By(None, "nobody")


def no_commit(round_: int, why: str, by: By = NOBODY) -> Commit:
    """A placeholder for a round's commit that cannot be parsed, for `read_as_void`.

    `why`: the parse error. `by`: its author, where that is known.
    """
    return Commit(
        write_id="",
        at=0.0,
        round=round_,
        leg=1,
        fragment=0,
        outer_step=0,
        answers=(),
        begin_sha256="",
        base_digest=None,
        roster=(),
        applied=False,
        empty_rounds=0,
        stop="none",
        by=by,
        reason=why,
        previous="",
    )


def why_unlinked(commit: Commit, before: Before) -> str:
    """Reason why a commit does not continue the hash chain; empty if `previous` is the sha256 of the record before."""
    found, expected = commit.previous, before.position.sha256
    return "" if found == expected else f"it follows {found[:12]!r}, not {expected[:12]}, the record before it"


def _everywhere(commit: Commit, before: Before, rules: LegRules) -> Iterator[str]:
    position = before.position
    if position.stop != "none":
        yield f"it follows round {position.round}, which stopped the leg"
    yield _differs("leg", commit.leg, rules.begin.leg)
    yield _differs("begin_sha256", commit.begin_sha256, rules.begin_sha256)
    yield _differs("state of norms", commit.norms, before.norms)
    ids, most_replicas = [answer.replica_id for answer in commit.answers], rules.config.most_replicas
    if ids != sorted(set(ids)) or any(i >= most_replicas for i in ids):
        yield f"it lists the answers of replicas {ids[:20]}, of {most_replicas} replicas"
    everyone = tuple(range(rules.config.replicas))
    roster, policy = commit.roster, Policy.of(rules.config)
    if roster != everyone and (
        policy.strict
        or len(roster) < policy.quorum
        or roster != tuple(sorted(set(roster) & set(range(most_replicas))))
        or not set(ids) <= set(roster)
    ):
        yield f"its roster is {list(roster[:20])}, of {most_replicas} replicas"


def _of_coordinator(commit: Commit, before: Before) -> Iterator[str]:
    """Contradictions of a commit that a coordinator wrote: it may stop the run, and change nothing else."""
    position = before.position
    yield _differs("outer_step", commit.outer_step, position.outer_step)
    yield _differs("applied", commit.applied, False)
    yield _differs("answers", len(commit.answers), 0)
    yield _differs("verdict", commit.verdict, None)
    yield _differs("guard", commit.guard, None if before.guard is None else dict(before.guard))
    yield _differs("empty_rounds", commit.empty_rounds, position.empty_rounds + 1)
    if commit.stop not in ("halted", "failed"):
        yield f"a coordinator can stop a run as halted or failed, not as {commit.stop!r}"


def _of_replica(commit: Commit, before: Before, rules: LegRules) -> Iterator[str]:
    position, final_evaluation = before.position, is_final_evaluation(before.position, rules.outer_steps)
    contributors = [answer.replica_id for answer in commit.answers if rounds.contributes(answer)]
    named = contributors if len(contributors) >= rules.config.contributions_needed else []
    applied = bool(named) and not final_evaluation and not commit.fired
    empty = 0 if named else position.empty_rounds + 1
    yield _differs("fragment", commit.fragment, position.outer_step % rules.fragments)
    yield _differs("applied", commit.applied, applied)
    yield _differs("outer_step", commit.outer_step, position.outer_step + applied)
    yield _differs("empty_rounds", commit.empty_rounds, empty)
    averaged = [answer.replica_id for answer in commit.answers if answer.averaged]
    left = list(rounds.averaged(named if applied else (), commit.quarantined))
    yield _differs("who is averaged", averaged, left)
    if applied and not left:
        yield "it applies a round of which it averages nobody"
    if commit.fired:
        allowed = {"halted"}
    elif final_evaluation and named:
        allowed = {"completed"}
    else:
        allowed = {"halted", "failed" if empty >= MAX_EMPTY_ROUNDS else "none"}
    if commit.stop not in allowed:
        after = f"{position.outer_step} of {rules.outer_steps} outer steps and {empty} empty rounds"
        yield f"its stop is {commit.stop!r}, after {after}"


def _differs(what: str, found: object, expected: object) -> str:
    return "" if found == expected else f"its {what} is {str(found)[:100]}; {str(expected)[:100]} follows"
