"""Which snapshots are loaded: those of the base that the log claims."""

import json
import logging

import pytest
from protocol_fleet import BY_HAND, Fleet, answer, play

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.protocol.weights import norms_after
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots, claimed_base
from diloco_orchestrator.snapshots.layout import write_snapshot
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds.participant import Participant

STAMP = Stamp("token", lambda: 0.0)


def confirmed(fleet: Fleet, round_: int = 1) -> str | None:
    return ConfirmedSnapshots(RunLog(fleet.store)).take_of(round_)


def after_round_1(replicas: int = 2, **settings) -> tuple[Fleet, list[Participant]]:
    """Replica 0 has written snapshot 1; no commit has claimed its base yet."""
    fleet = Fleet(replicas=replicas, rounds=9, snapshot_every=1, **settings)
    participants = fleet.join_all()
    play(participants, [1.0] * replicas)
    assert not participants[0].write_snapshot_if_due()
    return fleet, participants


def snapshot_of_another_base(fleet: Fleet, participant: Participant, by: int = 0) -> str:
    """A complete snapshot 2 of a base that round 2 did not make, and that base's digest."""
    wrong = Base(participant.base.parameters, {n: m + 1 for n, m in participant.base.momenta.items()})
    model_files = participant._snapshots._files
    write_snapshot(fleet.store, 2, wrong, wrong.digest(), model_files, STAMP, by=by)
    return wrong.digest()


def test_the_first_base_needs_no_confirmation():
    fleet, _ = after_round_1()
    assert confirmed(fleet, 0) == "" and confirmed(fleet, 7) is None


def test_the_next_commit_confirms_and_manifests_alone_do_not():
    fleet, (zero, one) = after_round_1()
    for participant in (zero, one):
        assert confirmed(fleet) is None
        answer(participant, 1.0)
    assert confirmed(fleet) is None
    zero.close()
    assert confirmed(fleet) == "" and claimed_base(RunLog(fleet.store), 1) == fleet.commits()[1].base_digest


def test_a_commit_that_names_fewer_than_a_round_needs_confirms_nothing_and_the_next_one_does():
    fleet, (zero, one) = after_round_1(quorum="all")
    answer(zero, float("nan"))
    answer(one, 1.0)
    zero.close(), one.close()
    assert fleet.commits()[1].base_digest and not fleet.commits()[1].applied and confirmed(fleet) is None
    play([zero, one], [1.0, 1.0])
    assert confirmed(fleet) == ""


def test_a_commit_with_another_claim_than_its_manifests_is_void():
    """Somebody commits the round first: with everybody's manifests, and with a base of his own."""
    fleet, (zero, one) = after_round_1()
    for participant in (zero, one):
        answer(participant, 1.0)
    honest = next(iter(fleet.commits()))
    answers = []
    for each in honest.answers:
        data = fleet.store.get(keys.contribution(2, each.replica_id))
        manifest = Contribution.from_bytes(data, "")
        assert manifest.payload is not None
        named = {"manifest_sha256": sha256_hex(data), "origins": manifest.origins, "train_s": manifest.train_s}
        named |= {"norm": manifest.payload.norm, "payload": manifest.payload.digest}
        answers.append(each.model_copy(update=named))
    last = RunLog(fleet.store).commit(1)
    assert last is not None
    fields = {**STAMP(), "round": 2, "outer_step": 2, "answers": tuple(answers), "previous": last.sha256}
    fields["norms"] = norms_after(last.commit, fleet.config)
    forged = honest.model_copy(update={**fields, "base_digest": "b3:" + "0" * 64})
    assert fleet.store.create(keys.commit(2), forged.to_bytes())
    assert not zero.close().applied and claimed_base(RunLog(fleet.store), 1) is None
    entry = zero._attempt.log.commit(2)
    assert entry is not None and "claims another base than replica 0" in entry.void
    one.close()
    play([zero, one], [1.0, 1.0])
    assert claimed_base(RunLog(fleet.store), 1) == fleet.commits()[2].base_digest and confirmed(fleet) == ""


@pytest.mark.parametrize("change", [{"schema_version": 99}, {"round": "x"}, None])
def test_a_record_that_cannot_be_read_is_no_snapshot(change, caplog):
    fleet, participants = after_round_1()
    play(participants, [1.0, 1.0])
    key = keys.snapshot(1, keys.SNAPSHOT_RECORD)
    body = {} if change is None else {**json.loads(fleet.store.get(key)), **change}
    fleet.store.put(key, json.dumps(body).encode())
    with caplog.at_level(logging.WARNING):
        assert confirmed(fleet) is None and "a snapshot is not used" in caplog.text
    assert fleet.join(0).digest == participants[0].digest


def test_takes_of_nobody_are_not_looked_at():
    fleet, participants = after_round_1()
    play(participants, [1.0, 1.0])
    record = fleet.store.get(keys.snapshot(1, keys.SNAPSHOT_RECORD))
    for take in ("r1", "r2", "r99", "rebuilt"):
        fleet.store.put(keys.snapshot(1, keys.SNAPSHOT_RECORD, take), record)
    assert ConfirmedSnapshots(RunLog(fleet.store)).takes_of(1) == ["", "r1", "rebuilt"]


def test_a_refuted_snapshot_stays_and_the_next_take_is_loaded():
    fleet, participants = after_round_1()
    play(participants, [1.0, 1.0])
    wrong = snapshot_of_another_base(fleet, participants[0])
    participants[0].write_snapshot_if_due()
    play(participants, [1.0, 1.0])
    assert confirmed(fleet, 2) == "r0"
    log = RunLog(fleet.store)
    assert log.snapshot(2).base_digest == wrong != log.snapshot(2, "r0").base_digest
    again = fleet.join(0)
    assert (again.digest, again._tip.value.snapshot_round) == (participants[0].digest, 2)


def test_a_snapshot_that_everybody_contradicts_is_not_loaded():
    fleet, participants = after_round_1()
    play(participants, [1.0, 1.0])
    snapshot_of_another_base(fleet, participants[0], by=1)
    play(participants, [1.0, 1.0])
    assert confirmed(fleet, 2) is None
    again = fleet.join(1)
    assert (again.digest, again._tip.value.snapshot_round) == (participants[0].digest, 1)


def test_a_replica_alone_rebuilds_before_it_writes_and_heals_what_was_wrong():
    fleet = Fleet(replicas=1, rounds=9, snapshot_every=1)
    alone = fleet.join(0)
    play([alone], [1.0])
    assert not alone.write_snapshot_if_due()
    play([alone], [1.0])
    assert confirmed(fleet) == ""
    right = alone._claims.hash()
    alone.base.parameters["bias"].view(-1)[0] += 0.5
    assert alone._claims.hash() != right
    assert alone.write_snapshot_if_due() and alone.digest == right
    play([alone], [1.0])
    assert confirmed(fleet, 2) == "" and claimed_base(RunLog(fleet.store), 2) == right


@pytest.mark.parametrize("flipped", [True, False])
def test_who_goes_on_alone_rebuilds_before_it_confirms_the_snapshot_that_it_wrote(flipped: bool):
    """Two made the base, so that its writer counts on the other's claim; but the other is gone."""
    clock = ManualClock()
    fleet = Fleet(replicas=2, rounds=9, snapshot_every=1, quorum=1, timing=BY_HAND)
    alone, gone = (fleet.join(replica_id, clock=clock) for replica_id in (0, 1))
    answer(alone, 1.0), answer(gone, 1.0)
    alone.close(), gone.close()
    right = gone.digest
    if flipped:
        alone.base.parameters["bias"].view(-1)[0] += 0.5
    assert not alone.write_snapshot_if_due()
    answer(alone, 1.0)
    healed = alone.close().healed
    commit = fleet.commits()[1]
    assert (commit.base_digest, healed, commit.applied) == (right, flipped, not flipped)
    assert confirmed(fleet) == (None if flipped else "")


def test_who_rebuilt_its_base_for_a_snapshot_heals_a_bit_that_flips_after_it():
    clock = ManualClock()
    fleet = Fleet(replicas=2, rounds=9, snapshot_every=1, quorum=1, timing=BY_HAND)
    one, other = (fleet.join(replica_id, clock=clock) for replica_id in (0, 1))
    answer(one, 1.0)
    one.close(), other.close()
    assert not one.write_snapshot_if_due()  # nobody else has made this base
    one.base.parameters["bias"].view(-1)[0] += 0.5
    answer(one, 1.0), answer(other, 1.0)
    assert one.close().healed and fleet.commits()[1].base_digest == other.digest


@pytest.mark.parametrize("snapshot_every", [9, 1])
def test_a_replica_alone_ends_its_run_with_the_base_that_the_log_gives(snapshot_every: int):
    """Nobody claims the last base but the final evaluation. With 1 the bit flips after the base was rebuilt."""
    fleet = Fleet(replicas=1, rounds=1, snapshot_every=snapshot_every)
    alone = fleet.join(0)
    play([alone], [1.0])
    alone.write_snapshot_if_due()
    right = alone._claims.hash()
    alone.base.parameters["bias"].view(-1)[0] += 0.5
    play([alone], [1.0])
    assert not alone.open.stopped and alone.digest == right
    play([alone], [1.0])
    alone.finish_leg()
    assert alone.open.stopped and confirmed(fleet) == "" and claimed_base(RunLog(fleet.store), 1) == right


def test_an_attempt_that_begins_with_the_last_base_compares_its_first_rebuild_with_another():
    """A bit flips in the rebuild with which the only replica's second attempt begins."""
    fleet = Fleet(replicas=1, rounds=1, snapshot_every=9)
    first = fleet.join(0)
    play([first], [1.0])
    right = first._claims.hash()
    again = fleet.join(0, attempt=2)
    again.base.parameters["bias"].view(-1)[0] += 0.5
    play([again], [1.0])
    assert not again.open.stopped and again.digest == right
    play([again], [1.0])
    again.finish_leg()
    assert again.open.stopped and confirmed(fleet) == "" and claimed_base(RunLog(fleet.store), 1) == right


def test_a_base_that_only_one_claims_and_nobody_can_rebuild_any_more_ends_nothing(caplog):
    clock = ManualClock()
    fleet = Fleet(replicas=2, rounds=9, snapshot_every=1, quorum=1, timing=BY_HAND)
    alone, gone = (fleet.join(replica_id, clock=clock) for replica_id in (0, 1))
    answer(alone, 1.0), answer(gone, 1.0)
    alone.close(), gone.close()
    alone.write_snapshot_if_due()
    for info in list(fleet.store.list(keys.snapshot(0, ""))):
        fleet.store.delete(info.key)
    answer(alone, 1.0)
    alone.close()
    assert fleet.commits()[1].applied and "the base after round 1 cannot be rebuilt" in caplog.text


def test_the_base_that_a_halt_leaves_is_confirmed_by_the_leg_that_starts_from_it():
    fleet, participants = after_round_1()
    request_halt(RunLog(fleet.store), "test", "lunch", STAMP)
    play(participants, [1.0, 1.0])
    for participant in participants:
        participant.finish_leg()
    assert ConfirmedSnapshots(RunLog(fleet.store)).rounds == [0, 1, 2] and confirmed(fleet, 2) is None
    begin = begin_next_leg(RunLog(fleet.store), rounds=None, from_round=None, by="test", why="test", stamp=STAMP)
    assert begin.base_digest == participants[0].digest and confirmed(fleet, 2) == ""
    assert fleet.join(0)._tip.value.snapshot_round == 2


def test_manifests_after_a_legs_stop_are_no_claims_of_the_base_that_it_left():
    """The next leg starts from the first base, and its first round is open."""
    fleet = Fleet(replicas=2, rounds=1)
    participants = fleet.join_all()
    for _ in range(2):  # the last one closes the leg
        play(participants, [1.0, 1.0])
    begin_next_leg(RunLog(fleet.store), rounds=1, from_round=0, by="test", why="test", stamp=STAMP)
    for replica_id in (0, 1):
        answer(fleet.join(replica_id), 1.0)
    claims = {round_: ConfirmedSnapshots(RunLog(fleet.store)).claims_of(round_) for round_ in (0, 1)}
    assert {round_: [(each.round, each.replica_id) for each in found] for round_, found in claims.items()} == {
        0: [(1, 0), (1, 1), (3, 0), (3, 1)],
        1: [(2, 0), (2, 1)],
    }


def test_the_log_claims_no_base_by_a_commit_after_its_legs_stop():
    """The leg halts in a round without contributions, and the next one starts from the first base."""
    fleet = Fleet(replicas=2, rounds=9)
    participants = fleet.join_all()
    play(participants, [1.0, 1.0])
    request_halt(RunLog(fleet.store), "test", "lunch", STAMP)
    play(participants, [float("nan"), float("nan")])
    begin_next_leg(RunLog(fleet.store), rounds=1, from_round=0, by="test", why="test", stamp=STAMP)
    play([fleet.join(0), fleet.join(1)], [1.0, 1.0])
    log = RunLog(fleet.store)
    assert [commit.stop for commit in log.commits()] == ["none", "halted", "none"]
    assert claimed_base(log, 1) is None and claimed_base(log, 0) == fleet.start().base_digest


def test_a_leg_whose_own_snapshot_cannot_be_read_starts_from_an_older_one():
    fleet, participants = after_round_1()
    request_halt(RunLog(fleet.store), "test", "lunch", STAMP)
    play(participants, [1.0, 1.0])
    begin_next_leg(RunLog(fleet.store), rounds=None, from_round=None, by="test", why="test", stamp=STAMP)
    for info in list(fleet.store.list(keys.snapshot(2, ""))):
        fleet.store.put(info.key, b"junk")
    again = fleet.join(0)
    assert (again.digest, again._tip.value.snapshot_round) == (participants[0].digest, 1)
    assert again._tip.position == fleet.join(1)._tip.position and again.open.round == 3
