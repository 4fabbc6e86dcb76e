"""Which runs this user launched on this machine, kept outside of every bucket.

run.json names the executor of a run, with options, environment and entrypoint; to make that executor again is to run
what they say. Whoever may write to the bucket may have changed them, so they count only as this user wrote them: the
digest of run.json is remembered here, by the run's URL, and those of settings that legs begun here have changed.
"""

import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import Sha256, sha256_hex
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.launched import settings_sha256
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.run_log.run_log import RunLog

log = logging.getLogger(__name__)


def remember(run_log: RunLog, **facts: Any) -> None:
    """Remember that this user launched the run, and `facts` of it; those noted of the same run before stay.

    The facts: `head`, the newest that was seen; `settings`, the digests of those of legs that were begun here; and
    `failure`, why supervision ended here. Without a place to write it a warning is logged, and nothing raised.
    """
    known = _known_of(run_log) or {"url": run_log.store.url, "run_sha256": run_log.run_sha256}
    record = {**known, **facts}
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
    known = _known_of(run_log)
    if head and known and (not known.get("head") or Head.parse(known["head"]).round < Head.parse(head).round):
        remember(run_log, head=head)


def remember_leg(run_log: RunLog, begin: Begin) -> None:
    """Remember the settings of a leg that this user has begun. Does nothing if the run was not launched here."""
    if begin.settings and _known_of(run_log):
        remember(run_log, settings=sorted({*settings_begun_here(run_log), settings_sha256(begin.settings)}))


def note_failure(run_log: RunLog, failure: str) -> None:
    """Remember why supervision of a run that this user launched here ended: its bucket may take no record of it.

    Empty: it goes on again. Does nothing for a run of somebody else, or if nothing is new.
    """
    known = _known_of(run_log)
    if known and known.get("failure", "") != failure:
        remember(run_log, failure=redact(failure, os.environ))


def failure_seen_here(url: str) -> str:
    """Reason why supervision of a run that this user launched here ended; empty if nothing is known."""
    failure = _known(url).get("failure", "")
    return failure if isinstance(failure, str) else ""


def check_launched_here(run_log: RunLog, need: str) -> None:
    """Raise `ConfigError` unless this user launched the run here, with run.json as it is now. `need`: what for."""
    if why := why_not_launched_here(run_log):
        raise ConfigError(
            f"{need} needs the executor that {run_log.store.url} names, and {why}: whoever may write to the bucket "
            "chose that executor and what it runs. Name it yourself (executor=…, --executor), or pass "
            "trust_bucket=True (--trust-bucket) if you trust all who may write there."
        )


def why_not_launched_here(run_log: RunLog) -> str:
    """Reason why the run's configuration is not this user's own; empty if this user launched the run here as it is now.

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
    return frozenset(each for each in _known_of(run_log).get("settings", ()) if isinstance(each, str))


def head_seen_here(url: str) -> str:
    """The newest head of a run that this user launched here, as it was seen last; empty if none is known."""
    head = _known(url).get("head", "")
    return head if isinstance(head, str) else ""


def _known_of(run_log: RunLog) -> dict[str, Any]:
    """Facts remembered of the run as it is now; empty if run.json is another than this user launched here."""
    known = _known(run_log.store.url)
    return known if known.get("run_sha256") == run_log.run_sha256 else {}


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
