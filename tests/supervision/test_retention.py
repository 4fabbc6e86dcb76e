"""What may go goes, what somebody needs stays: old payloads, states, snapshots."""

from dataclasses import replace
from typing import Any

import pytest
from protocol_fleet import Fleet, answer, play, report

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import RetentionConfig
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, StoreFull
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Halt, Metric, Retention
from diloco_orchestrator.replica.training.tensor_tree import state_file
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild_files
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from diloco_orchestrator.supervision.retention import RetentionPlan, RetentionSweeper, plan
from diloco_orchestrator.supervision.retention import collect as collect_for_a_user
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)
NEEDED = RetentionConfig(payloads="needed")


def fleet_of(rounds: int = 7, **settings: Any) -> tuple[Fleet, list[Participant]]:
    """Rounds with a snapshot every second one, a state with every contribution; the base after round 4 scores best."""
    fleet = Fleet(
        replicas=2, rounds=50, snapshot_every=2, scored=True, **{"retention": NEEDED.model_dump(), **settings}
    )
    participants = fleet.join_all()
    for round_ in range(1, rounds + 1):
        scores = [report(share=i, score=0.5 - 0.01 * abs(round_ - 5)) for i in (0, 1)]
        play(participants, [1.0, 2.0], [type(s)(**{**vars(s), "state": state_file("state")}) for s in scores])
        for participant in participants:
            participant.write_snapshot_if_due()
    return fleet, participants


def planned(fleet: Fleet, retention: RetentionConfig, **more: Any) -> RetentionPlan:
    return plan(RunLog(fleet.store), retention, **more)


def collect(fleet: Fleet, retention: RetentionConfig) -> None:
    for info in planned(fleet, retention).objects:
        fleet.store.delete(info.key)


def rounds_left(fleet: Fleet, prefix: str, part: str) -> set[int]:
    found = (info.key.split("/") for info in fleet.store.list(prefix) if part in info.key)
    return {int(next(p for p in parts if len(p) == 8 and p.isdigit())) for parts in found}


def test_everything_is_kept_where_nothing_is_said():
    fleet, _ = fleet_of()
    assert planned(fleet, RetentionConfig()).objects == []


def test_payloads_go_once_two_snapshots_come_after_them():
    fleet, participants = fleet_of()
    collect(fleet, NEEDED)
    assert rounds_left(fleet, "rounds/", "/payload/") == {5, 6, 7}  # snapshots 4 and 6 are the newest two
    assert rounds_left(fleet, "replicas/0/", "/state/") == {2, 4, 5, 6, 7}  # with every snapshot that is kept
    assert len(fleet.commits()) == 7 and rounds_left(fleet, "rounds/", "/contributions/") == set(range(1, 8))
    done = verify_run(fleet.store)
    assert done.agrees and done.unchecked[0].startswith("the averages of 4 rounds (1 to 4)")
    assert fleet.join(0).digest == participants[0].digest  # a restarted replica needs nothing that went
    for round_ in (4, 5, 7):
        after = fleet.commits()[round_].base_digest if round_ < 7 else participants[0].digest
        assert rebuild_files(RunLog(fleet.store), round_)[0].digest == after


@pytest.mark.parametrize("forged", ["files that are not there", "no files", "another size"])
def test_a_snapshot_without_its_files_replaces_no_payload(forged):
    """Records of whoever may write: with the right bases, which the claims of all replicas confirm."""
    fleet, participants = fleet_of()
    for round_ in (4, 6):
        record = RunLog(fleet.store).snapshot(round_)
        if forged == "files that are not there":
            fleet.store.delete(keys.snapshot(round_, "model.safetensors"))
        elif forged == "another size":
            fleet.store.put(keys.snapshot(round_, "model.safetensors"), b"")
        else:
            for name in record.files:
                fleet.store.delete(keys.snapshot(round_, name))
            record = record.model_copy(update={"files": {}})
            fleet.store.put(keys.snapshot(round_, keys.SNAPSHOT_RECORD), record.to_bytes())
    collect(fleet, RetentionConfig(payloads="needed", snapshots=2))
    assert {3, 4, 5, 6, 7} <= rounds_left(fleet, "rounds/", "/payload/")  # snapshots 0 and 2 are the newest two
    for round_ in (4, 6):
        for key in [info.key for info in fleet.store.list(keys.snapshot(round_, ""))]:
            fleet.store.delete(key)
    assert rebuild_files(RunLog(fleet.store), 7)[0].digest == participants[0].digest


def test_a_round_that_cannot_be_rebuilt_any_more_is_told_with_the_nearest_snapshot():
    fleet, _ = fleet_of()
    collect(fleet, NEEDED)
    with pytest.raises(
        ConfigError, match=r"round 3 .* rounds/00000003/payload/0/1/0\.bin .*is gone.*0, 2, 4, 6; the nearest"
    ):
        rebuild_files(RunLog(fleet.store), 3)


def test_snapshots_that_are_pinned_stay():
    fleet, _ = fleet_of(rounds=11)
    made = planned(fleet, RetentionConfig(snapshots=2))
    assert made.kept_snapshots == {
        0: "the first base",
        4: "best held-out score",
        8: "among the newest",
        10: "among the newest",
    }
    collect(fleet, RetentionConfig(snapshots=2))
    assert set(RunReader(fleet.store).snapshots()) == made.kept_snapshots.keys()
    assert verify_run(fleet.store).agrees


def test_a_snapshot_goes_with_all_its_versions(tmp_path):
    fleet, _ = fleet_of(rounds=11, store=open_store(str(tmp_path)))
    folder = keys.snapshot(2, "")
    for key in [info.key for info in fleet.store.list(folder)]:
        fleet.store.put(keys.snapshot(2, key.removeprefix(folder), "r1"), fleet.store.get(key))
    collect(fleet, RetentionConfig(snapshots=2))
    assert rounds_left(fleet, "snapshots/", "/snapshot.json") == {0, 4, 8, 10}
    assert not [info.key for info in fleet.store.list("snapshots/") if "/00000002" in info.key]


def test_what_a_late_replica_owes_stays():
    clock = ManualClock()
    fleet = Fleet(replicas=3, rounds=50, quorum=2, snapshot_every=2)
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    for round_ in range(1, 9):
        clock.advance(2.0)
        for participant in (zero, one):
            answer(participant, 1.0)
        if round_ == 1:
            answer(two, 1.0)
        for participant in (zero, one):
            participant.close()
            participant.write_snapshot_if_due()
        if round_ == 1:
            two.close()
        if round_ == 2:
            answer(two, 1.0)  # late, and then its process dies
    collect(fleet, NEEDED)
    left = [info.key for info in fleet.store.list("rounds/") if "/payload/" in info.key and "/00000002/" in info.key]
    assert left == [keys.payload(2, 2, 1, 0)]
    assert [o.round for o in answer(fleet.join(2, clock=clock), 1.0).origins] == [2, 9]


@pytest.mark.slow
def test_a_replica_that_finds_payloads_collected_goes_on_from_a_newer_snapshot():
    clock = ManualClock()
    fleet = Fleet(replicas=3, rounds=50, quorum=2, snapshot_every=2)
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    for _ in range(7):
        clock.advance(2.0)
        for participant in (zero, one):
            answer(participant, 1.0)
        for participant in (zero, one):
            participant.close()
            participant.write_snapshot_if_due()
    collect(fleet, NEEDED)
    assert two.open.round == 1
    two.close()
    assert (two.open.round, two.digest) == (8, zero.digest)


@pytest.mark.slow
def test_payloads_deleted_by_hand_are_told():
    clock = ManualClock()
    fleet = Fleet(replicas=3, rounds=50, quorum=2, snapshot_every=100)
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    clock.advance(2.0)
    for participant in (zero, one):
        answer(participant, 1.0)
    for participant in (zero, one):
        participant.close()
    fleet.store.delete(keys.payload(1, 0, 1, 0))
    with pytest.raises(PayloadCorrupt, match="gone"):
        two.close()


@pytest.mark.parametrize("died_after", [0, 1, 3, 5, 8])
def test_a_collection_that_died_half_way_leaves_a_whole_run_and_is_finished_by_the_next(died_after):
    fleet, participants = fleet_of(rounds=9)
    both = RetentionConfig(payloads="needed", snapshots=2)
    whole = {info.key for info in planned(fleet, both).objects}
    for info in planned(fleet, both).objects[:died_after]:
        fleet.store.delete(info.key)
    assert verify_run(fleet.store).agrees
    assert fleet.join(1).digest == participants[0].digest
    collect(fleet, both)
    left = whole & {info.key for info in fleet.store.list("")}
    assert all(key.startswith("snapshots/") for key in left)  # files without a record: somebody may be at work on them
    fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason="lunch").to_bytes())
    play(participants, [1.0, 2.0])
    collect(fleet, both)
    assert not whole & {info.key for info in fleet.store.list("")}


def test_the_collector_keeps_the_number_of_objects_bounded_while_the_run_goes_on():
    fleet = Fleet(replicas=2, rounds=50, snapshot_every=2, retention={"payloads": "needed", "snapshots": 2})
    participants, collector = fleet.join_all(), RetentionSweeper(RunLog(fleet.store))
    payloads, snapshots = [], []
    for _ in range(20):
        play(participants, [1.0, 2.0])
        for participant in participants:
            participant.write_snapshot_if_due()
        for _ in range(3):
            collector.step()
        payloads.append(sum("/payload/" in info.key for info in fleet.store.list("rounds/")))
        snapshots.append(len(RunReader(fleet.store).snapshots()))
    assert max(payloads) <= 2 * 6 and max(snapshots) <= 4
    assert verify_run(fleet.store).agrees


def test_a_payload_on_its_way_to_be_owed_is_not_collected():
    """Its manifest comes last: without one, nobody knows yet what it is for."""
    fleet, _ = fleet_of(rounds=8)
    coming = keys.payload(2, 1, 9, 0)
    fleet.store.delete(keys.contribution(2, 1))
    fleet.store.put(coming, b"half an answer")
    assert coming not in {info.key for info in planned(fleet, NEEDED).objects}


def test_a_manifest_that_cannot_be_read_stops_no_collection():
    fleet, _ = fleet_of(rounds=8)
    fleet.store.put(keys.contribution(8, 1), b"{")
    assert planned(fleet, NEEDED).objects


def test_after_a_collapse_the_best_base_that_can_still_be_had_is_taken():
    fleet = Fleet(replicas=2, rounds=50, snapshot_every=2, guard={"rule": "heldout", "min_steps": 1}, scored=True)
    participants = fleet.join_all()
    for round_ in range(1, 12):
        value = 0.9 if round_ == 6 else 0.5  # the base after round 5 scores best: it has no snapshot
        scores = [report(share=i, score=value, in_loop=0.5) for i in (0, 1)]
        drift = {"kl_to_init": Metric(sum=0.5 if round_ > 9 else 0.0, count=1)}
        play(participants, [1.0, 2.0], [replace(each, metrics=drift) for each in scores])
        for participant in participants:
            participant.write_snapshot_if_due()
        if participants[0].open.stopped:
            break
    assert fleet.commits()[-1].stop == "halted"
    reader = RunReader(fleet.store)
    collect(fleet, NEEDED)
    for round_ in range(1, 8):  # as an earlier collection may have left it
        for info in list(fleet.store.list(keys.payloads(round_))):
            fleet.store.delete(info.key)
    begin = begin_next_leg(reader.log, rounds=2, from_round=None, by="test", why="", stamp=STAMP)
    assert begin.from_round in reader.snapshots() and begin.from_round != 5


class Quota(MemoryStore):
    """Takes no further object once `is_full`, until one is deleted."""

    is_full = False

    def create(self, key: str, data: bytes) -> bool:
        if self.is_full:
            raise StoreFull("cannot create it: the quota is used up")
        return super().create(key, data)

    def delete(self, key: str) -> None:
        super().delete(key)
        self.is_full = False


@pytest.mark.parametrize("full", [False, True])
def test_who_deletes_payloads_of_a_run_that_keeps_all_is_recorded_also_where_no_object_fits(full):
    store = Quota()
    fleet, _ = fleet_of(store=store, retention={})
    made = planned(fleet, NEEDED)
    store.is_full = full
    collect_for_a_user(RunLog(store), NEEDED, made, "somebody", STAMP)
    assert made.objects and not {info.key for info in made.objects} & {info.key for info in store.list("")}
    assert Retention.from_bytes(store.get(keys.RETENTION), keys.RETENTION).by == "somebody"
    assert verify_run(store).agrees


def test_a_store_that_is_full_and_has_nothing_to_delete_says_so():
    store = Quota()
    fleet, _ = fleet_of(rounds=2, store=store, retention={})
    store.is_full = True
    with pytest.raises(StoreFull):
        collect_for_a_user(RunLog(store), NEEDED, planned(fleet, NEEDED), "somebody", STAMP)
