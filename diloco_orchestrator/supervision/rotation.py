"""Replaces the keys of a signed run from its next leg (start or resume to stop) on, and certifies further operators.

`protocol.key_records` has the records. Both need the run's own key, which its launcher's state folder holds.
"""

import logging

from diloco_orchestrator.protocol.key_records import Colleague, Rotation
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import (
    PublicIdentity,
    follow_rotation,
    key_of_run,
    public_key_of,
    rotations_of,
    text_of,
)
from diloco_orchestrator.run_log.writer import Writer

log = logging.getLogger(__name__)


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


def begin_epoch(run_log: RunLog, by: str, why: str, stamp: Stamp) -> Rotation:
    """Write the record that makes new keys valid for the next leg (start or resume to stop), its rounds and attempts.

    The run has stopped. Raises `ConfigError` without the run's own key.
    """
    key = key_of_run(run_log.run, run_log.store, "a rotation of its keys")
    position, commits = run_log.position(), run_log.commits()
    epoch = len(rotations_of(run_log.store)) + 2
    record = Rotation(
        **stamp(),
        epoch=epoch,
        names=public_key_of(key.names(epoch)),
        from_leg=run_log.newest_begin().record.leg + 1,
        after_round=commits[-1].round if commits else 0,
        commit_sha256=position.sha256 if commits and position else None,
        attempts={str(id_): numbers[-1] for id_, numbers in AttemptRecords(run_log.store).all_numbers().items()},
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
