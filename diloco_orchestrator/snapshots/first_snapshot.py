"""The common parts of all snapshots of a run: frozen tensors, first buffers, and the files without tensors.

They are in snapshot 0, and `start.json` has their digests, so that none can be replaced later. In a run that began
before start records had those digests, snapshot 0's record counts.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress

from diloco_orchestrator.errors import NoSuchRun, ObjectMissing
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import FileInfo
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import first_take
from diloco_orchestrator.snapshots.file_plan import is_side_file
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.stored import StoredSnapshot, first_snapshot_in

log = logging.getLogger(__name__)


def first_snapshot(run_log: RunLog) -> StoredSnapshot:
    """Snapshot 0, with the base and files that `start.json` names. Raises `NoSuchRun` without a start.json."""
    return first_snapshot_in(run_log, _start(run_log), first_take(run_log))


def files_of_run(run_log: RunLog) -> ModelFiles:
    """Everything of a snapshot but its base, the same in all snapshots of the run. Raises as `first_snapshot` does."""
    return first_snapshot(run_log).model_files(_start(run_log), side_files_of_run(run_log))


def side_files_of_run(run_log: RunLog) -> dict[str, bytes]:
    """The files without tensors, by name, each from the first snapshot that has it with its digest.

    A file without such a copy, because somebody else created another there first, is left out with a warning.
    """
    first, found = first_snapshot(run_log), {}
    for name, info in first.record.files.items():
        if is_side_file(name):
            data = next((each for each in _copies(run_log, name, info) if bulk_digest(each) == info.digest), None)
            if data is None:
                log.warning(
                    "no snapshot in %s has %s with the digest that %s names: somebody has put another one there. The "
                    "model is read without it. Delete %s, and pull again after the next snapshot.",
                    run_log.store.url,
                    name,
                    keys.START,
                    keys.snapshot(0, name),
                )
            else:
                found[name] = data
    return found


def _copies(run_log: RunLog, name: str, info: FileInfo) -> Iterator[bytes]:
    """Bytes of one file from each complete snapshot, oldest snapshot first, truncated to the size that `info` names."""
    for round_, take in _takes(run_log):
        with suppress(ObjectMissing):
            yield run_log.store.get(keys.snapshot(round_, name, take), 0, info.size + 1)


def _takes(run_log: RunLog) -> Iterator[tuple[int, str]]:
    yield 0, first_take(run_log)
    later = run_log.snapshot_takes()  # one LIST request, where the first snapshot's copy is not the right one
    yield from ((round_, take) for round_ in sorted(later) if round_ for take in later[round_])


def _start(run_log: RunLog) -> Start:
    found = run_log.start()
    if found is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model: it has no first snapshot.")
    return found.record
