"""What one replica, a stranger too, says in its manifests: nothing of it makes `verify` disagree with a right run."""

from typing import Any

import pytest
from protocol_fleet import BY_HAND, Fleet, answer, close, play, report, together

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.verify.loading import logged_scores
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Origin, Payload, Residual, Shard
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)
LIAR = 2  # of three replicas


def origins(*rounds: int) -> dict[str, Any]:
    return {"origins": tuple(Origin(round=round_, steps=30) for round_ in rounds)}


def said_otherwise(fleet: Fleet, participants: list[Participant], **changes: Any) -> Commit:
    """The commit of a round in which the liar's manifest has these changes."""
    said = [answer(each, 1.0) for each in participants][LIAR]
    fleet.engine.put(keys.contribution(said.round, LIAR), said.model_copy(update=changes).to_bytes())
    return together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]


@pytest.mark.parametrize("again", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("rounds", [(1, 3), (2, 3), (3, 3), (3, 2), (3, 4), (3, 2**53), (2,)])
def test_work_that_counts_already_or_is_of_a_later_round_is_averaged_by_nobody(rounds, again):
    """Every base was right, and `verify` disagreed with the run for good."""
    fleet = Fleet(replicas=3, quorum=2)
    participants = fleet.join_all()
    for _ in (1, 2):
        play(participants, [1.0, 1.0, 1.0])
    if again:
        participants = [fleet.join(i, attempt=2) for i in range(3)]
    commit = said_otherwise(fleet, participants, **origins(*rounds))
    assert commit.applied and [each.kind for each in commit.answers] == ["delta", "delta", "unverifiable"]
    assert verify_run(fleet.store).disagreement is None


def test_work_of_a_leg_that_has_ended_is_averaged_by_nobody():
    fleet = Fleet(replicas=3, quorum=2, rounds=1)
    participants = fleet.join_all()
    said_otherwise(fleet, participants, kind="abstention")
    said_otherwise(fleet, participants)
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    commit = said_otherwise(fleet, fleet.join_all(), **origins(1, 3))
    assert [each.kind for each in commit.answers] == ["delta", "delta", "unverifiable"]


def test_carried_work_of_a_round_that_a_restarted_replica_has_not_seen_is_averaged_once():
    fleet = Fleet(replicas=3, quorum=1, rounds=9, timing=BY_HAND)
    clock = ManualClock()
    participants = [fleet.join(i, clock=clock) for i in range(3)]
    for taking in (participants, participants[:2]):
        clock.advance(1.0)
        for each in taking:
            answer(each, 1.0)
        for each in taking:
            each.close()
    answer(participants[2], 1.0)  # late
    participants[2].close()
    zero, one = (fleet.join(i, attempt=2, clock=clock) for i in (0, 1))
    kinds = []
    for carried in (True, False):
        said = answer(participants[2], 1.0)
        if not carried:
            said = said.model_copy(update=origins(2, 4))
            fleet.engine.put(keys.contribution(4, LIAR), said.to_bytes())
        assert [origin.round for origin in said.origins] == ([2, 3] if carried else [2, 4])
        for each in (zero, one):
            answer(each, 1.0)
        for each in (zero, one, participants[2]):
            each.close()
        kinds.append(fleet.commits()[-1].answers[LIAR].kind)
    assert kinds == ["delta", "unverifiable"]
    assert verify_run(fleet.store).disagreement is None


NOWHERE = Shard(digest=bulk_digest(b"nothing"), size=7)
SAVED = Payload(codec="fp32", numel=12, shard_numel=12, shards=(NOWHERE,))
UNREAD: list[dict[str, Any]] = [
    {"state": NOWHERE},
    {"buffers": NOWHERE},
    {"residual": Residual(share=0.5, saved=SAVED)},
    {"kind": "abstention", "payload": SAVED},
]


@pytest.mark.parametrize("changes", UNREAD, ids=lambda changes: next(reversed(changes)))
def test_what_a_stranger_names_and_nobody_else_reads_is_noted_where_it_is_not_there(changes):
    """`verify` disagreed; of a launched replica, whose store lost or damaged it, it does."""
    for invited in ([LIAR], []):
        fleet = Fleet(replicas=3, quorum=2, invited=invited, aggregate="mean")
        said_otherwise(fleet, fleet.join_all(), **changes)
        done = verify_run(fleet.store)
        if invited:
            assert done.disagreement is None and "nobody but its author, a stranger, would read it" in done.notes[0]
        else:
            assert done.disagreement is not None


def test_scores_that_strangers_report_are_not_those_that_verify_compares():
    fleet = Fleet(replicas=3, invited=[LIAR], quorum="all", aggregate="mean", scored=True, scores_strangers=True)
    participants = fleet.join_all()
    for i, each in enumerate(participants[:LIAR]):
        answer(each, 1.0, report(share=i, score=0.5))
    answer(participants[LIAR], 1.0, report(share=0, score=9.0))
    log = RunLog(fleet.store)
    logged = logged_scores(log, ConfirmedSnapshots(log), 0, fleet.start().base_digest)
    assert {share: score.mean for share, score in logged.items()} == {0: 0.5, 1: 0.5}


def test_a_long_manifest_of_a_stranger_is_not_parsed():
    """Some hundred thousand of anything take 250 MB of each replica until the next round has ended."""
    for invited in ([LIAR], []):
        fleet = Fleet(replicas=3, quorum=2, invited=invited, aggregate="mean")
        dropped = tuple(Origin(round=1, steps=1) for _ in range(50_000))
        commit = said_otherwise(fleet, fleet.join_all(), dropped=dropped)
        assert [each.kind for each in commit.answers[:2]] == ["delta", "delta"]
        assert (commit.answers[LIAR].attempt, commit.answers[LIAR].averaged) == ((0, False) if invited else (1, True))
        assert verify_run(fleet.store).disagreement is None
