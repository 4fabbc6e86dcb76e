"""The rules of a round as pure functions: when it ends, whom it averages, and whether its commit stops the run.

The functions take `now` as a value and return the reason for the log. They use no clock, no store and no tensors.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.record_format import StampFields
from diloco_orchestrator.protocol.records import Answer, Clipped, Commit, Disagreeing, Discounted, Quarantine, Result
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.protocol.straggler import StragglerDeadline

MAX_EMPTY_ROUNDS = 3  # rounds in a row without a contribution until the run stops as failed
_ENOUGH_ANSWERS = 3.0  # round deadlines after which a quorum of responses may end a round without contributions
_STALENESS = 0.25  # loss of weight for each synchronisation that carried work comes late

Stop = Literal["none", "completed", "halted", "failed"]


@dataclass(frozen=True)
class Policy:
    """The settings of a run that decide when a round ends: quorum and timeouts."""

    replicas: int  # that the leg begins with; ids 0 to `replicas` - 1
    most_replicas: int  # replica ids of the run; more than `replicas` in a run that can be scaled
    quorum: int  # contributions a round needs
    strict: bool  # whether the quorum is "all": every round waits for every replica
    round_timeout_s: float
    startup_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "Policy":
        return cls(
            replicas=config.replicas,
            most_replicas=config.most_replicas,
            quorum=config.contributions_needed,
            strict=config.quorum == "all",
            round_timeout_s=config.timing.round_timeout_s,
            startup_timeout_s=config.timing.startup_timeout_s,
        )


@dataclass(frozen=True)
class View:
    """An open round as one replica has seen it: responses and times, in seconds on its own monotonic clock."""

    answers: Sequence[Answer]  # verified responses, in replica_id order; `averaged` is not set yet
    roster: Collection[int]  # replicas that the round waits for
    opened_at: float  # when this replica took the base that the round starts from
    waiting_since: float  # when it had published its own response
    quorum_since: float | None  # when it first saw enough contributions
    deadline: StragglerDeadline | None  # None in the first round of a leg: machines are still starting
    out: Collection[int] = ()  # replicas that are launched no more in this leg, so that no response of theirs comes
    vacated: Collection[int] = ()  # replicas scaled down or without a machine; launched again where too few are left
    tie_breakers: Collection[int] = ()  # replicas whose claims would decide a tie of two bases (`claims.is_tied`)


class Action(StrEnum):
    WAIT = "wait"
    COMMIT = "commit"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    """The next action of a replica in an open round (wait, commit, give up), and its reason."""

    action: Action
    reason: str
    named: tuple[int, ...] = ()  # replicas whose contributions the commit averages
    missing: tuple[int, ...] = ()  # replicas without a response

    @property
    def summary(self) -> str:
        """The reason of this decision without the seconds left, so that it changes only with new responses."""
        return self.reason.partition(";")[0]


def contributes(answer: Answer) -> bool:
    """Whether a response is a contribution: it may be averaged or, in the final evaluation round, counted."""
    return answer.kind in ("delta", "scores")


def decide(view: View, now: float, policy: Policy) -> Decision:
    """Decide whether a replica that has published its response waits for the open round, commits it, or gives up.

    A response to a round is a contribution or an abstention.

    - With a quorum of contributions it commits them once everyone on the roster has responded, or the straggler
      deadline and its grace have passed.
    - With fewer it makes a commit that averages nobody once every replica that still could has responded, or (if the
      quorum is not "all") a quorum has responded and three deadlines have passed. While fewer than a quorum have
      responded, a vacated replica still could: the coordinator launches it again, or another one.
    - In a tie of two bases it waits for `round_timeout_s` for the responses that could break the tie.
    - It gives up when neither has happened, it has waited for `round_timeout_s`, and three deadlines have passed (one
      if the quorum is "all").
    - Otherwise it waits.

    Equal views and times give equal decisions on every machine. The table is in docs/reference/protocol.md, section 5.
    """
    contributors = tuple(sorted(a.replica_id for a in view.answers if contributes(a)))
    answered = {a.replica_id for a in view.answers}
    out = tuple(sorted(set(view.out) - answered))
    gone = {*out, *view.vacated} if len(answered) >= policy.quorum else set(out)
    known = {*range(policy.replicas), *view.roster, *answered}  # of those scaled up since, who is waited for
    missing = tuple(sorted(known - answered - gone))
    awaited = tuple(sorted(set(view.roster) - answered - gone))
    so_far = f"{len(contributors)} of {len(known)} contributions" + (f", out for good: {_listed(out)}" if out else "")
    deadline_s = _deadline_s(view, policy)
    if breakers := tuple(sorted(set(view.tie_breakers).intersection(missing) - set(view.vacated))):
        left = view.waiting_since + policy.round_timeout_s - now
        if left > 0:
            reason = f"waiting: as many claim another base, missing {_listed(breakers)}; {left:.0f} s left"
            return Decision(Action.WAIT, reason, missing=breakers)
    if len(contributors) >= policy.quorum:
        if not awaited:
            return Decision(Action.COMMIT, so_far, contributors)
        left = _straggler_time_left(view, deadline_s, now)
        if left <= 0:
            without = f"{so_far}, without {_listed(awaited)} after {now - view.opened_at:.1f} s"
            return Decision(Action.COMMIT, without, contributors)
        return Decision(Action.WAIT, f"{so_far}, waiting for {_listed(awaited)}; {left:.0f} s left", missing=awaited)
    enough_s = _ENOUGH_ANSWERS * deadline_s
    if not missing or (not policy.strict and len(answered) >= policy.quorum and now - view.opened_at >= enough_s):
        return Decision(Action.COMMIT, _why_nobody_averaged(view, contributors, missing, out, policy))
    # Give up only after the last moment at which the round could end by itself, with stragglers or naming nobody: long
    # rounds have deadlines beyond `round_timeout_s`.
    ends_at = view.opened_at + (deadline_s if policy.strict else enough_s)
    left = max(view.waiting_since + policy.round_timeout_s, ends_at) - now
    if left <= 0:
        why = f"no quorum ({policy.quorum}) after {now - view.waiting_since:.0f} s; missing: {_listed(missing)}"
        return Decision(Action.GIVE_UP, why, missing=missing)
    return Decision(Action.WAIT, f"waiting: {so_far}, missing {_listed(missing)}; {left:.0f} s left", missing=missing)


def is_ready(view: View, now: float, policy: Policy) -> bool:
    """Whether all replicas that the round waits for (its roster) have responded, or the deadline has passed."""
    responded = {a.replica_id for a in view.answers}.union(view.out, view.vacated)
    return set(view.roster) <= responded or now >= view.opened_at + _deadline_s(view, policy)


def _deadline_s(view: View, policy: Policy) -> float:
    """Seconds from the round's opening for which it waits for the replicas on its roster.

    A leg's first round has no straggler deadline: whoever starts `startup_timeout_s` late may train as long as this
    replica has.
    """
    if view.deadline is not None:
        return view.deadline.deadline_s
    return view.waiting_since - view.opened_at + policy.startup_timeout_s


def _straggler_time_left(view: View, deadline_s: float, now: float) -> float:
    """Seconds until a round that has its quorum ends without missing replicas: after straggler deadline and grace."""
    grace_s = view.deadline.grace_s if view.deadline else 0.0
    quorum_since = now if view.quorum_since is None else view.quorum_since
    return max(view.opened_at + deadline_s, quorum_since + grace_s) - now


def _why_nobody_averaged(
    view: View, contributors: Sequence[int], missing: Sequence[int], out: Sequence[int], policy: Policy
) -> str:
    """The sentence, for commit and process log, that says why a round's commit averages no contribution.

    `contributors`: replicas that contributed; `missing`: without a response; `out`: not launched before a resume.
    """
    said = grouped((a.replica_id, _kind(a)) for a in view.answers if not contributes(a))
    others = "; ".join(f"{replicas(ids)}: {words}" for ids, words in said)
    who = f"no answer from {_listed(missing)}" if missing else "all answered"
    who += f" but {_listed(out)}, out for good" if out and not missing else ""
    return (
        f"{who}, but only {len(contributors)} of the {policy.quorum} contributions needed ({others}): nobody is "
        "averaged"
    )


def _kind(answer: Answer) -> str:
    return f"{answer.kind}, {answer.reason}" if answer.reason else answer.kind


def _listed(replica_ids: Sequence[int]) -> str:
    return ", ".join(map(str, replica_ids))


def carry_weight(staleness: int) -> float:
    """The weight of work averaged `staleness` synchronisations of its fragment late: 1 / (1 + staleness / 4)."""
    return 1.0 / (1.0 + _STALENESS * staleness)


# -- what a commit says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """A position in the commit log: the run's state right after one commit. Round 0: before any commit."""

    round: int
    outer_step: int  # outer steps in the base there
    empty_rounds: int  # rounds in a row that averaged no contribution
    stop: Stop
    sha256: str  # of the last commit's bytes; of start.json at round 0

    @classmethod
    def at_start(cls, start_sha256: str) -> "Position":
        """The position in the commit log before the first commit. `start_sha256`: of start.json."""
        return cls(round=0, outer_step=0, empty_rounds=0, stop="none", sha256=start_sha256)

    @classmethod
    def after(cls, commit: Commit, sha256: str) -> "Position":
        """The position in the commit log after `commit`. `sha256`: of the commit's exact bytes."""
        return cls(commit.round, commit.outer_step, commit.empty_rounds, commit.stop, sha256)


@dataclass(frozen=True)
class Conclusion:
    """Consequences of committing a round: whether its average is applied to the base and whether the run stops."""

    applied: bool
    outer_step: int  # outer steps in the base after the round
    empty_rounds: int
    stop: Stop
    reason: str


def is_final_evaluation(position: Position, outer_steps: int) -> bool:
    """Whether the open round is the final evaluation: all outer steps are taken, only scores of the last base are left.

    `outer_steps`: outer steps of the run up to its planned stop.
    """
    return position.outer_step >= outer_steps


def conclude(decision: Decision, position: Position, *, outer_steps: int, fired: str, halt: str) -> Conclusion:
    """Whether a committed round applies its average and whether it stops the run.

    A verdict of the guard takes precedence over completion, completion over a request to halt.

    Args:
        position: the position in the log before the round.
        outer_steps: outer steps of the run up to its planned stop.
        fired: the guard's reason to stop; empty if it does not fire.
        halt: the reason of a request to halt; empty if there is none.
    """
    empty = 0 if decision.named else position.empty_rounds + 1
    final_evaluation = is_final_evaluation(position, outer_steps)
    applied = bool(decision.named) and not final_evaluation and not fired
    stop, reason = _stop(decision, empty, final_evaluation, fired, halt)
    return Conclusion(applied, position.outer_step + applied, empty, stop, reason)


def _stop(decision: Decision, empty: int, final_evaluation: bool, fired: str, halt: str) -> tuple[Stop, str]:
    if fired:
        return "halted", f"the guard fired: {fired}"
    if final_evaluation and decision.named:
        return "completed", f"every outer step is taken; {decision.reason}"
    if halt:
        return "halted", f"halt requested: {halt}"
    if empty >= MAX_EMPTY_ROUNDS:
        return "failed", f"{empty} rounds in a row named nobody; {decision.reason}"
    return "none", decision.reason


def next_roster(policy: Policy, answered: Collection[int], latecomers: Collection[int]) -> tuple[int, ...]:
    """The replicas that the next round waits for: those that responded, or whose last manifest came late.

    Args:
        answered: replicas with a response to this round.
        latecomers: replicas whose manifest of the round before came after its commit.

    Returns all replicas with quorum "all". If fewer than a quorum are left, those that the leg began with are added.
    """
    everyone, roster = set(range(policy.replicas)), {*answered, *latecomers}
    if policy.strict:
        return tuple(sorted(everyone))
    return tuple(sorted(roster if len(roster) >= policy.quorum else roster | everyone))


def averaged(named: Sequence[int], quarantined: Sequence[Quarantine]) -> tuple[int, ...]:
    """The replicas whose contributions are averaged: those in `named` (the contributors) but not in `quarantined`."""
    out = {each.replica_id for each in quarantined}
    return tuple(replica_id for replica_id in named if replica_id not in out)


def reason_with(
    reason: str,
    quarantined: Sequence[Quarantine],
    clipped: Sequence[Clipped] = (),
    disagreeing: Sequence[Disagreeing] = (),
    discounted: Sequence[Discounted] = (),
) -> str:
    """The text of a commit's `reason`, with every replica that was left out, clipped or discounted, and why."""
    said = [f"replica {each.replica_id} is left out: {each.reason}" for each in quarantined]
    said += [f"replica {each.replica_id} is clipped: {each.reason}" for each in clipped]
    said += [f"replica {each.replica_id} was left out of round {each.round}: {each.reason}" for each in disagreeing]
    said += [f"scores of replica {each.replica_id}: {each.reason}" for each in discounted]
    return "; ".join([reason, *said])


def mark_averaged(answers: Sequence[Answer], averaged: Sequence[int]) -> tuple[Answer, ...]:
    """Replicas' responses to a round with `averaged` set, true for the ids in `averaged`, false for others."""
    return tuple(answer.model_copy(update={"averaged": answer.replica_id in averaged}) for answer in answers)


def result_of(commit: Commit, commit_sha256: str, stamp: StampFields) -> Result:
    """The result record of a leg (start or resume to stop) from `commit`, which stopped it, and its digest."""
    assert commit.stop != "none"
    return Result(
        **stamp,
        leg=commit.leg,
        status=commit.stop,
        round=commit.round,
        outer_steps=commit.outer_step,
        reason=commit.reason,
        verdict=commit.verdict if commit.fired else None,
        commit_sha256=commit_sha256,
    )
