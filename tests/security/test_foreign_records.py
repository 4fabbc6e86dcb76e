"""Attacks by what nobody of the run wrote: legs that never began, requests and heartbeats that are no records.

They are passed over, or, where that is safer, taken for what their key says; they end neither a run nor a reader.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from forged_commits import STAMP, after_two_rounds
from guarded_legs import halt
from protocol_fleet import Fleet, answer, play, report
from scripted import Scene

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys, kinds
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.records import Begin, Halt, Metric, Result
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from executors.contract import ReplicaState

JUNK = {
    "nothing": b"",
    "deep JSON": b"[" * 100_000,
    "no record": b"{}",
    "not Unicode": b"\xff\xfe",
    "of a later version": b'{"record":"halt","schema_version":99}\n',
}


def at(key: str, data: bytes) -> tuple[str, bytes]:
    """A key with junk that says, where it says any, the kind of record that belongs there."""
    kind = kinds.kind_at(key)
    assert kind is not None
    return key, data.replace(b'"record":"halt"', b'"record":"%s"' % kind.record.record.encode())


def resume(fleet: Fleet) -> Begin:
    return begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)


def begin_like(fleet: Fleet, leg: int, **fields: object) -> bytes:
    """The record of leg 1, as that of another leg."""
    first = RunLog(fleet.store).newest_begin().record
    return first.model_copy(update={"leg": leg, **fields}).to_bytes()


def following(fleet: Fleet, round_: int) -> bytes:
    """A begin of leg 2 that names a commit of the run that goes on, as a true one would name the last."""
    previous = sha256_hex(fleet.store.get(keys.commit(round_)))
    fields = {"after_round": round_, "from_round": round_, "from_outer_step": round_, "previous": previous}
    return begin_like(fleet, 2, **fields)


FOREIGN_BEGINS: dict[str, Callable[[Fleet], tuple[str, bytes]]] = {
    "leg 999": lambda fleet: (keys.begin(999), begin_like(fleet, 999)),
    "leg 999, junk": lambda fleet: (keys.begin(999), b"{}"),
    "a copy of leg 1": lambda fleet: (keys.begin(2), fleet.store.get(keys.begin(1))),
    "follows nothing": lambda fleet: (keys.begin(2), begin_like(fleet, 2)),
    "follows the newest commit": lambda fleet: (keys.begin(2), following(fleet, 2)),
    "follows an earlier commit": lambda fleet: (keys.begin(2), following(fleet, 1)),
    **{f"leg 2, {name}": lambda fleet, data=data: at(keys.begin(2), data) for name, data in JUNK.items()},  # type: ignore[misc]
    "a result of leg 999": lambda fleet: (
        keys.result(999),
        Result(**STAMP(), leg=999, status="completed", round=2, outer_steps=2, reason="done").to_bytes(),
    ),
    "a halt of leg 999": lambda fleet: (
        keys.halt(999),
        Halt(**STAMP(), leg=999, by="somebody", reason="lunch").to_bytes(),
    ),
}


@pytest.mark.parametrize("made", FOREIGN_BEGINS.values(), ids=FOREIGN_BEGINS)
def test_records_of_a_leg_that_did_not_begin_are_passed_over_and_named(made):
    fleet, participants = after_two_rounds()
    key, data = made(fleet)
    assert fleet.engine.create(key, data)
    restarted = fleet.join(1)
    play([participants[0], restarted], [1.0, 0.5])
    log = RunLog(fleet.store)
    assert log.newest_begin().record.leg == 1 and not EndOfLeg(log, log.newest_begin(), STAMP).reached()
    status = RunReader(fleet.store).status()
    assert (status.state, status.leg, status.round, status.outer_steps) == ("running", 1, 3, 20)
    assert [said.partition(": ")[0] for said in status.unreadable] == [key]
    done = verify_run(fleet.store)
    assert done.agrees and done.foreign == [key]
    request_halt(RunLog(fleet.store), "test", "the run can still be halted", STAMP)
    play([participants[0], restarted], [1.0, 0.5])
    ended = RunLog(fleet.store).result(1)
    assert ended is None  # only because no coordinator has noted the end
    assert RunReader(fleet.store).status().state == "halted"


def test_a_leg_whose_begin_somebody_took_can_not_begin_and_who_resumes_is_told_why():
    fleet, participants = after_two_rounds()
    fleet.engine.create(keys.begin(2), following(fleet, 2))
    halt(fleet)
    play(participants, [1.0, 0.5])
    with pytest.raises(ConfigError, match=r"legs/2/begin.json .*Delete it"):
        resume(fleet)
    fleet.engine.delete(keys.begin(2))
    assert resume(fleet).leg == 2
    assert RunReader(fleet.store).status().unreadable == []


def test_a_leg_that_begins_after_a_void_commit_is_none_of_those():
    """Three junk commits end a leg although none of them says so; the next one counts."""
    fleet, participants = after_two_rounds()
    for round_ in (3, 4, 5):
        fleet.engine.create(keys.commit(round_), b"junk")
        for participant in participants:
            answer(participant, 1.0)
        for participant in participants:
            participant.close()
    assert participants[0].open.stopped
    log = RunLog(fleet.store)
    end = EndOfLeg(log, log.newest_begin(), STAMP)
    assert end.reached()
    end.finalize()
    begin = resume(fleet)
    assert begin.after_round == 5
    assert RunLog(fleet.store).newest_begin().record == begin
    play([fleet.join(0), fleet.join(1)], [1.0, 0.5])
    assert RunReader(fleet.store).status().leg == 2


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_drift_that_one_replica_alone_reports_halts_no_run(replicas: int):
    fleet = Fleet(replicas=replicas, rounds=20, scored=True, guard={"min_steps": 1})
    participants = fleet.join_all()
    for _ in range(3):
        said = [report(share, 0.5, 0.5) for share in range(replicas)]
        said[-1] = replace(said[-1], metrics={"kl_to_init": Metric(sum=10.0, count=1)})
        play(participants, [1.0] * replicas, said)
    assert not any(participant.open.stopped for participant in participants)
    assert [commit.fired for commit in fleet.commits()] == [False] * 3 and verify_run(fleet.store).agrees


# -- requests to halt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", JUNK.values(), ids=JUNK)
def test_a_request_to_halt_that_cannot_be_read_is_a_request(data: bytes):
    """Whoever may write it may ask for a halt. If junk were none, it would keep everybody from asking for one."""
    fleet, participants = after_two_rounds()
    fleet.engine.create(keys.halt(1), data)
    assert [said.partition(": ")[0] for said in RunReader(fleet.store).status().unreadable] == [keys.halt(1)]
    play(participants, [1.0, 0.5])
    assert [participant.open.stopped for participant in participants] == [True, True]
    last = fleet.commits()[-1]
    assert last.stop == "halted" and "legs/1/halt.json" in last.reason and "cannot be read" in last.reason
    log = RunLog(fleet.store)
    EndOfLeg(log, log.newest_begin(), STAMP).finalize()
    done = verify_run(fleet.store)
    assert done.agrees and [said.partition(": ")[0] for said in done.unreadable] == [keys.halt(1)]
    assert resume(fleet).leg == 2


def test_a_request_to_halt_that_cannot_be_read_stops_a_leg_in_which_no_replica_is_left():
    """Then the coordinator reads it; replicas cannot."""
    scene = Scene(retry={"max_errors": 0, "backoff_s": 0.0})
    scene.engine.create(keys.halt(1), b"[" * 100_000)
    coordinator = scene.coordinator()
    coordinator.step()
    for replica_id in (0, 1):
        scene.ends(replica_id, 1, ReplicaState.FAILED)
    assert scene.steps(coordinator, 10)
    ended = coordinator.reader.log.result(1)
    assert ended is not None and ended.status == "halted" and "legs/1/halt.json cannot be read" in ended.reason


# -- attempts ---------------------------------------------------------------------------------------------------------

OF_ATTEMPTS = [
    *(key(1, 1) for key in (keys.heartbeat, keys.exit_record, keys.handle, keys.cancel, keys.intent)),
    "its claim",
]


@pytest.mark.parametrize("key", OF_ATTEMPTS)
def test_junk_under_the_keys_of_one_attempt_ends_neither_status_nor_verify(key: str):
    fleet, _ = after_two_rounds()
    key = fleet.claim_key(1) if key == "its claim" else key
    for_authors = (fleet.claim_key(1), keys.intent(1, 1))  # manifests name the claim's digest, and the intent its key
    for replica_id in (0, 1):
        who = {**STAMP(), "replica_id": replica_id, "attempt": 1}
        fleet.store.put(
            keys.heartbeat(replica_id, 1),
            Heartbeat(**who, counter=1, phase="training", round=1, inner_step=1).to_bytes(),
        )
    fleet.store.put(key, b"[" * 100_000)
    reader = RunReader(fleet.store)
    status = reader.status()
    reader.all_attempts()
    assert [row.replica_id for row in status.replicas] == [0, 1]
    assert [row.attempt for row in reader.all_attempts()] == [1, 1]
    unreadable = [key] if key != for_authors[0] else []  # `status` shows nothing of a claim
    assert [said.partition(": ")[0] for said in status.unreadable] in (unreadable, [])
    done = verify_run(fleet.store)
    if key in for_authors:
        assert done.disagreement is not None and done.disagreement.key == key
        return
    assert done.agrees and [said.partition(": ")[0] for said in done.unreadable] == [key]


HANDLES: dict[str, bytes] = {
    **JUNK,
    "of another schema": b'{"at":0,"attempt":1,"handle":{"schema":9},"hourly_usd":null,"record":"handle",'
    b'"replica_id":1,"schema_version":2,"write_id":"x"}\n',
    "no fields": b'{"at":0,"attempt":1,"handle":{},"hourly_usd":null,"record":"handle","replica_id":1,'
    b'"schema_version":2,"write_id":"x"}\n',
}


@pytest.mark.parametrize("name", ["heartbeat", "exit_record", "handle", "cancel"])
@pytest.mark.parametrize("data", HANDLES.values(), ids=HANDLES)
def test_junk_under_the_keys_of_one_attempt_ends_no_coordinator(name: str, data: bytes):
    """One that follows the attempt, and one that comes to it later."""
    key, data = at(getattr(keys, name)(1, 1), data)
    scene = Scene(timing={"heartbeat_s": 1.0})
    first = scene.coordinator()
    if name == "handle":
        scene.engine.create(key, data)
    first.step()
    if name != "handle":
        scene.engine.create(key, data)
    scene.steps(first, 3)
    second = scene.coordinator()
    scene.steps(second, 3)
    assert scene.executor.launched == [(0, 1), (1, 1)]
    assert first.alive() == second.alive() == [0, 1]


def test_a_large_log_is_read_from_its_end_up_to_what_a_replica_writes():
    store = MemoryStore()
    store.put(keys.log_text(0, 1), b"first line\n" + b"\n" * (3 * kinds.MIB) + b"last line\n")
    text = AttemptRecords(store).log_text(0, 1)
    assert text is not None and len(text) == kinds.MIB and text.endswith("last line\n") and "first" not in text
    assert AttemptRecords(store).log_text(0, 2) is None
    store.put(keys.log_text(0, 2), b"")
    assert AttemptRecords(store).log_text(0, 2) == ""
