"""The rules of a round as pure functions of what has been seen: wait, commit or give up; and what a commit says.

No clock, no store, no tensors: `now` comes in as a value and the reason goes out as the log line.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Literal

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.records import Answer, Commit, Result, StampFields

MAX_EMPTY_ROUNDS = 3  # rounds in a row that name nobody until the run stops as failed
PACE_ROUNDS = 9  # whose answers say how long a round takes
_MADS = 4.0  # median absolute deviations that a replica may take longer than the median
_LEAST_SLACK, _LEAST_SLACK_S, _MOST_SLACK_S = 0.5, 2.0, 600.0  # of the median; s
_MOST_GRACE_S = 60.0
_ENOUGH_ANSWERS = 3.0  # deadlines after which a quorum of answers may end a round that names nobody
_STALENESS = 0.25

Stop = Literal["none", "completed", "halted", "failed"]


@dataclass(frozen=True)
class Policy:
    """How a run decides its rounds."""

    replicas: int
    quorum: int  # contributions a round needs
    strict: bool  # quorum "all": every round waits for every replica
    round_timeout_s: float
    startup_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "Policy":
        return cls(
            replicas=config.replicas,
            quorum=config.contributions_needed,
            strict=config.quorum == "all",
            round_timeout_s=config.timing.round_timeout_s,
            startup_timeout_s=config.timing.startup_timeout_s,
        )


@dataclass(frozen=True)
class Pace:
    """How long a round takes, from its opening to an answer, and how long to wait for who takes longer. In s."""

    median_s: float
    deadline_s: float

    @classmethod
    def of(cls, train_times_s: Sequence[float]) -> "Pace | None":
        """From the times of the last rounds' answers, late ones included; None if none are known.

        The slack beyond the median is what is bounded, so that rounds of any length leave room for stragglers.
        """
        if not train_times_s:
            return None
        middle = median(train_times_s)
        deviation = median(abs(time - middle) for time in train_times_s)
        slack = max(_MADS * deviation, _LEAST_SLACK * middle)
        return cls(middle, middle + min(max(slack, _LEAST_SLACK_S), _MOST_SLACK_S))

    @property
    def grace_s(self) -> float:
        """How long to wait for stragglers from the moment the quorum is there."""
        return min(self.deadline_s - self.median_s, _MOST_GRACE_S)


@dataclass(frozen=True)
class View:
    """What one replica has seen of an open round. Times are on its own clock."""

    round: int
    answers: Sequence[Answer]  # verified, in replica_id order; `averaged` is not set yet
    roster: Collection[int]  # whom the round waits for
    opened_at: float  # when this replica took the base that the round starts from
    waiting_since: float  # when it had answered
    quorum_since: float | None  # when it first saw enough contributions
    pace: Pace | None  # None in the first round of a leg: machines are still starting


class Action(StrEnum):
    WAIT = "wait"
    COMMIT = "commit"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    """What to do now and why. `named`: whose contributions a commit averages."""

    action: Action
    reason: str
    named: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def summary(self) -> str:
        """The reason without the time left, so that a log can tell what is new."""
        return self.reason.partition(";")[0]


def contributes(answer: Answer) -> bool:
    """Whether an answer may be averaged (or, in the closing round, counted)."""
    return answer.kind in ("delta", "scores")


def decide(view: View, now: float, policy: Policy) -> Decision:
    """What a replica that has answered does next, as long as the round has no commit.

    The same view and time give the same decision everywhere.
    """
    contributors = tuple(sorted(a.replica_id for a in view.answers if contributes(a)))
    answered = {a.replica_id for a in view.answers}
    missing = tuple(r for r in range(policy.replicas) if r not in answered)
    awaited = tuple(sorted(set(view.roster) - answered))
    so_far = f"{len(contributors)} of {policy.replicas} contributions"
    deadline_s = view.pace.deadline_s if view.pace else policy.startup_timeout_s
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
        return Decision(Action.COMMIT, _nobody(view, contributors, missing, policy))
    # A round that may still end, for its stragglers or for nobody, is not given up: long rounds have long deadlines.
    ends_at = view.opened_at + (deadline_s if policy.strict else enough_s)
    left = max(view.waiting_since + policy.round_timeout_s, ends_at) - now
    if left <= 0:
        why = f"no quorum ({policy.quorum}) after {now - view.waiting_since:.0f} s; missing: {_listed(missing)}"
        return Decision(Action.GIVE_UP, why, missing=missing)
    return Decision(Action.WAIT, f"waiting: {so_far}, missing {_listed(missing)}; {left:.0f} s left", missing=missing)


def _straggler_time_left(view: View, deadline_s: float, now: float) -> float:
    """Until a round with its quorum ends without those it waits for: the deadline, and a grace since the quorum."""
    grace_s = view.pace.grace_s if view.pace else 0.0
    quorum_since = now if view.quorum_since is None else view.quorum_since
    return max(view.opened_at + deadline_s, quorum_since + grace_s) - now


def _nobody(view: View, contributors: Sequence[int], missing: Sequence[int], policy: Policy) -> str:
    others = "; ".join(f"replica {a.replica_id}: {a.kind}" for a in view.answers if not contributes(a))
    who = f"no answer from {_listed(missing)}" if missing else "all answered"
    return (
        f"{who}, but only {len(contributors)} of the {policy.quorum} contributions needed ({others}): nobody is "
        "averaged"
    )


def _listed(replica_ids: Sequence[int]) -> str:
    return ", ".join(map(str, replica_ids))


def carry_weight(staleness: int) -> float:
    """What work counts that comes `staleness` synchronisations of its fragment late: 1 / (1 + staleness / 4)."""
    return 1.0 / (1.0 + _STALENESS * staleness)


# -- what a commit says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """Where the log stands: after which commit. Round 0 is the start."""

    round: int
    outer_step: int  # rounds applied
    empty_rounds: int  # in a row, named nobody
    stop: Stop
    sha256: str  # of the last commit's bytes; of start.json at round 0

    @classmethod
    def at_start(cls, start_sha256: str) -> "Position":
        """The log's end before the first commit."""
        return cls(round=0, outer_step=0, empty_rounds=0, stop="none", sha256=start_sha256)

    @classmethod
    def after(cls, commit: Commit, sha256: str) -> "Position":
        """The log's end after `commit`, whose exact bytes have this digest."""
        return cls(commit.round, commit.outer_step, commit.empty_rounds, commit.stop, sha256)


@dataclass(frozen=True)
class Conclusion:
    """The consequences of a decision to commit."""

    applied: bool
    outer_step: int
    empty_rounds: int
    stop: Stop
    reason: str


def is_closing(position: Position, outer_steps: int) -> bool:
    """Whether the open round is the closing one: every outer step of the run is taken, only scores are left."""
    return position.outer_step >= outer_steps


def conclude(decision: Decision, position: Position, *, outer_steps: int, fired: str, halt: str) -> Conclusion:
    """Whether the round is applied and whether it stops the run.

    `outer_steps`: the run's outer steps up to the end of this leg. `fired`: the guard's reason, empty if it is clean.
    `halt`: an operator's reason, empty if there is no request. Verdict goes before completed, completed before halt.
    """
    empty = 0 if decision.named else position.empty_rounds + 1
    closing = is_closing(position, outer_steps)
    applied = bool(decision.named) and not closing and not fired
    stop, reason = _stop(decision, empty, closing, fired, halt)
    return Conclusion(applied, position.outer_step + applied, empty, stop, reason)


def _stop(decision: Decision, empty: int, closing: bool, fired: str, halt: str) -> tuple[Stop, str]:
    if fired:
        return "halted", f"the guard fired: {fired}"
    if closing and decision.named:
        return "completed", f"every outer step is taken; {decision.reason}"
    if halt:
        return "halted", f"halt requested: {halt}"
    if empty >= MAX_EMPTY_ROUNDS:
        return "failed", f"{empty} rounds in a row named nobody; {decision.reason}"
    return "none", decision.reason


def next_roster(policy: Policy, answered: Collection[int], latecomers: Collection[int]) -> tuple[int, ...]:
    """Whom the next round waits for: who answered this one, and who answered the one before too late for it.

    With quorum "all", or where those are fewer than the quorum, everybody.
    """
    roster = tuple(sorted({*answered, *latecomers}))
    if policy.strict or len(roster) < policy.quorum:
        return tuple(range(policy.replicas))
    return roster


def named_answers(answers: Sequence[Answer], averaged: Sequence[int]) -> tuple[Answer, ...]:
    """The answers as a commit lists them: `averaged` says whose are in the mean."""
    return tuple(answer.model_copy(update={"averaged": answer.replica_id in averaged}) for answer in answers)


def result_of(commit: Commit, commit_sha256: str, stamp: StampFields) -> Result:
    """The result of the leg that `commit` stopped."""
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
