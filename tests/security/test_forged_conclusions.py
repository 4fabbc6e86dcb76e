"""Attacks by somebody who may write to the bucket: forged ends, verdicts and guard states. Nobody obeys them."""

import pytest
from forged_commits import STAMP, Fields, after_two_rounds, completed, forge, nobody, scores
from protocol_fleet import Fleet, answer, play, report

from diloco_orchestrator.errors import ConfigError, ObjectMissing
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.whatif.replay import all_lines
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import By
from diloco_orchestrator.protocol.records import Commit, Discounted, Result, Unfounded
from diloco_orchestrator.protocol.verdict import VerdictKind
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.process.run_attempt import _ended_before

FORGED = {
    "completed at 3 of 20": completed,
    "completed and applied": lambda c: {"stop": "completed"},
    "failed after a good round": lambda c: {"stop": "failed"},
    "twenty steps at once": lambda c: {"outer_step": 20},
    "an accusation of scores": lambda c: {"discounted": (Discounted(replica_id=0, reason="it lies"),)},
    "one replica left out of the average": lambda c: {"answers": (c.answers[0], *nobody(c)[1:])},
    "a leg that has not begun": lambda c: {"leg": 2},
    "an empty roster": lambda c: {"roster": ()},
    "a roster of nobody": lambda c: {"roster": tuple(range(5, 9))},
    "another fragment": lambda c: {"fragment": 1},
    "a coordinator that averages": lambda c: {"by": By(None, "coordinator on x"), "stop": "halted"},
    "an answer twice": lambda c: {"answers": (*c.answers, c.answers[0])},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_commit_that_contradicts_the_log_is_void_and_the_run_goes_on(forged):
    fleet, participants = after_two_rounds()
    before = participants[0].digest
    for participant in participants:
        answer(participant, 1.0)
    forge(fleet, forged)
    for participant in participants:
        assert not participant.close().applied
        assert not participant.open.stopped and participant.digest == before and participant.open.round == 4
    play(participants, [1.0, 0.5])
    restarted = fleet.join(1)
    assert restarted.digest == participants[0].digest == participants[1].digest != before
    status = RunReader(fleet.store).status()
    assert (status.state, status.round, status.outer_step) == ("running", 4, 3)
    assert [row.applied for row in status.rounds] == [True, True, False, True]
    assert fleet.commits()[2].discounted == ()
    assert not EndOfLeg(RunLog(fleet.store), RunLog(fleet.store).newest_begin(), STAMP).reached()
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key.startswith("rounds/00000003/")


def test_in_an_unsigned_run_nobody_makes_a_commit_void_by_a_coordinators_finding():
    """Whoever may write there could write one about any commit, and remove what it names."""
    fleet, _ = after_two_rounds()
    sha256 = sha256_hex(fleet.store.get(keys.commit(2)))
    found = Unfounded(**STAMP(), round=2, commit_sha256=sha256, by="coordinator on x", reason="forged")
    fleet.store.create(keys.unfounded(2), found.to_bytes())
    fleet.store.delete(keys.contribution(2, 0))
    log = RunLog(fleet.store)
    with pytest.raises(ObjectMissing, match=r"contributions/0\.json"):
        list(log.after(log.leg_position(log.begin_of(1).record), derive_verdicts=True))


@pytest.mark.parametrize("roster", [(0, 1, 5), (1, 0), (0,), (1, 1), ()])
def test_a_roster_of_others_than_the_replicas_of_the_run_makes_a_commit_void(roster):
    fleet, participants = after_two_rounds(quorum=1)
    for participant in participants:
        answer(participant, 1.0)
    forge(fleet, lambda c: {"roster": roster})
    for participant in participants:
        assert not participant.close().applied and participant.open.roster == (0, 1)


def test_a_forged_result_ends_nothing():
    fleet, participants = after_two_rounds()
    result = Result(**STAMP(), leg=1, status="completed", round=3, outer_steps=20, reason="done")
    fleet.store.create(keys.result(1), result.to_bytes())
    log = RunLog(fleet.store)
    assert log.result(1) is None
    assert RunReader(fleet.store).status().state == "running"
    assert not EndOfLeg(log, log.newest_begin(), STAMP).reached()
    restarted = fleet.join(1)
    assert _ended_before(restarted._attempt) is None
    request_halt(log, "test", "the run can still be halted", STAMP)
    play([participants[0], restarted], [1.0, 0.5])
    ended = RunLog(fleet.store).result(1)
    assert ended is not None and (ended.status, ended.round) == ("halted", 3)  # from the commit, not from the file
    with pytest.raises(ConfigError, match="ended already"):
        request_halt(RunLog(fleet.store), "test", "again", STAMP)
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.result(1)


@pytest.mark.parametrize("data", [b"{}", None], ids=["junk", "failed"])
def test_a_result_before_the_first_commit_ends_nothing_without_a_request_to_halt(data):
    """A replica's own credentials may create a result, and no request to halt (infra/iam/one-replica.json)."""
    fleet = Fleet(replicas=2, rounds=3)
    forged = Result(**STAMP(), leg=1, status="failed", round=0, outer_steps=0, reason="forged")
    fleet.store.create(keys.result(1), data or forged.to_bytes())
    log = RunLog(fleet.store)
    assert log.result(1) is None and not EndOfLeg(log, log.newest_begin(), STAMP).reached()
    participants = fleet.join_all()
    assert _ended_before(participants[0]._attempt) is None
    play(participants, [1.0, 0.5])
    assert RunReader(fleet.store).status().state == "running" and participants[0].open.round == 2


@pytest.mark.parametrize("data", [b"{}", None], ids=["junk", "nothing"])
def test_a_coordinator_ends_a_run_that_nobody_began_though_somebody_else_wrote_its_result(data):
    fleet = Fleet(replicas=2, rounds=3)
    if data is not None:
        fleet.store.create(keys.result(1), data)
    log = RunLog(fleet.store)
    EndOfLeg(log, log.newest_begin(), STAMP).commit_stop("failed", "no machine")
    ended = RunLog(fleet.store).result(1)
    assert ended is not None and ended.reason == "no machine"
    assert ended.status == ("failed" if data is None else "halted")
    assert EndOfLeg(log, log.newest_begin(), STAMP).reached()


def test_a_result_that_is_no_record_ends_nothing_and_stops_no_reader():
    fleet, _ = after_two_rounds()
    fleet.store.create(keys.result(1), b"{}")
    assert RunReader(fleet.store).status().state == "running"


def fired(commit: Commit) -> Fields:
    """A HALT that no score supports."""
    assert commit.verdict is not None
    verdict = commit.verdict.__class__(
        **{**vars(commit.verdict), "fire": True, "reason": "fell", "action": VerdictKind.HALT}
    )
    return {**completed(commit), "stop": "halted", "verdict": verdict}


def blind(commit: Commit) -> Fields:
    """The guard begins anew in the middle of a leg."""
    return {"guard": None}


@pytest.mark.parametrize("forged", [fired, blind])
def test_a_verdict_that_does_not_follow_from_the_scores_is_void_for_everybody(forged):
    fleet, participants = after_two_rounds(scored=True)
    before, guard = participants[0].digest, participants[0].open.guard
    for participant, said in zip(participants, scores(3), strict=True):
        answer(participant, 1.0, said)
    forge(fleet, forged)
    for participant in participants:
        participant.close()
        assert not participant.open.stopped and participant.digest == before and participant.open.guard == guard
    play(participants, [1.0, 0.5], scores(4))
    restarted = fleet.join(1)
    assert restarted.digest == participants[0].digest != before
    assert restarted.open.guard == participants[0].open.guard
    status = RunReader(fleet.store).status()
    assert (status.state, status.outer_step, status.rounds[-1].applied) == ("running", 3, True)
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.commit(3)


def test_who_reads_commits_only_obeys_a_forged_halt_no_more_than_replicas_do():
    fleet, participants = after_two_rounds(scored=True)
    for participant, said in zip(participants, scores(3), strict=True):
        answer(participant, 1.0, said)
    forge(fleet, fired)
    log = RunLog(fleet.store)
    assert RunReader(fleet.store).status().state == "running"
    assert not EndOfLeg(log, log.newest_begin(), STAMP).reached()


def test_a_halt_that_follows_from_the_scores_is_obeyed_and_stays_one_without_its_manifests():
    fleet = Fleet(replicas=2, rounds=20, scored=True, guard={"rule": "heldout", "min_steps": 2})
    participants = fleet.join_all()
    for _ in range(20):
        if participants[0].open.stopped:
            break
        said = [
            report(share=i, score=0.9 - 0.1 * participants[0].open.round, in_loop=0.1 * participants[0].open.round)
            for i in (0, 1)
        ]
        play(participants, [1.0, 0.5], said)
    assert participants[0].open.stopped and RunReader(fleet.store).status().state == "halted"
    key = keys.contribution(participants[0]._tip.position.round, 1)
    fleet.store.delete(key)
    assert RunReader(fleet.store).status().state == "halted"
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == key


def test_three_void_commits_in_a_row_fail_the_run_for_everybody():
    fleet, participants = after_two_rounds()
    for round_ in (3, 4, 5):
        for participant in participants:
            answer(participant, 1.0)
        forge(fleet, completed, round_)
        for participant in participants:
            participant.close()
    assert all(participant.open.stopped for participant in participants)
    assert RunReader(fleet.store).status().state == "failed"


def void_rounds(fleet: Fleet, participants: list, forged, rounds: range) -> None:
    """Rounds whose commits somebody forges; all follow them."""
    for round_ in rounds:
        for participant in participants:
            answer(participant, 1.0)
        forge(fleet, forged, round_)
        for participant in participants:
            assert not participant.close().applied


def other_weights(commit: Commit) -> Fields:
    """Weights that do not follow from the answers, after two applied rounds."""
    return {"answers": tuple(each.model_copy(update={"weight": 7}) for each in commit.answers), "outer_step": 3}


def other_tokens(commit: Commit) -> Fields:
    """An answer that differs from its manifest, which only who reads manifests sees."""
    return {"answers": (commit.answers[0].model_copy(update={"tokens": 99}), *commit.answers[1:])}


@pytest.mark.parametrize("forged", [other_weights, other_tokens])
def test_three_commits_in_a_row_that_are_void_in_other_ways_fail_the_run_which_can_be_resumed(forged):
    """Each of those with other answers continues the forged one before it, so that the commits alone look right."""
    fleet, participants = after_two_rounds()
    before, watching = participants[0].digest, RunReader(fleet.store)
    void_rounds(fleet, participants, forged, range(3, 6))
    assert watching.status().round == 5
    assert all(participant.open.stopped for participant in participants)
    for participant in participants:
        participant.finish_leg()
    for reader in (watching, RunReader(fleet.store)):
        status = reader.status()
        assert (status.state, status.outer_step) == ("failed", 2)
        assert "See who wrote rounds/00000005/commit.json" in status.reason
        assert [row.applied for row in status.rounds] == [True, True, False, False, False]
    log = RunLog(fleet.store)
    assert EndOfLeg(log, log.newest_begin(), STAMP).reached()
    begun = begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    assert (begun.from_round, begun.from_outer_step) == (2, 2)
    again = [fleet.join(replica_id, 2) for replica_id in (0, 1)]
    assert [each.digest for each in again] == [before, before]
    play(again, [1.0, 0.5])
    assert again[0].open.outer_step == 3 and fleet.join(0, 3).digest == again[0].digest != before
    assert [commit.applied for commit in fleet.commits()] == [True, True, False, False, False, True]
    first = RunLog(fleet.store).result(1)
    assert first is not None and first.status == "failed"


def test_a_leg_begins_after_a_halt_whose_commit_follows_a_first_one_that_nobody_can_read():
    """A commit that is no record does not say among whom the scores of the next round were divided."""
    fleet = Fleet(replicas=2, rounds=20, scored=True)
    participants = fleet.join_all()
    for participant, each in zip(participants, scores(1), strict=True):
        answer(participant, 1.0, each)
    assert fleet.store.create(keys.commit(1), b"junk")
    for participant in participants:
        assert not participant.close().applied
    request_halt(RunLog(fleet.store), "test", "enough", STAMP)
    play(participants, [1.0, 0.5], scores(2))
    assert RunReader(fleet.store).status().state == "halted"
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    again = [fleet.join(replica_id, 2) for replica_id in (0, 1)]
    assert RunLog(fleet.store).newest_leg() == 2
    play(again, [1.0, 0.5], scores(3))
    assert RunReader(fleet.store).status().state == "running"


def test_a_halt_in_a_commit_with_other_answers_is_obeyed_by_nobody():
    fleet, participants = after_two_rounds()
    void_rounds(fleet, participants, lambda commit: {**other_tokens(commit), "stop": "halted"}, range(3, 4))
    assert not any(participant.open.stopped for participant in participants)
    log = RunLog(fleet.store)
    assert RunReader(fleet.store).status().state == "running"
    assert not EndOfLeg(log, log.newest_begin(), STAMP).reached()


@pytest.mark.parametrize("watches", [True, False])
def test_who_reads_commits_only_lists_a_void_one_as_void_once_the_next_one_is_there(watches):
    fleet, participants = after_two_rounds()
    reader = RunReader(fleet.store)
    void_rounds(fleet, participants, other_tokens, range(3, 4))
    if watches:
        assert reader.status().round == 3
    play(participants, [1.0, 0.5])
    expected = [True, True, False, True]
    assert [row.applied for row in reader.status().rounds] == expected
    assert [commit.applied for commit in reader.commits()] == expected
    assert [commit.applied for commit in RunLog(fleet.store).each_commit()] == expected
    assert [commit.round for commit in all_lines(RunLog(fleet.store)).commits] == [1, 2, 4]
