"""Copies the global model after any round out of the bucket: from a snapshot if there is one, else rebuilt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import ConfigError, NoSuchRun
from diloco_orchestrator.protocol.legs import bases, check_base
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, open_store


def pull(
    url: str,
    destination: str | Path,
    round_: int | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Copy the model after round `round_` of the run in `url` into the new folder `destination`; returns the round.

    `round_` None means the newest base. Every digest is checked. `storage_options`: credentials and endpoint in s3fs
    spelling.

    Raises `ConfigError` if `destination` is not empty or the round has no base (naming the nearest), `NoSuchRun`,
    `RecordInvalid` or `PayloadCorrupt` for an object that was changed, and `StoreError`.
    """
    store = open_store(absolute_url(url), storage_options, retry=INTERACTIVE, must_exist=True)
    return copy_model(RunLog(store), Path(destination), round_)


def copy_model(run_log: RunLog, destination: Path, round_: int | None = None) -> int:
    """Copy the model after a round out of an open run log, as `pull` does and with its errors; returns the round."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination} exists already. Name a new folder; nothing was written.")
    if run_log.start() is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model yet: there is nothing to pull.")
    known = bases(run_log.commits(), run_log.begins())
    round_ = known[-1] if round_ is None else round_
    check_base(round_, known, run_log.store.url)
    contents = _snapshot_files(run_log, round_) if round_ in run_log.snapshots() else _rebuilt_files(run_log, round_)
    destination.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (destination / name).write_bytes(data)
    return round_


def _snapshot_files(run_log: RunLog, round_: int) -> dict[str, bytes]:
    from diloco_orchestrator.snapshots.layout import StoredSnapshot  # torch, which is slow to import

    snapshot = StoredSnapshot(run_log.store, round_, run_log.snapshot(round_))
    return {name: snapshot.file(name) for name in snapshot.record.files}


def _rebuilt_files(run_log: RunLog, round_: int) -> dict[str, bytes]:
    from diloco_orchestrator.snapshots.layout import MODEL, OUTER, outer_bytes
    from diloco_orchestrator.snapshots.rebuild import rebuild_files

    tip, files = rebuild_files(run_log, round_)
    return {MODEL: files.model_bytes(tip.base), OUTER: outer_bytes(tip.base, files.dtypes), **files.extra}
