"""Copies the global model after any round out of the bucket: made from the verified base, not from snapshot files."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import random_token
from diloco_orchestrator.errors import ConfigError, NoSuchRun, StoreError, StoreFull
from diloco_orchestrator.inspection.sign_model import check_can_sign, sign_folder
from diloco_orchestrator.protocol.legs import check_base
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import check_signed_by
from diloco_orchestrator.snapshots.default_base import check_not_lost, default_base, default_bases
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, open_store


def pull(
    url: str,
    destination: str | Path,
    round_: int | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    sign: bool = False,
    signed_by: str | None = None,
) -> int:
    """Copy the model after round `round_` of the run in `url` into the new folder `destination`; returns the round.

    `round_` None means the default model: the newest, or after a halt by the guard the best by held-out score. Its
    files are made from the base whose digest is in the commit log, read from a snapshot or rebuilt from payloads, and
    from files whose digests are in `start.json`: other files of a snapshot are not copied. Exactly averaged PEFT
    adapters become an adapter folder, without the outer optimizer's state. `storage_options`: credentials and endpoint
    in s3fs spelling. `sign`: sign the folder as this user, in the format of OpenSSF's model-signing (`model.sig`).
    `signed_by`: the public key that must have signed the run.

    Raises `ConfigError` if `destination` is not empty or the round has no base (naming the nearest), `NoSuchRun`,
    `RecordInvalid` or `PayloadCorrupt` for an object that was changed, and `StoreError`, with `StoreFull`, and
    `ObjectMissing` where commits were deleted and no round is named. After
    an error `destination` is as it was before.
    """
    store = open_store(absolute_url(url), storage_options, retry=INTERACTIVE, must_exist=True)
    log = RunLog(store)
    check_signed_by(log.run, store.url, signed_by)
    return copy_model(log, Path(destination), round_, sign=sign)


def copy_model(run_log: RunLog, destination: Path, round_: int | None = None, *, sign: bool = False) -> int:
    """Copy the model after a round out of an open run log, as `pull` does and with its errors; returns the round."""
    check_new(destination)
    if sign:
        check_can_sign()
    begins = run_log.begins()
    if round_ is None:
        check_not_lost(run_log, begins)
    if run_log.start() is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model yet: there is nothing to pull.")
    known = default_bases(run_log)
    round_ = default_base(run_log, known, begins).round if round_ is None else round_
    check_base(round_, known.bases(begins), run_log.store.url)
    write_folder(destination, _files(run_log, round_))
    if sign:
        sign_folder(destination)
    return round_


def check_new(destination: Path) -> None:
    """Raise `ConfigError` unless `destination` does not exist or is an empty folder."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination} exists already. Name a new folder; nothing was written.")


def write_folder(destination: Path, files: Iterable[tuple[str, Iterable[bytes | memoryview]]]) -> None:
    """Create a folder with these files atomically; their bytes come in pieces. After an error nothing exists.

    Each piece is written before the next one is made. Raises `StoreError`, or `StoreFull` for a full disk.
    """
    destination = destination.resolve()
    draft = destination.with_name(f".{destination.name}.{random_token()}.partial")
    try:
        draft.mkdir(parents=True)
        write_files(draft, files)
        draft.rename(destination)  # also over an empty folder
    except OSError as error:
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(
            f"cannot write the model to {destination}: {error.strerror}. Nothing was kept. Free some space there, "
            "or name another folder that you may write."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_files(folder: Path, files: Iterable[tuple[str, Iterable[bytes | memoryview]]]) -> None:
    """Write new files into a folder, one piece in memory at a time. No link is followed, no file overwritten."""
    for name, data in files:
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            for piece in data:
                file.write(piece)
                del piece  # before the next one is made
        del data


def _files(run_log: RunLog, round_: int) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
    from diloco_orchestrator.snapshots.reader_folder import files_of  # torch, slow to import
    from diloco_orchestrator.snapshots.rebuild import rebuild_files

    tip, files = rebuild_files(run_log, round_)
    return files_of(tip.base, files)
