"""Records of the log that somebody deleted: what readers say of the run, and that no older model is the newest."""

import re

import pytest
from long_history import LongRun
from protocol_fleet import Fleet, play

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.inspection.explain import explain, go_on
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.rounds import result_of
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.next_leg import begin_next_leg

ROUNDS = 25


@pytest.fixture
def run() -> LongRun:
    """A run of 25 rounds with snapshots of 10 and 20, and no segments."""
    return LongRun(ROUNDS, snapshots=2, payload_rounds=ROUNDS)


LOST = {  # by what was deleted: the keys
    "the start": [keys.START],
    "one commit": [keys.commit(5)],
    "the first rounds": [keys.commit(round_) for round_ in range(1, 13)],
}


@pytest.mark.parametrize("what", LOST)
def test_what_a_lifecycle_rule_deleted_is_named_and_nothing_older_is_called_the_newest(
    what: str, run: LongRun, tmp_path
):
    for key in LOST[what]:
        run.store.delete(key)
    words = f"{LOST[what][0]} is missing, though a snapshot of round 20 is there"
    status = RunReader(run.store).status()
    assert status.reason == status.lost and status.lost.startswith(words)
    said = explain(status, now=1e9)  # years after the last heartbeat
    assert said.why[0].startswith(words) and not any("attach" in each for each in said.todo), said
    for take in (lambda: copy_model(RunLog(run.store), tmp_path / "model"), RunReader(run.store).model):
        with pytest.raises(ObjectMissing, match=words):
            take()
    with pytest.raises(ObjectMissing, match=words):
        begin_next_leg(RunLog(run.store), rounds=1, from_round=None, by="a test", why="", stamp=Stamp("a", lambda: 0.0))
    assert not (tmp_path / "model").exists()


def test_a_start_record_that_was_changed_is_called_so_and_not_missing(run: LongRun):
    changed = run.store.get(keys.START).replace(b'"b3:', b'"b4:')
    run.store.put(keys.START, changed)
    lost, found = RunReader(run.store).status().lost, verify_run(run.store)
    assert re.match(r"start.json cannot be read \(.*pattern.*: it was changed", lost) and "is missing" not in lost, lost
    assert found.disagreement is not None and found.disagreement.key == keys.START
    assert found.disagreement.words.startswith("cannot be read ("), found.disagreement


def test_rounds_before_a_lost_commit_can_still_be_pulled(run: LongRun, tmp_path):
    run.store.delete(keys.commit(5))
    assert copy_model(RunLog(run.store), tmp_path / "model", 4) == 4


@pytest.mark.parametrize("lost", [5, 9, 10, 20])
def test_a_commit_that_a_segment_holds_is_not_lost(lost: int, run: LongRun, tmp_path):
    run.write_segments()
    run.store.delete(keys.commit(lost))
    status = RunReader(run.store).status()
    assert (status.round, len(status.rounds), status.lost) == (ROUNDS, ROUNDS, "")
    assert copy_model(RunLog(run.store), tmp_path / "model") == ROUNDS


def test_of_a_run_that_goes_on_nothing_is_lost_between_a_commit_and_its_snapshot(run: LongRun):
    for round_ in range(21, ROUNDS + 1):  # as if no later one had been committed yet
        run.store.delete(keys.commit(round_))
    assert RunReader(run.store).status().lost == ""


DAMAGE = {  # by what a result.json contradicts: what is said of it
    "the last commit was deleted": "rounds/00000004/commit.json is missing: it was deleted, or the result is false",
    "the last commit was cut": "rounds/00000004/commit.json has .*: one of the two was changed after it was written",
    "a result was made up": "which no commit does: the result is false",
    "the result was cut": "legs/1/result.json is there and cannot be read .*, and no commit ends the leg",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_of_a_run_that_its_result_calls_ended_and_its_commits_do_not_both_are_named_and_nobody_is_told_to_attach(
    what: str,
):
    fleet = Fleet(replicas=2, rounds=3)
    participants = fleet.join_all()
    for _ in range(4):
        play(participants, [1.0, 1.0])
    store, stamp, last = fleet.store, Stamp("a", lambda: 0.0), RunLog(fleet.store).as_read(4)
    assert last is not None and last.commit.stop == "completed"
    store.create(keys.result(1), result_of(last.commit, last.sha256, stamp()).to_bytes())
    assert RunReader(store).status().false_end == ""
    if what == "the last commit was cut":
        store.put(keys.commit(4), store.get(keys.commit(4))[:40])
    else:
        store.delete(keys.commit(4))
    if what == "a result was made up":
        store.put(
            keys.result(1), result_of(last.commit, last.sha256, stamp()).model_copy(update={"round": 2}).to_bytes()
        )
    elif what == "the result was cut":
        store.put(keys.result(1), store.get(keys.result(1))[:40])
    status = RunReader(store).status()
    said = explain(status, now=1e12)
    assert said.kind == "records disagree" and not any(each.startswith("To go on") for each in said.todo), said
    assert re.search(DAMAGE[what], said.why[0]) and "has no result" not in said.why[0], said.why
    assert "diloco verify" in go_on(status) and "diloco verify" in said.todo[0]
