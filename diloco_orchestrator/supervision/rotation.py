"""Replaces the keys of a signed run from its next leg (start or resume to stop) on, and certifies further operators.

`protocol.key_records` has the records. Both need the run's own key, which its launcher's state folder holds.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

from diloco_orchestrator.errors import ConfigError, ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol.key_records import Colleague, Rotation
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.protocol.rounds import MAX_EMPTY_ROUNDS
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import (
    PublicIdentity,
    follow_rotation,
    key_of_run,
    may_commit,
    public_key_of,
    rotations_of,
    text_of,
)
from diloco_orchestrator.run_log.writer import Writer

log = logging.getLogger(__name__)


def check_failure(run_log: RunLog, begin: Begin) -> None:
    """Check all verdicts of a leg (start or resume to stop) that has failed, before another leg begins after it.

    Void commits of several authors may have made it fail, and by unchecked verdicts at another round. Also of a leg
    whose halt asks for new keys: who wrote void commits may be among those whose commits look right without that. Only
    in a signed run with rules about void commits. `begin`: of the newest leg.
    """
    run_log.result(begin.leg)  # replicas, which check every verdict, may have written another one
    last = run_log.newest(begin) if run_log.run.signed_rules is not None else None
    if last is None or last.commit.leg != begin.leg:
        return
    halt = run_log.halt(begin.leg)
    if last.commit.stop == "failed" or (halt is not None and halt.new_keys):
        run_log.doubt()


def void_authors(run_log: RunLog, begin: Begin) -> set[int]:
    """Ids of the replicas whose void commits in a leg (start or resume to stop) cost them the right to commit.

    Those that wrote three or more, and, if the leg failed because three rounds in a row named nobody, those that wrote
    one of these. Empty for a run without that rule. `begin`: the leg's.
    """
    if run_log.run.signed_rules is None or run_log.start() is None:
        return set()
    found = _void_authors(each for each in run_log.after(run_log.leg_position(begin)) if each.commit.leg == begin.leg)
    return found and found & _void_authors(_derived(run_log, begin))  # which costs a GET for each manifest


def _void_authors(commits: Iterable[CommitEntry]) -> set[int]:
    """Ids of the replicas of which `void_authors` speaks, by `commits`, those of the leg."""
    rounds = list(commits)
    found = _most_void([each.written.by.who[0] for each in rounds if each.void and each.written.by.who])
    if rounds and rounds[-1].commit.stop == "failed" and not rounds[-1].commit.by_coordinator:
        last = [each.written.by.who for each in rounds[-MAX_EMPTY_ROUNDS:] if each.void]
        found |= {who[0] for who in last if who is not None}
    return found


def _derived(run_log: RunLog, begin: Begin) -> Iterator[CommitEntry]:
    """The commits of a leg as replicas read them, up to the first one whose manifests are not there any more.

    What follows is no evidence against its author: who may delete could remove what shows that a commit of its own is
    void, after honest replicas have read it.
    """
    try:
        for each in run_log.after(run_log.leg_position(begin), derive_verdicts=True):
            if each.commit.leg != begin.leg:
                return
            yield each
    except (ObjectMissing, RecordInvalid) as error:
        log.warning("void commits of leg %d after what is missing count for nobody: %s", begin.leg, error)


def _most_void(authors: Iterable[int]) -> set[int]:
    """Those of `authors`, one for each void commit, that wrote as many as would make a leg fail in a row."""
    return {each for each, times in Counter(authors).items() if times >= MAX_EMPTY_ROUNDS}


def newly_barred(run_log: RunLog, begin: Begin) -> set[int]:
    """Those of `void_authors` that may still commit; empty where nobody would be left who may.

    `begin`: of the newest leg (start or resume to stop).
    """
    found = {each for each in void_authors(run_log, begin) if may_commit(run_log.store, each)}
    launched = run_log.configs.of(begin.leg).launched
    return found if any(may_commit(run_log.store, each) for each in launched - found) else set()


def due(run_log: RunLog, begin: Begin) -> set[int]:
    """Ids of the replicas that new keys, which this process can make, would keep from committing. Empty: none are due.

    `begin`: of the newest leg (start or resume to stop).
    """
    found = newly_barred(run_log, begin)
    try:
        if found:
            key_of_run(run_log.run, run_log.store, "keeping the authors of void commits from committing")
    except ConfigError as error:
        log.warning("replicas %s wrote void commits, and may go on to: %s", sorted(found), error)
        return set()
    return found


def halt_for_void_commits(run_log: RunLog, begin: Begin, by: str, stamp: Stamp) -> bool:
    """Request a halt for new keys once a replica has written three void commits in a leg (start or resume to stop).

    Returns whether one has, so that nobody need ask again in the leg; costs no request before. `begin`: the leg's.
    """
    authors = [replica_id for round_, replica_id in run_log.void_authors.items() if round_ > begin.after_round]
    if run_log.run.signed_rules is None or not _most_void(authors):
        return False
    if found := due(run_log, begin):
        why = f"replicas {sorted(found)} wrote {MAX_EMPTY_ROUNDS} void commits or more in leg {begin.leg}"
        with suppress(ConfigError):  # the leg has ended meanwhile
            request_halt(run_log, by, why, stamp, new_keys=True)
    return True


def rotate(run_log: RunLog, by: str, why: str, stamp: Stamp) -> Rotation | None:
    """Replace the keys of a signed run: at once if it has stopped, else after its open round.

    Returns the record of the new keys; None if the run has not stopped: then a request to halt is written, after which
    the process that supervises the run replaces the keys and begins the next leg (start or resume to stop). Raises
    `ConfigError` without the run's own key.
    """
    key_of_run(run_log.run, run_log.store, "a rotation of its keys")
    leg = run_log.newest_begin().record.leg
    if run_log.result(leg) is None:
        request_halt(run_log, by, why, stamp, new_keys=True)
        return None
    return begin_epoch(run_log, by, why, stamp)


def is_asked_for(run_log: RunLog, leg: int) -> bool:
    """Whether the request that halted a leg (start or resume to stop) asks for new keys that the run lacks so far."""
    halt = run_log.halt(leg)
    replaced = any(rotation.from_leg > leg for rotation in rotations_of(run_log.store))
    return halt is not None and halt.new_keys is True and not replaced


def barred_after(run_log: RunLog, leg: int) -> set[int]:
    """Ids of the replicas that the rotation of keys after a leg (start or resume to stop) keeps from committing."""
    found = [each.no_commits_by or () for each in rotations_of(run_log.store) if each.from_leg == leg + 1]
    return {replica_id for each in found for replica_id in each}


def begin_epoch(run_log: RunLog, by: str, why: str, stamp: Stamp) -> Rotation:
    """Write the record that makes new keys valid for the next leg (start or resume to stop), its rounds and attempts.

    The run has stopped. Raises `ConfigError` without the run's own key.
    """
    key = key_of_run(run_log.run, run_log.store, "a rotation of its keys")
    begin = run_log.newest_begin().record
    check_failure(run_log, begin)
    barred = newly_barred(run_log, begin)
    commits, position = run_log.commits(), run_log.position()
    epoch = len(rotations_of(run_log.store)) + 2
    record = Rotation(
        **stamp(),
        epoch=epoch,
        names=public_key_of(key.names(epoch)),
        from_leg=begin.leg + 1,
        after_round=commits[-1].round if commits else 0,
        commit_sha256=position.sha256 if commits and position else None,
        attempts={str(id_): numbers[-1] for id_, numbers in AttemptRecords(run_log.store).all_numbers().items()},
        no_commits_by=tuple(sorted(barred)) or None,
        by=by,
        why=why,
    )
    Writer(run_log.store, Role.LAUNCHER).create(record)  # of two at once either is as good
    follow_rotation(run_log.store)
    log.warning("the run has new keys from leg %d on: %s", record.from_leg, why)
    return record


def certify(run_log: RunLog, identity: str, by: str, stamp: Stamp) -> Colleague:
    """Let the user with this public identity launch, supervise, halt and scale the run with a key of their own.

    The certificate is valid until the next rotation (replacement) of the run's keys. Raises `ConfigError` for a text
    that is no identity, and without the run's own key.
    """
    user, store = PublicIdentity.parse(identity.strip()), run_log.store
    key = key_of_run(run_log.run, store, "certifying somebody")
    epoch = len(rotations_of(store)) + 1
    names = " ".join(text_of(key.names(each)) for each in range(1, epoch + 1))
    record = Colleague(
        **stamp(),
        identity=user.digest,
        epoch=epoch,
        operator=key.certified(run_log.run_sha256, epoch, user.key),
        sealed=user.seal(run_log.run_sha256, names.encode()),
        by=by,
    )
    Writer(store, Role.LAUNCHER).create(record)
    return record
