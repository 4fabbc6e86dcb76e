"""Which snapshots are loaded: those that somebody besides their writer claims or has rebuilt."""

from protocol_fleet import Fleet, answer, play

from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution, Stamp
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.layout import write_snapshot
from diloco_orchestrator.snapshots.rebuild import record_replay
from replica.rounds.participant import Participant

STAMP = Stamp("token", lambda: 0.0)


def confirmed(fleet: Fleet, round_: int = 1) -> int | None:
    return ConfirmedSnapshots(RunLog(fleet.store)).take_of(round_)


def after_round_1(replicas: int = 2) -> tuple[Fleet, list[Participant]]:
    """Replica 0 has written snapshot 1; nobody has claimed its base yet."""
    fleet = Fleet(replicas=replicas, rounds=9, snapshot_every=1)
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
    assert confirmed(fleet, 0) == 1 and confirmed(fleet, 7) is None


def test_the_claim_of_another_replica_confirms_and_the_writers_own_does_not():
    fleet, (zero, one) = after_round_1()
    assert confirmed(fleet) is None
    answer(zero, 1.0)
    assert confirmed(fleet) is None
    answer(one, 1.0)
    assert confirmed(fleet) == 1


def test_who_loaded_the_snapshot_itself_does_not_confirm_it():
    fleet, (_, one) = after_round_1()
    said = answer(one, 1.0)
    fleet.store.put(keys.contribution(2, 1), said.model_copy(update={"snapshot_round": 1}).to_bytes())
    assert confirmed(fleet) is None


def test_a_replay_confirms_the_base_that_it_gave():
    fleet, (zero, _) = after_round_1()
    record_replay(RunLog(fleet.store), 1, "b3:" + "0" * 64, 0, "test", STAMP)
    assert confirmed(fleet) is None
    record_replay(RunLog(fleet.store), 1, zero.digest, 0, "test", STAMP)
    assert confirmed(fleet) == 1


def test_an_announcement_confirms_nothing():
    """A replica that comes back claims no base, though it creates a manifest."""
    fleet, (_, one) = after_round_1()
    said = answer(one, 1.0)
    fleet.store.put(
        keys.contribution(2, 1), said.model_copy(update={"kind": "abstention", "base_digest": ""}).to_bytes()
    )
    assert confirmed(fleet) is None


def test_nothing_that_is_said_after_a_legs_stop_confirms_its_last_base():
    """A manifest in the round after it is of a round that was never open."""
    fleet = Fleet(replicas=2, rounds=1, snapshot_every=1)
    participants = fleet.join_all()
    play(participants, [1.0, 1.0])
    assert not participants[0].write_snapshot_if_due()
    play(participants, [0.0, 0.0])
    assert participants[0].stopped and confirmed(fleet) == 1
    said = Contribution.from_bytes(fleet.store.get(keys.contribution(2, 1)), "")
    fleet.store.delete(keys.contribution(2, 1))
    fleet.store.put(keys.contribution(3, 1), said.model_copy(update={"round": 3}).to_bytes())
    assert confirmed(fleet) is None


def test_a_refuted_snapshot_stays_and_the_next_take_is_loaded():
    fleet, participants = after_round_1()
    play(participants, [1.0, 1.0])
    wrong = snapshot_of_another_base(fleet, participants[0])
    participants[0].write_snapshot_if_due()
    play(participants, [1.0, 1.0])
    assert confirmed(fleet, 2) == 2
    log = RunLog(fleet.store)
    assert log.snapshot(2, 1).base_digest == wrong != log.snapshot(2, 2).base_digest
    again = fleet.join(0)
    assert (again.digest, again.model.tip.snapshot_round) == (participants[0].digest, 2)


def test_a_snapshot_that_everybody_contradicts_is_not_loaded():
    fleet, participants = after_round_1()
    play(participants, [1.0, 1.0])
    snapshot_of_another_base(fleet, participants[0], by=1)
    play(participants, [1.0, 1.0])
    assert confirmed(fleet, 2) is None
    again = fleet.join(1)
    assert (again.digest, again.model.tip.snapshot_round) == (participants[0].digest, 1)


def test_a_replica_alone_replays_before_it_writes_and_heals_what_was_wrong():
    fleet = Fleet(replicas=1, rounds=9, snapshot_every=1)
    alone = fleet.join(0)
    play([alone], [1.0])
    assert not alone.write_snapshot_if_due() and confirmed(fleet) == 1
    play([alone], [1.0])
    right = alone.model.hash()
    alone.base.parameters["bias"].view(-1)[0] += 0.5
    assert alone.model.hash() != right
    assert alone.write_snapshot_if_due() and alone.digest == right and confirmed(fleet, 2) == 1
