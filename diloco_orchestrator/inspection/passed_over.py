"""`passed_over`: names votes, offers and files of snapshots that count for nothing, for `diloco status`.

Keys are sorted by the table of `verify` (`inspection.verify.inventory`), which reads the whole bucket instead.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice

from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.inspection.verify.inventory import foreign_files, unpinned_kind, unpinned_record
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.protocol.records import Snapshot
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store

MOST_READ = 200  # records in each folder, the last by key: `status` answers a person who waits
MOST_NAMED = 1000


def passed_over(log: RunLog, background: Background) -> list[str]:
    """Objects among votes, records about machines that join, and snapshots that count for nothing, each as "key: why".

    They cannot be read, no writer of a run makes them, or a newer snapshot than theirs is complete. Costs a LIST of
    each of the three folders, and a GET for each record there, up to `MOST_READ` in each. Raises the store's errors.
    """
    return list(islice(_each(log, background), MOST_NAMED))


def _each(log: RunLog, background: Background) -> Iterator[str]:
    versions: dict[str, set[str]] = {}  # names of files, by the folder of a snapshot's version
    wanted: dict[str, type[Record]] = {keys.START: Start}
    for folder in (keys.STARTS, keys.JOINS, keys.SNAPSHOTS):
        records: dict[str, type[Record]] = {}
        for info in log.store.list(folder):
            if (of_snapshot := keys.parse_snapshot_file(info.key)) is not None and not keys.is_replay(info.key):
                version = keys.snapshot(of_snapshot[0], "", of_snapshot[1])
                versions.setdefault(version, set()).add(info.key.removeprefix(version))
                if keys.parse_snapshot_record(info.key) is not None:
                    records[info.key] = Snapshot
            elif unpinned_kind(info.key) is None:
                yield f"{info.key}: nothing in a run has such a key"
            elif (record := unpinned_record(info.key)) is not None:
                records[info.key] = record
        if len(records) > MOST_READ:
            yield f"{folder}: {len(records) - MOST_READ} records were not read here; `diloco verify` reads them"
        wanted |= {key: records[key] for key in sorted(records)[-MOST_READ:]}
    calls = [partial(_record, log.store, kind, key) for key, kind in wanted.items()]
    found = dict(zip(wanted, in_parallel(background, calls), strict=True))
    yield from (f"{key}: {why}" for key, why in found.items() if isinstance(why, str))
    yield from _of_snapshots(log, versions, {key: each for key, each in found.items() if isinstance(each, Snapshot)})


def _record(store: Store, kind: type[Record], key: str) -> Record | str | None:
    """The record at `key`, or why it cannot be read; None if it is missing."""
    try:
        found = read(store, kind, key)
    except RecordInvalid as error:
        return str(error)
    return None if found is None else found.record


def _of_snapshots(log: RunLog, versions: dict[str, set[str]], records: dict[str, Snapshot]) -> Iterator[str]:
    """Foreign files in versions of snapshots, and versions without a record up to the newest complete snapshot."""
    entry = log.start()
    start = None if entry is None else entry.record
    rounds = {version: found[0] for version in versions if (found := keys.parse_snapshot_file(version)) is not None}
    newest = max((rounds[key.removesuffix(keys.SNAPSHOT_RECORD)] for key in records), default=-1)
    for version, names in sorted(versions.items()):
        key = f"{version}{keys.SNAPSHOT_RECORD}"
        in_record = {*records[key].files, keys.SNAPSHOT_RECORD} if key in records else None
        if in_record is None and keys.SNAPSHOT_RECORD in names:
            continue  # not read, or named already
        foreign = foreign_files(names, in_record, start)
        yield from (f"{version}{name}: no file of this snapshot" for name in sorted(foreign))
        if in_record is None and names != foreign and rounds[version] <= newest:
            yield f"{version}: {len(names)} files without {keys.SNAPSHOT_RECORD}, though snapshot {newest} is complete"
