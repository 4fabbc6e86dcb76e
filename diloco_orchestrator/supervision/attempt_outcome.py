"""Maps the end of an attempt to an outcome: from its exit code and its provider's status, or from stored text.

The text is in the intent of the next attempt, the record that announces it.
"""

import re

from diloco_orchestrator.executors.contract import ReplicaState, ReplicaStatus
from diloco_orchestrator.protocol.process import EXIT_DONE, EXIT_PERMANENT, EXIT_PREEMPTED, EXIT_SUPERSEDED
from diloco_orchestrator.supervision.attempt_types import Ended, Outcome, Replaced

_BY_CODE = {
    EXIT_DONE: Outcome.DONE,
    EXIT_PREEMPTED: Outcome.PREEMPTED,
    EXIT_SUPERSEDED: Outcome.SUPERSEDED,
    EXIT_PERMANENT: Outcome.PERMANENT,
}


def is_conclusive(code: int) -> bool:
    """Whether an exit code alone determines the outcome. Others are errors, unless the provider reports why."""
    return code in _BY_CODE


def outcome_of(code: int | None, status: ReplicaStatus | None) -> Outcome:
    """The outcome of an attempt: by a conclusive exit code, otherwise by the provider's status.

    The provider may know why the process failed: a preempted node breaks the training code before the replica notices.
    `code` is None without exit record, `status` None if the provider reported nothing.
    """
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


_TOOK_PART = ", took part"


def named(number: int, ended: Ended) -> str:
    """The text by which the record that announces the next attempt says how attempt `number` ended."""
    took_part = _TOOK_PART if ended.took_part else ""
    return f"attempt {number} ({ended.outcome}{took_part}): {ended.reason}"


def named_in(why: str, number: int) -> Replaced:
    """The event with the outcome of attempt `number`, parsed from `why`, text in the record that announces the next
    attempt.

    Text of another form, such as that of version 0.1.0, gives an event whose outcome is None.
    """
    found = re.fullmatch(rf"attempt {number} \((.+?)({_TOOK_PART})?\): (.*)", why, re.DOTALL)
    if found is None or found[1] not in list(Outcome):
        return Replaced()
    return Replaced(Outcome(found[1]), found[3], took_part=found[2] is not None)
