"""Waits for a coordinator's finding about a commit that names what is not there, which no replica can check.

Who holds the key of one replica of a signed run can write such a commit. `supervision.unfounded_commits` judges it.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from diloco_orchestrator.errors import Preempted
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.run_log.commit_readings import Unchecked

log = logging.getLogger(__name__)

T = TypeVar("T")
_JUDGED_EVERY_S = 5.0  # between two polls for a coordinator's finding


def once_judged(attempt: Attempt, call: Callable[[], T]) -> T:
    """The result of `call`, which checks commits, repeated once a coordinator has judged one that cannot be checked.

    Raises the error of the check after `round_timeout_s` without that, or after two `hung_after_s`, within which a
    coordinator reads the heartbeat, if that is longer; `Preempted` after a preemption notice, and `Superseded` if a
    later attempt of this replica is alive.
    """
    while True:
        try:
            return call()
        except Unchecked as error:
            _await_finding(attempt, error)


def _await_finding(attempt: Attempt, error: Unchecked) -> None:
    """Block until a commit that could not be checked is judged, or can be. Raises as `once_judged`."""
    clock, pulse, config = attempt.clock, attempt.pulse, attempt.config
    deadline = clock.now() + max(config.timing.round_timeout_s, 2 * config.retry.hung_after_s)
    round_, before = error.entry.commit.round, (pulse.phase, pulse.round)
    log.warning("round %d: waiting for a coordinator to judge its commit: %s", round_, error)
    if pulse.phase == "starting":  # else it has said that it waits in that round, or will
        pulse.phase, pulse.round = "waiting", round_
    try:
        while attempt.log.conclusions.is_unjudged(error.entry):
            if clock.now() >= deadline:
                raise error.__cause__ or error
            clock.sleep(max(config.timing.poll_s, _JUDGED_EVERY_S))
            if attempt.should_leave():
                raise Preempted(f"replica {attempt.replica_id} was asked to leave while it waited for a judgement")
            attempt.check_superseded()
    finally:
        if before[0] == "starting":
            pulse.phase, pulse.round = before
