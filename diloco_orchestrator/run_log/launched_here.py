"""Which runs this user launched on this machine, kept outside of every bucket.

run.json names the executor of a run, with options, environment and entrypoint; to make that executor again is to run
what they say. Whoever may write to the bucket may have changed them, so they count only as this user wrote them: the
digest of run.json is remembered here, by the run's URL, and those of settings that legs begun here have changed.
"""

import json
import logging
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.launched import settings_sha256
from diloco_orchestrator.protocol.record_format import Sha256, sha256_hex
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.run_log import RunLog

log = logging.getLogger(__name__)


def remember(run_log: RunLog, head: str = "", settings: Collection[Sha256] = ()) -> None:
    """Remember that this user launched the run, the newest head that was seen, and the settings of legs (digests).

    Without a place to write it a warning is logged, and nothing raised.
    """
    record = {
        "url": run_log.store.url,
        "run_sha256": run_log.run_sha256,
        "head": head,
        "settings": sorted(settings),
    }
    try:
        path = _record_of(run_log.store.url)
        draft = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file)
        draft.replace(path)
    except OSError as error:
        log.warning("this launch is not remembered on this machine, attach will need executor=: %s", error)


def note_head(run_log: RunLog, head: str) -> None:
    """Remember a head of a run that this user launched here. Does nothing if one of that round or a later one is known.

    So the head of a log that was cut since replaces none.
    """
    known = _known(run_log.store.url)
    if not head or known.get("run_sha256") != run_log.run_sha256:
        return
    if not known.get("head") or Head.parse(known["head"]).round < Head.parse(head).round:
        remember(run_log, head, settings_begun_here(run_log))


def remember_leg(run_log: RunLog, begin: Begin) -> None:
    """Remember the settings of a leg that this user has begun. Does nothing if the run was not launched here."""
    known = _known(run_log.store.url)
    if begin.settings and known.get("run_sha256") == run_log.run_sha256:
        settings = {*settings_begun_here(run_log), settings_sha256(begin.settings)}
        remember(run_log, head_seen_here(run_log.store.url), settings)


def check_launched_here(run_log: RunLog, need: str) -> None:
    """Raise `ConfigError` unless this user launched the run here, with run.json as it is now. `need`: what for."""
    if why := why_not_launched_here(run_log):
        raise ConfigError(
            f"{need} needs the executor that {run_log.store.url} names, and {why}: whoever may write to the bucket "
            "chose that executor and what it runs. Name it yourself (executor=…, --executor), or pass "
            "trust_bucket=True (--trust-bucket) if you trust all who may write there."
        )


def why_not_launched_here(run_log: RunLog) -> str:
    """Why the run's configuration is not this user's own word; empty if this user launched the run here as it is now.

    That of a leg counts, too: who may write to the bucket could begin one with other arguments for training.
    """
    known = _known(run_log.store.url)
    if known.get("run_sha256") != run_log.run_sha256:
        changed = "run.json was changed since you launched the run"
        return changed if known else "you did not launch this run on this machine"
    legs, begun = range(2, run_log.newest_leg() + 1), settings_begun_here(run_log)
    for begin in filter(None, map(run_log.begin, legs)):
        if (digest := settings_sha256(begin.record.settings)) and digest not in begun:
            names = ", ".join(sorted(begin.record.settings))
            return f"leg {begin.record.leg} changes {names}, and was not begun by you on this machine"
    return ""


def settings_begun_here(run_log: RunLog) -> frozenset[Sha256]:
    """The digests of settings of legs that this user began on this machine. Empty if the run was launched elsewhere."""
    known = _known(run_log.store.url)
    if known.get("run_sha256") != run_log.run_sha256:
        return frozenset()
    return frozenset(each for each in known.get("settings", ()) if isinstance(each, str))


def head_seen_here(url: str) -> str:
    """The newest head of a run that this user launched here, as it was seen last; empty if none is known."""
    head = _known(url).get("head", "")
    return head if isinstance(head, str) else ""


def _known(url: str) -> dict[str, Any]:
    try:
        known = json.loads(_record_of(url).read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _record_of(url: str) -> Path:
    return _folder(os.environ) / f"{sha256_hex(url.encode())[:32]}.json"


def _folder(environ: Mapping[str, str]) -> Path:
    """The folder of these records, which only this user can read and write. Raises `OSError` if it is another's."""
    state = environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "diloco-orchestrator" / "runs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} is not a folder that only this user can write to")
    return folder
