"""How an attempt ended, from its exit code and its provider's status; and how the next intent names that outcome."""

import re

from diloco_orchestrator.executors.contract import ReplicaState, ReplicaStatus
from diloco_orchestrator.protocol.process import EXIT_DONE, EXIT_PERMANENT, EXIT_PREEMPTED, EXIT_SUPERSEDED
from diloco_orchestrator.supervision.attempt_types import Outcome, Replaced

_BY_CODE = {
    EXIT_DONE: Outcome.DONE,
    EXIT_PREEMPTED: Outcome.PREEMPTED,
    EXIT_SUPERSEDED: Outcome.SUPERSEDED,
    EXIT_PERMANENT: Outcome.PERMANENT,
}


def is_conclusive(code: int) -> bool:
    """Whether an exit code names the outcome by itself. Any other one is an error, unless the provider knows why."""
    return code in _BY_CODE


def outcome_of(code: int | None, status: ReplicaStatus | None) -> Outcome:
    """The exit code decides. Where it is not conclusive, the provider may know what made the process fail: a node
    that was taken away breaks the training code before the replica notices."""
    if code is not None and is_conclusive(code):
        return _BY_CODE[code]
    if status is None:
        return Outcome.ERROR
    if status.state is ReplicaState.SUCCEEDED and code is None:
        return Outcome.DONE
    if status.state is ReplicaState.PREEMPTED:
        return Outcome.PREEMPTED
    if status.state is ReplicaState.TIMED_OUT:
        return Outcome.TIMED_OUT
    return Outcome.NO_CAPACITY if status.reason == "no_capacity" else Outcome.ERROR


def named(number: int, outcome: Outcome, reason: str) -> str:
    """Why the next attempt is launched, as its intent says it: the only record of an end that left no exit record."""
    return f"attempt {number} ({outcome}): {reason}"


def named_in(why: str, number: int) -> Replaced:
    """Reads what `named` wrote about an attempt. Without an outcome for other words, such as those of 0.1.0."""
    found = re.fullmatch(rf"attempt {number} \((.+?)\): (.*)", why, re.DOTALL)
    if found is None or found[1] not in list(Outcome):
        return Replaced()
    return Replaced(Outcome(found[1]), found[2])
