"""The rules of a round as pure functions of what has been seen: wait, commit or give up; and what a commit says.

No clock, no store, no tensors: `now` comes in as a value and the reason goes out as the log line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.records import Answer, Commit, Result, StampFields

MAX_EMPTY_ROUNDS = 3  # rounds in a row that name nobody until the run stops as failed

Stop = Literal["none", "completed", "halted", "failed"]


@dataclass(frozen=True)
class Policy:
    """How a run decides its rounds."""

    replicas: int
    quorum: int  # contributions a round needs
    round_timeout_s: float
    startup_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "Policy":
        return cls(
            replicas=config.replicas,
            quorum=config.replicas,  # "all", the only choice for now
            round_timeout_s=config.timing.round_timeout_s,
            startup_timeout_s=config.timing.startup_timeout_s,
        )


@dataclass(frozen=True)
class View:
    """What one replica has seen of an open round."""

    round: int
    answers: Sequence[Answer]  # verified, in replica_id order; `averaged` is not set yet
    waiting_since: float  # when this replica had answered, on its own clock
    first_of_leg: bool  # waits longer: machines are still starting


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
    if len(contributors) >= policy.quorum:
        return Decision(Action.COMMIT, f"{len(contributors)} of {policy.replicas} contributions", contributors)
    if not missing:
        others = "; ".join(f"replica {a.replica_id}: {a.kind}" for a in view.answers if not contributes(a))
        return Decision(
            Action.COMMIT,
            f"all answered, but only {len(contributors)} of the {policy.quorum} contributions needed "
            f"({others}): nobody is averaged",
        )
    limit = max(policy.startup_timeout_s, policy.round_timeout_s) if view.first_of_leg else policy.round_timeout_s
    left = view.waiting_since + limit - now
    who = ", ".join(map(str, missing))
    if left <= 0:
        return Decision(Action.GIVE_UP, f"no quorum after {limit:g} s; missing: {who}", missing=missing)
    return Decision(
        Action.WAIT,
        f"waiting: {len(contributors)} of {policy.replicas} contributions, missing {who}; {left:.0f} s left",
        missing=missing,
    )


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
    def after(cls, commit: Commit, sha256: str) -> "Position":
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


def next_roster(policy: Policy) -> tuple[int, ...]:
    """Whom the next round waits for. With quorum "all" always everybody."""
    return tuple(range(policy.replicas))


def named_answers(answers: Sequence[Answer], averaged: Sequence[int]) -> tuple[Answer, ...]:
    """The answers as a commit lists them: `averaged` says whose are in the mean."""
    return tuple(answer.model_copy(update={"averaged": answer.replica_id in averaged}) for answer in answers)


def result_of(commit: Commit, stamp: StampFields) -> Result:
    """The result of the leg that `commit` stopped."""
    assert commit.stop != "none"
    fired = bool(commit.verdict and commit.verdict.get("fire"))
    return Result(
        **stamp,
        leg=commit.leg,
        status=commit.stop,
        round=commit.round,
        outer_steps=commit.outer_step,
        reason=commit.reason,
        verdict=commit.verdict if fired else None,
    )
