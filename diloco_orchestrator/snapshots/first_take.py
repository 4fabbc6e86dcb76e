"""`first_take`: which take of snapshot 0 holds the run's first base, as those say who follow its start.

Where they name several the first that holds that base is taken: one replica's word alone hides it from nobody.
"""

import logging

from diloco_orchestrator.errors import ModelMismatch, ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog

log = logging.getLogger(__name__)


def first_take(run_log: RunLog) -> str:
    """The take that most of those name who follow the run's start, if all name one; else the first that can be read.

    Takes that equally many name are tried in the order of `replica_id`. Where several are named it reads
    snapshot 0, once for each `run_log` whose start cannot change any more.
    """
    named = run_log.starts.named_takes()
    if len(named) > 1:
        take = next((take for take in named if _holds_first_base(run_log, take)), named[0])
        run_log.starts.settle_take(take)
        return take
    return named[0] if named else keys.SHARED_TAKE


def _holds_first_base(run_log: RunLog, take: str) -> bool:
    from diloco_orchestrator.snapshots.first_snapshot import is_side_file, snapshot_in  # torch, slow to import

    start = run_log.start()
    if start is None:
        return False
    try:
        found = snapshot_in(run_log, start.record, take)
        found.check(start.record, but=[name for name in found.record.files if is_side_file(name)])
    except (RecordInvalid, ObjectMissing, ModelMismatch, KeyError, ValueError) as error:
        log.warning("%s is passed over: %s", keys.snapshot(0, "", take), error)
        return False
    return True
