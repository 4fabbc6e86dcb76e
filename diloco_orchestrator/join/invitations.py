"""Invitations: strangers' rights to run one replica of a signed run, for as long as its launcher gives them keys.

An invitation names an identity whose private half is in a link (`join.link`). Whoever launches an attempt of that
replica seals the attempt's keys to it. `protocol.attempt_records` has the record.
"""

import os
from collections.abc import Collection
from contextlib import suppress

from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.executors.contract import ReplicaState
from diloco_orchestrator.join.offers import name_of, offers_in, records_about
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Invitation, JoinEnd, Offer, Taken
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import Identity, PublicIdentity, operator_of_run, rotations_of
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store

_SEED_BYTES = 32
ANEW = "it is offered anew, for an invitation"
REVOKED = "its invitation was revoked"


def invitations_to(store: Store, replica_id: int) -> list[Invitation]:
    """The valid invitations to run a replica: not revoked, and from after the last rotation (replacement) of the run's
    keys.

    In key order, also those whose time is over. Records that cannot be read are passed over. Two LIST requests and a
    GET for each invitation and revocation.
    """
    epoch, revoked = len(rotations_of(store)) + 1, revoked_of(store, replica_id)
    return [
        each
        for each in _records(store, keys.INVITATIONS, keys.invitation, replica_id)
        if each.epoch == epoch and each.identity not in revoked
    ]


def revoked_of(store: Store, replica_id: int) -> set[str]:
    """The identities (digests) whose invitation to run a replica was revoked. A LIST request and a GET for each."""
    return {each.identity for each in _records(store, keys.REVOCATIONS, keys.revocation, replica_id)}


def _records(store: Store, prefix: str, form: keys.Form, replica_id: int) -> list[Invitation]:
    """The invitations or revocations about a replica that can be read, in key order."""
    found = []
    for key in [info.key for info in store.list(prefix)]:
        parts = form.parse(key)
        if parts is None or parts[1] != replica_id:
            continue
        with suppress(RecordInvalid, ConfigError):
            entry = read(store, Invitation, key)
            if entry is not None and PublicIdentity.parse(entry.record.public).digest == parts[2]:
                found.append(entry.record)
    return found


def check_may_invite(run_log: RunLog, replica_id: int) -> None:
    """Raise `ConfigError` without keys of an operator, for an unsigned run, and for a replica that is not invited."""
    run = run_log.run
    if operator_of_run(run, run_log.store, "an invitation") is None:
        raise ConfigError(
            f"{run_log.store.url} is not signed, so that whoever may write there is everybody: nobody can be invited. "
            "Launch a run with invited=[…] (--invited), which is signed."
        )
    if replica_id not in run.config.invited:
        among = f"its invited replicas are {run.config.invited}" if run.config.invited else "it has no such replica"
        raise ConfigError(
            f"replica {replica_id} of {run_log.store.url} is not for strangers; {among}. They are named when the run "
            "is launched: invited=[…] (--invited 4,5)."
        )


def create_invitation(run_log: RunLog, replica_id: int, lasts_s: float, stamp: Stamp) -> tuple[Identity, Invitation]:
    """Create an invitation to run a replica for `lasts_s` seconds; returns its new identity and its record.

    An attempt that waits for a machine is offered anew, so that its keys are sealed to the identity, too. Raises
    `ConfigError` as `check_may_invite` does.
    """
    check_may_invite(run_log, replica_id)
    user = Identity(os.urandom(_SEED_BYTES))
    fields = stamp()
    record = Invitation(
        **fields,
        epoch=len(rotations_of(run_log.store)) + 1,
        replica_id=replica_id,
        identity=user.public.digest,
        public=user.public.text(),
        not_after=fields["at"] + lasts_s,
    )
    Writer(run_log.store, Role.LAUNCHER).create(record, keys.invitation(record.epoch, replica_id, record.identity))
    end_offers(run_log.store, replica_id, ANEW, stamp)
    return user, record


def revoke(run_log: RunLog, replica_id: int, stamp: Stamp) -> int:
    """Revoke every invitation to run a replica, and end the attempt that runs; returns the number of invitations.

    Once the replica's next attempt is announced, signatures by the ended one's keys are not valid any more. A call that
    was interrupted is completed by the next one. Raises `ConfigError` without keys of an operator (launcher or
    coordinator).
    """
    operator_of_run(run_log.run, run_log.store, "a revocation")
    found = invitations_to(run_log.store, replica_id)
    for each in found:
        Writer(run_log.store, Role.LAUNCHER).create(each, keys.revocation(each.epoch, replica_id, each.identity))
    end_revoked(run_log.store, replica_id, stamp)
    return len(found)


def end_revoked(store: Store, replica_id: int, stamp: Stamp) -> None:
    """Record the end of a replica's attempts whose keys were sealed to somebody whose invitation was revoked."""
    if revoked := revoked_of(store, replica_id):
        end_offers(store, replica_id, REVOKED, stamp, sealed_to=revoked)


def end_offers(
    store: Store, replica_id: int, why: str, stamp: Stamp, *, sealed_to: Collection[str] | None = None
) -> None:
    """Record the end of a replica's attempts that wait for a machine; or of those, also with a machine, whose keys are
    sealed to one of the identities `sealed_to`.

    Whoever supervises the run launches the next attempt then.
    """
    listed, writer = offers_in(store.list(keys.JOINS)), Writer(store, Role.COORDINATOR)
    for name in sorted(listed):
        entry = read(store, Offer, keys.join_offer(name))
        if entry is None or entry.record.replica_id != replica_id or name_of(entry.record) != name:
            continue
        if sealed_to is not None and not set(sealed_to).intersection(entry.record.sealed or {}):
            continue
        records = records_about(listed, name, entry.sha256)
        if keys.JOIN_END in records:
            continue
        if keys.JOIN_TAKEN not in records:
            withdrawn = writer.create(Taken(**stamp(), by=""), keys.join_record(name, entry.sha256, keys.JOIN_TAKEN))
            if withdrawn is None and sealed_to is None:
                continue  # a machine has just taken it
        elif sealed_to is None:
            continue
        end = JoinEnd(**stamp(), state=ReplicaState.PREEMPTED, reason="lost", message=why)
        writer.create(end, keys.join_record(name, entry.sha256, keys.JOIN_END))
