"""Copies the global model after any round out of the bucket: a snapshot where there is one, rebuilt where not."""

from pathlib import Path

from diloco_orchestrator.errors import ConfigError, NoSuchRun, RecordInvalid
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import sha256_hex
from diloco_orchestrator.run_log.run_log import read_start
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.supervision.next_leg import bases, begins, check_base, rebuilt


def pull(store: Store, destination: Path, round_: int | None = None) -> int:
    """Write the model files after `round_` (by default the newest base) into the new folder `destination`.

    Every digest is checked on the way. Returns the round. Raises `ConfigError` naming the nearest round that has a
    base, or for a folder that holds something already.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination} exists already. Name a new folder; nothing was written.")
    reader = RunReader(store)
    if read_start(store) is None:
        raise NoSuchRun(f"no replica of {store.url} has brought a model yet: there is nothing to pull.")
    known = bases(reader.commits(), begins(store))
    round_ = known[-1] if round_ is None else round_
    check_base(round_, known, store.url)
    contents = _snapshot_files(store, round_) if round_ in reader.snapshots() else _rebuilt_files(store, reader, round_)
    destination.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (destination / name).write_bytes(data)
    return round_


def _snapshot_files(store: Store, round_: int) -> dict[str, bytes]:
    from diloco_orchestrator.snapshots.layout import read_snapshot_record

    contents = {}
    for name, info in read_snapshot_record(store, round_).files.items():
        contents[name] = store.get(keys.snapshot(round_, name))
        if sha256_hex(contents[name]) != info.sha256:
            raise RecordInvalid(
                f"{keys.snapshot(round_, name)} in {store.url} was changed after it was written. Pull another round."
            )
    return contents


def _rebuilt_files(store: Store, reader: RunReader, round_: int) -> dict[str, bytes]:
    from diloco_orchestrator.snapshots.layout import MODEL, OUTER, files_of_snapshot, outer_bytes

    tip, start = rebuilt(store, reader, round_), read_start(store)
    assert start is not None
    files = files_of_snapshot(store, 0, start[0].parameters)
    return {MODEL: files.model_bytes(tip.base), OUTER: outer_bytes(tip.base, files.dtypes), **files.extra}
