"""`verify` against forgeries that are consistent in themselves: whoever wrote them wrote every digest anew."""

import json

import pytest
from protocol_fleet import Fleet, answer, play, report

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Origin, Result
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.next_leg import begin_next_leg

STAMP = Stamp("test", lambda: 0.0)
CLEAN = {"fire": False, "reason": "", "proxy_real_gap": 0.0, "folds": 1, "folded": True, "value": 1.0}


def found(store: Store) -> tuple[str, str]:
    done = verify_run(store)
    assert done.disagreement is not None
    return done.disagreement.key, done.disagreement.words


def rewrite(store: Store, key: str, **fields: object) -> None:
    """The same record with other fields, in canonical JSON. Only records that nothing names by digest."""
    body = json.loads(store.get(key)) | fields
    store.put(key, json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")


def scored(share: int) -> object:
    return report(share=share, score=0.5, in_loop=0.5)


def stopped_by_coordinator() -> Fleet:
    fleet = Fleet(replicas=2, rounds=9, scored=True)
    participants = fleet.join_all()
    for _ in range(2):
        play(participants, [1.0, 2.0], [scored(0), scored(1)])  # type: ignore[list-item]
    log = RunLog(fleet.store)
    EndOfLeg(log, log.newest_begin(), STAMP).commit_stop("halted", "nobody is left")
    return fleet


def test_a_model_that_came_after_its_run_was_stopped_is_noted():
    """A coordinator takes the only replica for dead, and stops the run that nobody has brought a model to."""
    fleet = Fleet(replicas=1, rounds=9)
    log = RunLog(fleet.store)
    EndOfLeg(log, log.newest_begin(), STAMP).commit_stop("halted", "nobody is left")
    late = fleet.join(0)
    play([late], [1.0])
    late.finish_leg()
    done, result = verify_run(fleet.store), RunLog(fleet.store).result(1)
    assert result is not None and (result.status, result.round) == ("halted", 1)
    assert done.agrees and keys.result(1) in done.notes[0]


def test_a_run_whose_replica_committed_once_more_after_it_was_stopped_gets_its_end():
    """The replica, thought dead, decided its round before it saw the request to halt, and died."""
    fleet = Fleet(replicas=1, rounds=9)
    log = RunLog(fleet.store)
    end = EndOfLeg(log, log.newest_begin(), STAMP)
    end.commit_stop("halted", "nobody is left")
    request = fleet.store.get(keys.halt(1))
    fleet.store.delete(keys.halt(1))
    play([fleet.join(0)], [1.0])
    fleet.store.create(keys.halt(1), request)
    end.finalize()
    result = RunLog(fleet.store).result(1)
    assert result is not None and (result.status, result.round, result.reason) == ("halted", 2, "nobody is left")
    assert verify_run(fleet.store).agrees


def test_a_result_from_before_the_first_commit_that_nobody_asked_for_is_found():
    fleet = Fleet(replicas=1, rounds=1)
    forged = Result(**STAMP(), leg=1, status="halted", round=0, outer_steps=0, reason="nobody is left")
    fleet.store.create(keys.result(1), forged.to_bytes())
    late = fleet.join(0)
    play([late], [1.0]), play([late], [1.0])
    late.finish_leg()
    assert found(fleet.store)[0] == keys.result(1)


@pytest.mark.parametrize(("round_", "words"), [(1, "of round 1 again, after round 1"), (3, "in a later round, 3")])
def test_inner_steps_that_count_twice_are_found(round_, words):
    """A replica commits its own work as one that was averaged in time; every digest is right."""
    fleet = Fleet(replicas=2, rounds=9)
    zero, one = fleet.join_all()
    play([zero, one], [1.0, 1.0])
    said = answer(one, 2.0)
    answer(zero, 1.0)
    zero.close()
    twice = said.model_copy(update={"origins": (Origin(round=round_, steps=30), *said.origins)})
    fleet.store.put(keys.contribution(2, 1), twice.to_bytes())
    commit = fleet.commits()[-1]
    named = {"origins": twice.origins, "manifest_sha256": sha256_hex(twice.to_bytes())}
    answers = (commit.answers[0], commit.answers[1].model_copy(update=named))
    fleet.store.put(keys.commit(2), commit.model_copy(update={"answers": answers}).to_bytes())
    key, why = found(fleet.store)
    assert key == keys.commit(2) and words in why


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outer_step": 3}, "its outer_step is 3; 2 follows"),
        ({"guard": None}, "its guard is None"),
        ({"applied": True}, "its applied is True; False follows"),
        ({"stop": "completed"}, "a coordinator can stop a run as halted or failed"),
        ({"verdict": CLEAN}, "its verdict is "),
    ],
)
def test_a_stop_by_a_coordinator_moves_nothing(fields, words):
    fleet = stopped_by_coordinator()
    assert verify_run(fleet.store).agrees
    rewrite(fleet.store, keys.commit(3), **fields)
    key, said = found(fleet.store)
    assert key == keys.commit(3) and words in said


def resumed() -> Fleet:
    """Leg 2 has begun, and nobody has committed in it yet."""
    fleet = stopped_by_coordinator()
    begin_next_leg(RunLog(fleet.store), rounds=3, from_round=1, by="test", why="go on", stamp=STAMP)
    assert verify_run(fleet.store).agrees
    return fleet


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guard": None}, "guard is None; that round's commit says"),
        ({"from_outer_step": 2}, "from_outer_step is 2; the log says 1"),
        ({"from_round": 3}, "starts from round 3, which left no base"),
    ],
)
def test_a_leg_that_begins_otherwise_than_its_base_says_is_found(fields, words):
    fleet = resumed()
    rewrite(fleet.store, keys.begin(2), **fields)
    key, said = found(fleet.store)
    assert key == keys.begin(2) and words in said


@pytest.mark.parametrize("fields", [{"after_round": 2}, {"previous": "0" * 64}, {"leg": 3}, {"settings": {"seed": 3}}])
def test_a_begin_that_names_another_commit_than_the_last_begins_nothing(fields):
    """Before the leg's first commit it is foreign, and everybody is in the leg before; later the log disagrees."""
    fleet = resumed()
    begin = fleet.store.get(keys.begin(2))
    rewrite(fleet.store, keys.begin(2), **fields)
    done = verify_run(fleet.store)
    assert done.agrees and done.foreign == [keys.begin(2)] and RunLog(fleet.store).newest_leg() == 1
    fleet.store.put(keys.begin(2), begin)
    play(fleet.join_all(), [1.0, 2.0])
    assert verify_run(fleet.store).agrees
    rewrite(fleet.store, keys.begin(2), **fields)
    assert found(fleet.store)[0] == keys.begin(2)


def test_a_begin_though_nothing_has_stopped_begins_nothing():
    """It is right in everything else."""
    fleet = Fleet(replicas=1, rounds=9, snapshot_every=1)
    participant = fleet.join(0)
    play([participant], [1.0])
    participant.write_snapshot_if_due()
    first = RunLog(fleet.store).commit(1)
    assert first is not None
    begin = Begin(
        **STAMP(),
        leg=2,
        after_round=1,
        from_round=1,
        from_outer_step=1,
        outer_steps=5,
        guard=first.commit.guard,
        by="test",
        why="nobody asked",
        previous=first.sha256,
    )
    fleet.store.create(keys.begin(2), begin.to_bytes())
    play([fleet.join(0)], [1.0])
    assert [commit.leg for commit in fleet.commits()] == [1, 1]
    done = verify_run(fleet.store)
    assert done.agrees and done.foreign == [keys.begin(2)]


def test_a_snapshot_of_a_round_that_left_no_base_is_found():
    """A copy of a real one, its record rewritten."""
    fleet = stopped_by_coordinator()
    begin_next_leg(RunLog(fleet.store), rounds=3, from_round=2, by="test", why="go on", stamp=STAMP)
    for info in list(fleet.store.list(keys.snapshot(2, ""))):
        name = info.key.rpartition("/")[2]
        fleet.store.put(keys.snapshot(3, name), fleet.store.get(info.key))
    rewrite(fleet.store, keys.snapshot(3, keys.SNAPSHOT_RECORD), round=3)
    assert found(fleet.store) == (keys.snapshot(3, keys.SNAPSHOT_RECORD), "is of round 3, which left no base")
