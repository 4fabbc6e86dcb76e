"""Creates run.json, the first leg's begin record, commits, requests to halt or scale. A leg: start or resume to stop.

Every function may be repeated and raced: of several creates of one object exactly one wins.
"""

from shlex import quote

from diloco_orchestrator.errors import ConfigError, RunFolderTaken
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Commit, Halt, Run, Scale
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store


def create_run(store: Store, run: Run, by: str, stamp: Stamp) -> RunLog:
    """Create run.json and the first start's record. Raises `RunFolderTaken` if the folder holds a run."""
    if Writer(store, Role.LAUNCHER).create(run) is None:
        raise RunFolderTaken(
            f"{store.url} already holds a run. Give the new run a folder of its own, or inspect that one with "
            f"`diloco status {quote(store.url)}`."
        )
    return _begin_first_leg(RunLog(store, run_json=run.to_bytes()), by, stamp)


def join_or_create_run(store: Store, run: Run, by: str, stamp: Stamp) -> RunLog:
    """Create the run, or open it if another replica has created it; for loops without a coordinator. Returns its log.

    Raises `RunFolderTaken` if the folder holds a run with another configuration.
    """
    created = Writer(store, Role.LAUNCHER).create(run)
    log = RunLog(store)
    if created is None and log.run.config != run.config:
        there, here = log.run.config, run.config
        names = [name for name in type(here).model_fields if getattr(there, name) != getattr(here, name)]
        differ = "; ".join(f"{name} is {getattr(there, name)!r} there, {getattr(here, name)!r} here" for name in names)
        raise RunFolderTaken(
            f"{store.url} already holds a run with another configuration: {differ}. Use a new folder, or its settings."
        )
    return _begin_first_leg(log, by, stamp)


def _begin_first_leg(log: RunLog, by: str, stamp: Stamp) -> RunLog:
    """Create the record that begins the run, until its first stop, unless it exists."""
    begin = Begin(
        **stamp(),
        leg=1,
        after_round=0,
        from_round=0,
        from_outer_step=0,
        outer_steps=log.run.config.rounds,
        by=by,
        why="start of the run",
        previous=log.run_sha256,
    )
    created = Writer(log.store, Role.LAUNCHER).create(begin)
    if created is not None:
        log.remember_begin(created)
    return log


def append_commit(log: RunLog, commit: Commit) -> CommitEntry:
    """Create `commit` unless its round has one; returns the round's commit, which every replica then applies."""
    if Writer.of(log.store.without_read_back(), commit.by).create(commit) is not None:
        return log.remember_commit(commit.round, commit.to_bytes())
    entry = log.commit(commit.round)
    assert entry is not None, "a commit is never deleted"
    return entry


def request_halt(log: RunLog, by: str, reason: str, stamp: Stamp, new_keys: bool = False) -> None:
    """Create the request to stop the run after its open round, if missing.

    `new_keys`: whether the process that supervises the run, which is signed, then replaces its keys and begins the next
    leg (start or resume to stop). Raises `ConfigError` after the stop, and for a request that the run stay halted if
    there is one for new keys.
    """
    leg = log.newest_begin().record.leg
    if (result := log.result(leg)) is not None:
        raise ConfigError(
            f"{log.store.url} has ended already ({result.status}: {result.reason}). There is nothing to halt."
        )
    asked = Halt(**stamp(), leg=leg, by=by, reason=reason, new_keys=new_keys or None)
    created = Writer(log.store, Role.ANYBODY).create(asked) is not None
    if not (created or new_keys) and (halt := log.halt(leg)) is not None and halt.new_keys:
        raise ConfigError(
            f"{log.store.url} halts for new keys already ({halt.reason}), and goes on by itself then: ask again once "
            f"leg {leg + 1} has begun."
        )


def request_scale(log: RunLog, replicas: int, by: str, stamp: Stamp) -> None:
    """Create the request that the run trains with `replicas` replicas from now on; coordinators obey the newest.

    Raises `ConfigError` after the run's stop, for a run of a fixed number of replicas, and for fewer replicas than the
    run has at the least or more than its `max_replicas`.
    """
    leg = log.newest_begin().record.leg
    config = log.configs.of(leg)
    if config.max_replicas is None:
        raise ConfigError(
            f"{log.store.url} was launched with {config.replicas} replicas and no max_replicas, so that data and "
            "held-out items are dealt over these. Launch a run with --replicas 4..16 to scale it while it trains."
        )
    if not config.replicas <= replicas <= config.most_replicas:
        raise ConfigError(
            f"{log.store.url} has {config.replicas} to {config.most_replicas} replicas, not {replicas}: choose one of "
            "these. Fewer or more need a resume with other replicas, or a new run."
        )
    if (ended := log.result(leg)) is not None:
        raise ConfigError(
            f"{log.store.url} has ended ({ended.status}). Resume it with another number: diloco resume --replicas "
            f"{replicas}."
        )
    writer = Writer(log.store, Role.ANYBODY)
    number = log.scaled_to(leg)[0] + 1
    while writer.create(Scale(**stamp(), leg=leg, number=number, replicas=replicas, by=by)) is None:
        number += 1  # somebody else asked at the same time; the later number counts
