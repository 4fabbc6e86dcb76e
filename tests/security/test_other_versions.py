"""Records of other schema versions that somebody puts beside the log: they end neither a run nor a reader."""

import pytest
from forged_commits import STAMP
from protocol_fleet import Fleet, play

from diloco_orchestrator.errors import RecordTooNew, RecordTooOld
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys, kinds
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds.participant import Participant

JOB, OFFER = "dl-1-r2-a1", "0" * 64
PLACES = [
    *(keys.began(2, 5), keys.follows(2), keys.start_take("0" * 16), keys.KL_RECORD),
    *(keys.scale(1, 1), keys.out(1, 2), keys.result(1), keys.RETENTION),
    *(each(2, 1) for each in (keys.handle, keys.waiting, keys.heartbeat, keys.cancel, keys.exit_record)),
    *(keys.intent(2, 2), keys.claim(2, 2, "0" * 16), keys.join_offer(JOB)),
    *(keys.join_record(JOB, OFFER, n) for n in (keys.JOIN_TAKEN, keys.JOIN_LEASE, keys.JOIN_CANCEL, keys.JOIN_END)),
    *(keys.contribution(3, 2), keys.contribution(4, 2), keys.checked(3, 2, 0)),
    *(keys.reduced(3, 0), keys.want(3, 0, 1, 1, 2)),
    *(keys.snapshot(round_, keys.SNAPSHOT_RECORD, take) for round_, take in ((4, ""), (4, "r2"), (3, "r2"))),
]  # fmt: skip
CASES = [
    pytest.param(PLACES, 99, id="all of a later version"),
    pytest.param(PLACES, 1, id="all of an earlier version"),
    *(pytest.param([key], 99, id=key, marks=pytest.mark.slow) for key in PLACES),
]


def of_version(key: str, version: int) -> bytes:
    """A record of the kind that belongs under a key, of another schema version."""
    kind = kinds.kind_at(key)
    assert kind is not None, key
    return b'{"record":"%s","schema_version":%d}\n' % (kind.record.record.encode(), version)


def go_on(participants: list[Participant], rounds: int) -> None:
    for _ in range(rounds):
        play(participants, [1.0, 0.5, 0.2][: len(participants)])
        for participant in participants:
            participant.write_snapshot_if_due()


@pytest.mark.parametrize(("places", "version"), CASES)
def test_records_of_another_version_beside_the_log_end_nobody(tmp_path, places, version):
    fleet = Fleet(replicas=3, rounds=6, quorum=2, snapshot_every=2)
    participants = fleet.join_all()
    go_on(participants, 2)
    for key in places:
        fleet.engine.put(key, of_version(key, version))
    go_on(participants[:2], 1)
    restarted = fleet.join(1)
    assert restarted.digest == participants[0].digest
    go_on([participants[0], restarted], 1)
    assert [commit.applied for commit in fleet.commits()] == [True] * 4
    reader = RunReader(fleet.store)
    status = reader.status()
    assert (status.state, status.round) == ("running", 4) and len(reader.all_attempts()) in (4, 5)
    assert [copy_model(RunLog(fleet.store), tmp_path / str(r), r) for r in (0, 2, 3, 4)] == [0, 2, 3, 4]
    verify_run(fleet.store)
    log = RunLog(fleet.store)
    request_halt(log, "test", "lunch", STAMP)
    go_on([participants[0], restarted], 1)
    EndOfLeg(log, log.newest_begin(), STAMP).finalize()
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    assert fleet.join(0).digest == participants[0].digest
    verify_run(fleet.store)


@pytest.mark.parametrize("key", [keys.result(1), keys.KL_RECORD, keys.snapshot(3, keys.SNAPSHOT_RECORD, "r2")])
def test_verify_names_such_a_record(key):
    """A snapshot of a round after which none is written is passed over: anybody may have put it there."""
    fleet = Fleet(replicas=2, rounds=4, snapshot_every=2)
    participants = fleet.join_all()
    go_on(participants, 5)
    fleet.engine.put(key, of_version(key, 99))
    done = verify_run(fleet.store)
    if key.startswith(keys.SNAPSHOTS):
        assert done.disagreement is None and any(key in each and "version 99" in each for each in done.notes)
    else:
        assert done.disagreement is not None and done.disagreement.key == key
        assert "has schema version 99" in done.disagreement.words


@pytest.mark.parametrize(("version", "error"), [(99, RecordTooNew), (1, RecordTooOld)])
@pytest.mark.parametrize("key", [keys.RUN, keys.begin(1), keys.commit(2)])
def test_a_run_of_another_version_is_refused_with_what_to_install(key, version, error):
    fleet = Fleet(replicas=2, rounds=4)
    go_on(fleet.join_all(), 2)
    fleet.engine.put(key, of_version(key, version))
    with pytest.raises(error):
        verify_run(fleet.store)
