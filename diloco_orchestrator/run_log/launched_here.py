"""Which runs this user launched on this machine, kept outside of every bucket.

run.json names the executor of a run, with options, environment and entrypoint; to make that executor again is to run
what they say. Whoever may write to the bucket may have changed them, so they count only as this user wrote them: the
digest of run.json is remembered here, by the run's URL.
"""

import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.record_format import sha256_hex
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.run_log.run_log import RunLog

log = logging.getLogger(__name__)


def remember(run_log: RunLog, head: str = "", failure: str = "") -> None:
    """Remember that this user launched the run, the newest head that was seen, and why supervision ended here.

    Without a place to write it a warning is logged, and nothing raised.
    """
    try:
        path = _record_of(run_log.store.url)
        draft = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(
                {"url": run_log.store.url, "run_sha256": run_log.run_sha256, "head": head, "failure": failure}, file
            )
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
        remember(run_log, head)


def note_failure(run_log: RunLog, failure: str) -> None:
    """Remember why supervision of a run that this user launched here ended: its bucket may take no record of it.

    Empty: it goes on again. Does nothing for a run of somebody else, or if nothing is new.
    """
    known = _known(run_log.store.url)
    if known.get("run_sha256") == run_log.run_sha256 and known.get("failure", "") != failure:
        remember(run_log, head_seen_here(run_log.store.url), redact(failure, os.environ))


def failure_seen_here(url: str) -> str:
    """Why supervision of a run that this user launched here ended; empty if nothing is known."""
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
    """Why what run.json says is not this user's own word; empty if this user launched the run here as it is now."""
    known = _known(run_log.store.url)
    if known.get("run_sha256") == run_log.run_sha256:
        return ""
    return "run.json was changed since you launched the run" if known else "you did not launch this run on this machine"


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
