"""Attacks by somebody who may write to the bucket: claims that nobody intended, and manifests in others' names."""

import pytest
from protocol_fleet import Fleet, answer, play

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Claim, Intent, Stamp
from diloco_orchestrator.run_log.attempts import AttemptRecords, counted
from replica.process.attempt import claim_attempt

STAMP = Stamp("attacker", lambda: 0.0)


def claim(fleet: Fleet, replica_id: int, attempt: int) -> None:
    made = Claim(**STAMP(), replica_id=replica_id, attempt=attempt, host="h", pid=1, versions={}, threads=1)
    fleet.store.create(keys.claim(replica_id, attempt), made.to_bytes())


def intend(fleet: Fleet, replica_id: int, attempt: int) -> None:
    made = Intent(**STAMP(), replica_id=replica_id, attempt=attempt, leg=1, executor="x", why="x")
    fleet.store.create(keys.intent(replica_id, attempt), made.to_bytes())


@pytest.mark.parametrize(("intents", "numbers"), [([], []), ([1, 2], [1, 2]), ([1, 3, 10**6], [1]), ([2], [])])
def test_attempts_count_from_one_up_to_the_first_without_an_intent(intents, numbers):
    assert counted(intents) == numbers


def test_a_claim_far_ahead_shuts_nobody_out():
    fleet = Fleet(replicas=2)
    zero, one = fleet.join_all()
    claim(fleet, 0, 2)  # without an intent
    claim(fleet, 1, 10**6), intend(fleet, 1, 10**6)  # far ahead
    zero.attempt.check_superseded(), one.attempt.check_superseded()
    assert AttemptRecords(fleet.store).all_numbers() == {0: [1], 1: [1]}
    play([zero, one], [1.0, 0.5])
    again = fleet.join(1)
    assert again.attempt.number == 2


def test_an_attempt_that_nobody_intended_cannot_be_claimed():
    fleet = Fleet(replicas=2)
    with pytest.raises(ConfigError, match=r"attempt 7 of replica 1 .* has no intent\.json"):
        claim_attempt(fleet.store, 1, 7, SystemClock(), STAMP)


def test_a_replica_that_its_user_starts_writes_its_own_intent_before_its_claim():
    fleet = Fleet(replicas=1)
    found = claim_attempt(fleet.store, 0, None, SystemClock(), STAMP)
    intent = AttemptRecords(fleet.store).intent(0, found.number)
    assert found.number == 1 and intent is not None and intent.executor == "by hand"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attempt": 7}, "no process has claimed attempt 7 of replica 1, or no coordinator intended it"),
        ({"attempt": 2}, "no process has claimed attempt 2 of replica 1, or no coordinator intended it"),
        ({"claim_sha256": "0" * 64}, "it does not name the claim of attempt 1 of replica 1"),
        ({"claim_sha256": ""}, "it does not name the claim of attempt 1 of replica 1"),
    ],
)
def test_a_manifest_that_its_attempt_has_not_written_is_not_averaged(change, why):
    fleet = Fleet(replicas=2, rounds=9, quorum=1)
    zero, one = fleet.join_all()
    claim(fleet, 1, 7)
    intend(fleet, 1, 2)
    honest = answer(zero, 1.0)
    forged = honest.model_copy(update={"replica_id": 1, "claim_sha256": one.attempt.claim_sha256, **change})
    if forged.attempt > 1:
        fleet.store.create(keys.payload(1, 1, forged.attempt, 0), fleet.store.get(keys.payload(1, 0, 1, 0)))
    fleet.store.create(keys.contribution(1, 1), forged.to_bytes())
    zero.close()
    (commit,) = fleet.commits()
    assert [(a.kind, a.averaged, a.attempt, a.reason) for a in commit.answers] == [
        ("delta", True, 1, ""),
        ("unverifiable", False, 0, why),
    ]
    # Its work is not lost: the replica whose name was used carries it.
    mine = answer(one, 0.5)
    assert mine.write_id != forged.write_id
    one.close()
    assert one.digest == zero.digest
    assert [origin.round for origin in answer(one, 0.25).origins] == [1, 2]
    assert verify_run(fleet.store).agrees


def test_a_claim_that_was_changed_or_removed_is_told():
    fleet = Fleet(replicas=2, rounds=9)
    play(fleet.join_all(), [1.0, 0.5])
    assert verify_run(fleet.store).agrees
    key = keys.claim(1, 1)
    kept = fleet.store.get(key)
    fleet.store.put(key, kept.replace(b'"pid":', b'"pid":1'))
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == key
    fleet.store.delete(key)
    found = verify_run(fleet.store).disagreement
    assert found is not None and (found.key, found.words[:10]) == (key, "is missing")
