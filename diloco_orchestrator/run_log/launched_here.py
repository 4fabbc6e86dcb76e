"""A file per run, outside of every bucket, of what this user launched on this machine.

To relaunch replicas is to run the executor, options and entrypoint that run.json names. Whoever can write to the bucket
may have changed them, so they are used only if they have the digests noted here: of run.json, by the store's server and
URL, and of the settings that legs begun here changed.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import random_token
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import Sha256, sha256_hex
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.launched import settings_sha256
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.signing.kept_keys import state_folder
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)


def remember(run_log: RunLog, **facts: Any) -> None:
    """Note that this user launched the run, and `facts` about it; facts noted before are kept.

    The facts: `head`, the newest commit seen; `settings`, digests of the settings of legs begun here; `failure`, why
    supervision ended here. If the file cannot be written a warning is logged, and nothing raised.
    """
    known = _known_of(run_log) or {"url": run_log.store.url, "run_sha256": run_log.run_sha256}
    record = {**known, **facts}
    try:
        path = _record_of(run_log.store)
        draft = path.with_suffix(f".{random_token()}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(record, file)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)  # of a full disk
    except OSError as error:
        log.warning("this launch is not remembered on this machine, attach will need executor=: %s", error)


def note_head(run_log: RunLog, head: str) -> None:
    """Note `head`, the newest commit of a run launched on this machine, unless that round or a later one is noted.

    Does nothing if `head` is empty or the run was not launched here.
    """
    known = _known_of(run_log)
    if head and known and (not known.get("head") or Head.parse(known["head"]).round < Head.parse(head).round):
        remember(run_log, head=head)


def remember_leg(run_log: RunLog, begin: Begin) -> None:
    """Note the settings of a leg (start or resume to stop) that this user began, if the run was launched here."""
    if begin.settings and _known_of(run_log):
        remember(run_log, settings=sorted({*settings_begun_here(run_log), settings_sha256(begin.settings)}))


def note_failure(run_log: RunLog, failure: str) -> None:
    """Note why supervision of a run launched here ended, because its bucket may accept no record of it.

    Empty text clears the note. Does nothing for a run not launched here, or if the text is noted already.
    """
    known = _known_of(run_log)
    if known and known.get("failure", "") != failure:
        remember(run_log, failure=redact(failure, os.environ))


def failure_seen_here(store: Store) -> str:
    """The reason, noted on this machine, why supervision of a run launched here ended; empty if none is noted."""
    failure = _known(store).get("failure", "")
    return failure if isinstance(failure, str) else ""


def check_launched_here(run_log: RunLog, need: str, instead: str) -> None:
    """Raise `ConfigError` unless this user launched the run on this machine and its settings are unchanged since.

    `need`: the operation that needs a trusted executor, first words of the error. `instead`: what else its caller can
    do.
    """
    if why := why_not_launched_here(run_log):
        raise ConfigError(
            f"{need} needs the executor that {run_log.store.url} names, and {why}: whoever may write to the bucket "
            f"chose that executor and what it runs. {instead}, or pass "
            "trust_bucket=True (--trust-bucket) if you trust all who may write there."
        )


def why_not_launched_here(run_log: RunLog) -> str:
    """Reason why the run's settings are not trusted to be executed on this machine; empty if this user launched it
    here.

    The settings of the last resume count too: whoever can write to the bucket could begin a leg with other training
    arguments.
    """
    known = _known(run_log.store)
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
    """Digests of the settings of all starts and resumes by this user on this machine; empty if not launched here."""
    return frozenset(each for each in _known_of(run_log).get("settings", ()) if isinstance(each, str))


def head_seen_here(store: Store) -> str:
    """The newest commit that this user's processes on this machine have seen of a run launched here, as `Head` text.

    Empty if none is noted in the run's file outside the bucket, or the file cannot be read.
    """
    head = _known(store).get("head", "")
    return head if isinstance(head, str) else ""


def _known_of(run_log: RunLog) -> dict[str, Any]:
    """The facts about the run noted on this machine; empty if run.json differs from the one launched here."""
    known = _known(run_log.store)
    return known if known.get("run_sha256") == run_log.run_sha256 else {}


def _known(store: Store) -> dict[str, Any]:
    try:
        known = json.loads(_record_of(store).read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _record_of(store: Store) -> Path:
    """The local file of facts about a run, named by server and URL: two S3-compatible endpoints may share a URL."""
    place = " ".join(filter(None, (store.url, store.endpoint)))
    return state_folder(os.environ, "runs") / f"{sha256_hex(place.encode())[:32]}.json"
