"""`result_of_leg`: how a leg ended, derived from its commits. A result.json alone says nothing."""

import logging
from typing import TYPE_CHECKING

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.record_format import StampFields
from diloco_orchestrator.protocol.records import Result

if TYPE_CHECKING:
    from diloco_orchestrator.run_log.entries import CommitEntry
    from diloco_orchestrator.run_log.run_log import RunLog

log = logging.getLogger(__name__)


def result_of_leg(run_log: "RunLog", leg: int) -> Result | None:
    """The result that follows from the leg's last commit; None while result.json is missing, or if the leg goes on.

    Where leg 1 has no commit, a coordinator has stopped it before any replica brought a model if there is a result.json
    and a request to halt: every replica may create the former, and none the latter.
    """
    try:
        recorded = run_log.recorded_result(leg)
        if recorded is None:
            return None
    except RecordInvalid as error:
        log.error("%s is not obeyed: %s", keys.result(leg), error)
        recorded = None
    last = _last_of(run_log, leg)
    if last is None:
        return _before_the_first_commit(run_log, recorded) if leg == 1 else None
    if last.commit.stop == "none" and recorded is not None:
        run_log.doubt()  # replicas, which derive every verdict, may have read some commits as void, and so an end
        last = _last_of(run_log, leg) or last
    if last.commit.stop == "none":
        log.error("%s says that the leg has ended; round %d stopped nothing", keys.result(leg), last.commit.round)
        return None
    stamp: StampFields = {"write_id": last.commit.write_id, "at": (recorded or last.commit).at}
    return rounds.result_of(last.commit, last.sha256, stamp)


def _before_the_first_commit(run_log: "RunLog", recorded: Result | None) -> Result | None:
    """The end of leg 1 without a commit; None while nobody has asked for it. `recorded`: None if it cannot be read."""
    halt = run_log.halt(1)
    if halt is None:
        return None
    if recorded is not None and recorded.status != "completed" and not recorded.round and not recorded.commit_sha256:
        return recorded
    stamp: StampFields = {"write_id": halt.write_id, "at": halt.at}
    return Result(**stamp, leg=1, status="halted", round=0, outer_steps=0, reason=halt.reason)


def _last_of(run_log: "RunLog", leg: int) -> "CommitEntry | None":
    """The last commit of a leg so far; None if it has none."""
    begin, following = run_log.begin_of(leg).record, run_log.begin(leg + 1)
    if following is None:
        last = run_log.newest(begin)
        return last if last is not None and last.commit.leg == leg else None
    after = following.record.after_round
    return run_log.as_read(after) if after > begin.after_round else None
