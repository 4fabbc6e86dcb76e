"""Healing: after a halt by the guard, begins the next leg from the best base, if the run was launched with `on_halt`.

Which base that is, and what a leg may change, is decided in `supervision.next_leg`.
"""

import logging

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Commit
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.next_leg import begin_next_leg

log = logging.getLogger(__name__)

BY = "on_halt"  # `Begin.by` of the legs that begin here: they are counted by it, whichever coordinator began them


def heal(run_log: RunLog, stamp: Stamp) -> Begin | None:
    """Begin the next leg if the guard has halted the newest one and `on_halt` has legs left; else None.

    Safe to repeat and to race: of several coordinators one begins the leg, and all return its record. Somebody's
    request to halt the leg is respected: then nothing begins.
    """
    on_halt, begins = run_log.run.config.on_halt, run_log.begins()
    leg = begins[-1].leg
    entry = run_log.newest(begins[-1])
    if on_halt is None or entry is None or entry.commit.leg != leg or not entry.commit.halted_by_guard:
        return None
    if run_log.halt(leg) is not None:
        log.warning("leg %d was asked to halt: on_halt begins no other leg", leg)
        return None
    done = sum(begin.by == BY for begin in begins)
    if done >= on_halt.at_most:
        log.warning("the guard halted leg %d: on_halt has begun its %d legs", leg, done)
        return None
    change = ", ".join(f"{name}={value}" for name, value in on_halt.change.items()) or "nothing changed"
    why = f"on_halt {done + 1} of at most {on_halt.at_most} ({change}): {_reason(entry.commit)}"
    try:
        begin = begin_next_leg(
            run_log, rounds=None, from_round=None, by=BY, why=why, stamp=stamp, change=on_halt.change
        )
    except ConfigError as error:
        newest = run_log.newest_begin().record
        if newest.leg > leg:  # another coordinator was first
            return newest
        log.warning("on_halt begins no leg: %s", error)
        return None
    log.warning("leg %d begins from round %d: %s", begin.leg, begin.from_round, why)
    return begin


def _reason(commit: Commit) -> str:
    assert commit.verdict is not None
    return commit.verdict.reason
