"""Begins the next leg of a stopped run: chooses its base and the number of outer steps, and writes its record.

Which bases exist is decided in `protocol.legs`.
"""

import logging
from collections.abc import Sequence

from diloco_orchestrator.errors import ConfigError, NoSuchRun, PayloadCorrupt
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import bases, best_base, check_base
from diloco_orchestrator.protocol.records import Begin, Commit, Stamp
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots

log = logging.getLogger(__name__)


def begin_next_leg(
    run_log: RunLog, *, rounds: int | None, from_round: int | None, by: str, why: str, stamp: Stamp
) -> Begin:
    """Create the record with which the next leg begins.

    `from_round`: the base to start from; by default the one that the run stopped on, and after a verdict the one with
    the best held-out score. `rounds`: outer steps of the leg; by default those that the run has left.

    Raises `ConfigError` for a run that goes on, for a round without a base, and if somebody else has begun the leg
    meanwhile; `NoSuchRun` if no replica ever brought a model.
    """
    begins, commits, url = run_log.begins(), run_log.commits(), run_log.store.url
    last = commits[-1] if commits else None
    leg = begins[-1].leg
    if run_log.result(leg) is None and (last is None or last.leg != leg or last.stop == "none"):
        raise ConfigError(f"{url} goes on (leg {leg}): there is nothing to resume. Halt it first, or attach to it.")
    start = run_log.start()
    if start is None:
        raise NoSuchRun(f"no replica of {url} ever brought a model: start a new run instead.")
    known = bases(commits, begins)
    if from_round is None:
        fired = last is not None and last.fired
        from_round = _best_available(run_log, commits, begins, known, stamp) if fired else known[-1]
    check_base(from_round, known, url)
    origin = run_log.commit(from_round) if from_round else None
    taken = origin.commit.outer_step if origin else 0
    left = run_log.run.config.rounds - taken if rounds is None else rounds
    if left < 1:
        raise ConfigError(f"{url} took all its {taken} outer steps. Say how many more: resume(rounds=…) or --rounds.")
    _ensure_snapshot(run_log, from_round, stamp)
    position = run_log.position()
    begin = Begin(
        **stamp(),
        leg=leg + 1,
        after_round=last.round if last else 0,
        from_round=from_round,
        from_outer_step=taken,
        outer_steps=left,
        guard=origin.commit.guard if origin else None,
        by=by,
        why=why,
        previous=position.sha256 if position else start.sha256,
    )
    if not run_log.store.create(keys.begin(begin.leg), begin.to_bytes()):
        raise ConfigError(f"somebody else began leg {begin.leg} of {url} at the same time: attach to it.")
    return begin


def _best_available(
    run_log: RunLog, commits: Sequence[Commit], begins: Sequence[Begin], known: Sequence[int], stamp: Stamp
) -> int:
    """The round in `known` whose base has the best held-out score; writes that base's snapshot.

    If retention has deleted payloads that rebuilding it needs: the best round in `known` that has a snapshot.
    """
    best = best_base(commits, begins, known)
    try:
        _ensure_snapshot(run_log, best, stamp)
    except ConfigError as error:
        snapshots = ConfirmedSnapshots(run_log)
        among = [round_ for round_ in snapshots.rounds if round_ in known and snapshots.take_of(round_) is not None]
        log.warning("%s The best of those is taken.", error)
        return best_base(commits, begins, among)
    return best


def _ensure_snapshot(run_log: RunLog, round_: int, stamp: Stamp) -> None:
    """Write the snapshot of the base that a leg starts from unless it exists, so that replicas need nothing older.

    Raises `ConfigError` naming the newest snapshot if payloads that the base needs cannot be read any more.
    """
    snapshots = ConfirmedSnapshots(run_log)
    if snapshots.take_of(round_) is not None:
        return
    from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot  # torch, which is slow to import

    try:
        write_rebuilt_snapshot(run_log, round_, stamp)
    except PayloadCorrupt as error:
        newest = snapshots.newest(1, range(round_))[0]
        raise ConfigError(
            f"the base after round {round_} of {run_log.store.url} cannot be rebuilt: {error} Resume with --from-round "
            f"{newest}, the newest round before it with a snapshot."
        ) from None
