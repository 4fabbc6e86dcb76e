"""Legs: which base the next one starts from, with which guard state and how many steps; how a coordinator ends one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guarded_legs import STAMP, commit_of, ending, fleet_of, halt, halted, scoring
from protocol_fleet import Fleet, answer, play, report

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.legs import BaseScores, bases
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.next_leg import begin_next_leg


def resume(fleet: Fleet, rounds: int | None = None, from_round: int | None = None) -> Begin:
    return begin_next_leg(
        RunLog(fleet.store), rounds=rounds, from_round=from_round, by="test", why="go on", stamp=STAMP
    )


# -- the base of the next leg -----------------------------------------------------------------------------------------


def best(fleet: Fleet) -> int:
    commits, begins, scores = fleet.commits(), RunLog(fleet.store).begins(), BaseScores()
    for commit in commits:
        scores.add(commit, begins[commit.leg - 1])
    return scores.best(bases(commits, begins))


class Unsearched(list[int]):
    """Rounds in which nobody may look for one: of 20,000 that took a second, at every status of a run."""

    def __contains__(self, _: object) -> bool:
        raise AssertionError("the rounds are searched for each base")


def test_the_best_base_of_a_long_run_is_found_in_one_pass():
    fleet = Fleet(replicas=1, rounds=3, scored=True)
    (participant,) = fleet.join_all()
    for score in (0.5, 0.7, 0.6):
        play([participant], [1.0], [report(share=0, score=score)])
    begins, scores = RunLog(fleet.store).begins(), BaseScores()
    for commit in fleet.commits():
        scores.add(commit, begins[0])
    assert scores.best(Unsearched([0, 1, 2])) == 1
    assert scores.best(Unsearched([0, 2])) == 2


def test_the_best_base_is_the_one_that_the_next_round_scored_best():
    fleet, _ = fleet_of([0.1, 0.5, 0.9, 0.3])  # the third round scores the base after the second
    assert best(fleet) == 2


def test_of_bases_that_score_alike_the_earliest_is_the_best():
    fleet, _ = fleet_of([0.1, 0.5, 0.9, 0.9, 0.2])
    assert best(fleet) == 2


def test_after_a_verdict_a_run_resumes_from_the_base_with_the_best_score_and_that_bases_guard_state():
    fleet, _ = fleet_of([0.1, 0.5, 0.9, 0.3, 0.2], last_drifts=True)
    assert commit_of(fleet, 5).stop == "halted" and not commit_of(fleet, 5).applied
    begin = resume(fleet)
    assert (begin.from_round, begin.from_outer_step, begin.after_round) == (2, 2, 5)
    assert begin.guard == commit_of(fleet, 2).guard != commit_of(fleet, 5).guard


def test_after_a_halt_a_run_resumes_from_the_base_it_stopped_on_whatever_the_scores():
    fleet, _ = halted([0.1, 0.9, 0.3, 0.2])
    begin = resume(fleet)
    assert begin.from_round == 4 and begin.guard == commit_of(fleet, 4).guard


def test_the_first_round_of_a_leg_goes_on_with_the_guard_state_that_its_begin_names():
    fleet, _ = fleet_of([0.1, 0.5, 0.9, 0.3, 0.2], last_drifts=True)
    resume(fleet)
    scoring(fleet, fleet.join_all(), [0.9])
    first = commit_of(fleet, 6)
    assert first.verdict is not None and not first.verdict.fire
    before = commit_of(fleet, 2).verdict
    assert before is not None and first.verdict.folds == before.folds + 1


def test_the_first_score_of_a_leg_is_of_the_base_that_the_leg_started_from():
    fleet, _ = fleet_of([0.6, 0.5, 0.9, 0.3, 0.2], last_drifts=True)  # of the bases still there, the first scored best
    resume(fleet, from_round=1)
    scoring(fleet, fleet.join_all(), [0.95, 0.2])  # the base after round 1, then the one after round 6
    assert best(fleet) == 1


def test_no_later_base_descends_from_rounds_that_a_resume_left_behind():
    fleet, _ = halted([0.1] * 4)
    resume(fleet, from_round=2)
    participants = scoring(fleet, fleet.join_all(), [0.1] * 2)
    commits, begins = fleet.commits(), RunLog(fleet.store).begins()
    assert bases(commits, begins) == [0, 1, 2, 5, 6]
    assert fleet.join(0).digest == participants[0].digest


def test_a_snapshot_of_a_history_left_behind_is_no_start_for_a_rebuild():
    fleet, participants = fleet_of([0.1] * 3, snapshot_every=3)
    for participant in participants:
        participant.write_snapshot_if_due()
    halt(fleet)
    scoring(fleet, participants, [0.1])
    assert RunLog(fleet.store).snapshots() == [0, 3]
    resume(fleet, from_round=2)
    again = fleet.join(0)
    assert again.digest == commit_of(fleet, 3).base_digest != commit_of(fleet, 4).base_digest  # of the bases before


def test_a_leg_starts_from_a_snapshot_even_of_a_round_that_had_none():
    fleet, _ = halted([0.1] * 4, snapshot_every=100)
    assert RunLog(fleet.store).snapshots() == [0]
    resume(fleet, from_round=2)
    assert RunLog(fleet.store).snapshots() == [0, 2]


def test_a_round_that_left_no_base_is_refused_and_the_nearest_offered():
    fleet, _ = fleet_of([0.1] * 4, last_drifts=True)
    with pytest.raises(ConfigError, match=r"round 4 of .* left no base.* The nearest is 3"):
        resume(fleet, from_round=4)


def test_after_a_legs_last_round_the_run_had_the_base_that_the_next_leg_starts_from():
    """The guard of the next leg advises to go back to that round, where no base was made."""
    fleet, _ = fleet_of([0.1, 0.5, 0.9, 0.3, 0.2], last_drifts=True)
    resume(fleet)
    scoring(fleet, fleet.join_all(), [0.1, 0.1])
    log = RunLog(fleet.store)
    assert bases(fleet.commits(), log.begins()) == [0, 1, 2, 6, 7]
    with pytest.raises(ConfigError, match=r"round 5 of .* left no base.* The nearest is 2\."):
        copy_model(log, Path("nowhere"), 5)


# -- the length of the next leg ---------------------------------------------------------------------------------------


def test_a_leg_takes_the_outer_steps_that_its_base_lacks():
    fleet, _ = halted([0.1] * 4, rounds=10)
    begin = resume(fleet, from_round=1)
    assert (begin.from_outer_step, begin.outer_steps) == (1, 9)
    joined = fleet.join_all()
    assert {p._tip.position.outer_step for p in joined} == {1}


def test_a_leg_begins_with_no_empty_round_behind_it():
    """Two rounds that named nobody before the halt and one after it are not three in a row."""
    fleet, participants = fleet_of([0.1])
    nan = float("nan")
    play(participants, [1.0, nan])
    halt(fleet)
    play(participants, [1.0, nan])
    assert commit_of(fleet, 3).empty_rounds == 2
    resume(fleet)
    joined = fleet.join_all()
    play(joined, [1.0, nan])
    assert commit_of(fleet, 4).empty_rounds == 1 and commit_of(fleet, 4).stop == "none"


# -- who may resume, who may halt -------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_not_resumed():
    fleet, _ = fleet_of([0.1] * 2)
    with pytest.raises(ConfigError, match=r"goes on \(leg 1\): there is nothing to resume"):
        resume(fleet)
    halt(fleet)
    with pytest.raises(ConfigError, match="goes on"):  # a request is no stop
        resume(fleet)


class RacingStore(MemoryStore):
    """Before a create of the key in `race`, somebody else makes the same object."""

    race: str = ""

    def create(self, key: str, data: bytes) -> bool:
        if key == self.race:
            super().create(key, data.replace(b'"go on"', b'"they were first"'))
        return super().create(key, data)


def test_of_two_resumes_at_once_one_wins_and_the_other_is_told():
    engine = RacingStore()
    fleet, _ = halted([0.1] * 2, store=engine)
    engine.race = keys.begin(2)
    with pytest.raises(ConfigError, match="somebody else began leg 2"):
        resume(fleet)
    assert [begin.why for begin in RunLog(fleet.store).begins()] == ["start of the run", "they were first"]


def test_a_leg_that_has_ended_is_not_halted_and_the_next_one_can_be():
    fleet, participants = halted([0.1] * 2)
    for participant in participants:
        participant.finish_leg()
    with pytest.raises(ConfigError, match=r"has ended already \(halted: halt requested: lunch\)"):
        request_halt(RunLog(fleet.store), "test", "again", STAMP)
    resume(fleet)
    request_halt(RunLog(fleet.store), "test", "supper", STAMP)
    found = RunLog(fleet.store).halt(2)
    assert found is not None and found.reason == "supper"


# -- a stop by the coordinator ----------------------------------------------------------------------------------------


def test_a_stop_by_the_coordinator_keeps_base_guard_state_norms_and_roster():
    fleet, _ = fleet_of([0.1, 0.5, 0.9])
    before = commit_of(fleet, 3)
    ending(fleet).commit_stop("halted", "nobody is left")
    stop = commit_of(fleet, 4)
    assert (stop.stop, stop.applied, stop.answers) == ("halted", False, ())
    assert before.guard is not None and stop.guard == before.guard
    assert stop.norms is not None and stop.norms.rounds == 3 and not stop.reason.startswith("void")
    assert (stop.base_digest, stop.roster, stop.outer_step) == (None, before.roster, before.outer_step)


def test_a_stop_by_the_coordinator_before_a_legs_first_commit_keeps_what_the_leg_began_with():
    fleet, _ = halted([0.1, 0.5, 0.9])
    resume(fleet, from_round=2)
    ending(fleet).commit_stop("failed", "nobody came up")
    stop = commit_of(fleet, 4)
    assert (stop.leg, stop.outer_step, stop.roster) == (2, 2, (0, 1))
    assert (stop.base_digest, stop.guard, stop.norms) == (None, commit_of(fleet, 2).guard, None)


def test_a_stop_before_any_commit_keeps_the_first_base():
    fleet, _ = fleet_of([])
    ending(fleet).commit_stop("failed", "nobody trains")
    assert commit_of(fleet, 1).base_digest is None


def test_a_coordinator_that_loses_the_round_to_a_replica_stops_the_next_one():
    """A replica commits between the coordinator's reading and its create."""
    engine = OvertakenStore()
    fleet, (zero, one) = fleet_of([0.1], store=engine)
    for participant in (zero, one):
        answer(participant, 1.0, report(share=participant._attempt.replica_id, score=0.1))
    engine.overtake = (keys.commit(2), zero.close)
    ending(fleet).commit_stop("halted", "enough")
    assert [(c.round, c.stop, c.applied) for c in fleet.commits()[1:]] == [(2, "none", True), (3, "halted", False)]


class OvertakenStore(MemoryStore):
    """Right before the create of a key, once, somebody does what `overtake` says."""

    overtake: tuple[str, Callable[[], Any]] | None = None

    def create(self, key: str, data: bytes) -> bool:
        if self.overtake is not None and self.overtake[0] == key:
            act, self.overtake = self.overtake[1], None
            act()
        return super().create(key, data)


def test_a_leg_without_an_applied_round_ends_with_the_base_it_started_from():
    fleet, _ = halted([0.1, 0.5, 0.9])
    resume(fleet, from_round=1)
    end = ending(fleet)
    end.commit_stop("failed", "nobody came up")
    assert end.last_base() == 1


def test_a_leg_whose_replicas_died_at_its_end_gets_its_result_and_its_snapshot_from_the_coordinator():
    fleet, _ = halted([0.1, 0.5, 0.9], snapshot_every=100)
    assert RunLog(fleet.store).result(1) is None and RunLog(fleet.store).snapshots() == [0]
    for _ in range(2):  # safe to repeat
        ending(fleet).finalize()
    result = RunLog(fleet.store).result(1)
    assert result is not None and (result.status, result.round, result.outer_steps) == ("halted", 3, 3)
    assert result.commit_sha256 == sha256_hex(fleet.store.get(keys.commit(3)))
    assert RunLog(fleet.store).snapshots() == [0, 3]


@pytest.mark.parametrize(
    ("lost", "is_gone", "left"),  # the manifest confirms snapshot 2, too
    [(keys.payload(3, 0, 1, 0), "is gone", 2), (keys.contribution(3, 0), "does not exist", 0)],
    ids=["payload", "manifest"],
)
def test_a_leg_ends_and_is_resumed_though_the_store_lost_what_its_last_base_needs(caplog, lost, is_gone, left):
    fleet, _ = halted([0.1, 0.5, 0.9], snapshot_every=100)
    run_log = RunLog(fleet.store)
    write_rebuilt_snapshot(run_log, 2, STAMP)
    fleet.store.delete(lost)
    ending(fleet).finalize()
    result = run_log.result(1)
    assert result is not None and (result.status, result.round) == ("halted", 3)
    words = [
        message for message in caplog.messages if "ends without a snapshot of its last base, of round 3" in message
    ]
    assert len(words) == 1 and lost in words[0] and f"--from-round {left}" in caplog.text
    with pytest.raises(ConfigError, match=rf"{lost} .*{is_gone}.*--from-round {left}"):
        resume(fleet)
    resume(fleet, from_round=left)
    assert run_log.begins()[-1].from_round == left
