"""Attacks by somebody who may write to the bucket: claims that nobody intended, and manifests in others' names."""

import signal
from collections.abc import Sequence

import pytest
from protocol_fleet import Fleet, answer, play
from real_runs import Strike, reader_of
from scripted import Scene

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.errors import ConfigError, Superseded
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Claim, Intent
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.attempts import AttemptRecords, counted
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from executors.contract import ReplicaState
from replica.attempt.attempt import claim_attempt

STAMP = Stamp("attacker", lambda: 0.0)


TOKENS = ("", "0" * 16)  # of claims that were made without having seen their intents


def claim(store: Store, replica_id: int, attempt: int, tokens: Sequence[str] = TOKENS) -> None:
    for token in tokens:
        made = Claim(**STAMP(), replica_id=replica_id, attempt=attempt, host="h", pid=1, versions={}, threads=1)
        store.create(keys.claim(replica_id, attempt, token), made.to_bytes())


def intend(store: Store, replica_id: int, attempt: int, token: str = "f" * 16) -> None:
    who = {"replica_id": replica_id, "attempt": attempt}
    made = Intent(**STAMP(), **who, leg=1, executor="x", why="x", claim_token=token)
    store.create(keys.intent(replica_id, attempt), made.to_bytes())


@pytest.mark.parametrize(("intents", "numbers"), [([], []), ([1, 2], [1, 2]), ([1, 3, 10**6], [1]), ([2], [])])
def test_attempts_count_from_one_up_to_the_first_without_an_intent(intents, numbers):
    assert counted(intents) == numbers


def test_a_claim_far_ahead_shuts_nobody_out():
    fleet = Fleet(replicas=2)
    zero, one = fleet.join_all()
    claim(fleet.store, 0, 2)  # without an intent
    claim(fleet.store, 1, 10**6, ["f" * 16]), intend(fleet.store, 1, 10**6)  # far ahead
    zero._attempt.check_superseded(), one._attempt.check_superseded()
    assert AttemptRecords(fleet.store).all_numbers() == {0: [1], 1: [1]}
    play([zero, one], [1.0, 0.5])
    again = fleet.join(1)
    assert again._attempt.number == 2


def test_an_attempt_that_nobody_intended_cannot_be_claimed():
    fleet = Fleet(replicas=2)
    with pytest.raises(ConfigError, match=r"attempt 7 of replica 1 .* has no intent\.json"):
        claim_attempt(fleet.store, 1, 7, SystemClock(), STAMP)


def test_a_replica_that_its_user_starts_writes_its_own_intent_before_its_claim():
    fleet = Fleet(replicas=1)
    found = claim_attempt(fleet.store, 0, None, SystemClock(), STAMP)
    intent = AttemptRecords(fleet.store).intent(0, found.number)
    assert found.number == 1 and intent is not None and intent.executor == "by hand"


def test_a_claim_from_before_its_intent_counts_for_nobody():
    fleet = Fleet(replicas=2, rounds=9)
    for attempt in range(1, 10):
        claim(fleet.store, 1, attempt)
    zero, one = fleet.join_all()
    intend(fleet.store, 1, 2)  # and a claim of it is there, too
    one._attempt.check_superseded()
    records = AttemptRecords(fleet.store)
    assert records.claims(1) == {1} and records.newest_claim(1) == 1 and records.newest_claim(1, 1) == 1
    assert records.claim(1, 1) is not None and records.claim(1, 2) is None
    play([zero, one], [1.0, 0.5])
    (commit,) = fleet.commits()
    assert [answer.averaged for answer in commit.answers] == [True, True]
    with pytest.raises(Superseded):  # a second process of the attempt
        claim_attempt(fleet.store, 1, 1, SystemClock(), STAMP)
    done = verify_run(fleet.store)
    assert done.agrees and done.pinned["claims"] == 2
    made_before = {keys.claim(1, attempt, token) for attempt in (1, 2) for token in TOKENS}
    assert made_before <= set(done.foreign)


def test_claims_of_no_intent_shut_no_process_out_that_its_user_starts():
    fleet = Fleet(replicas=1)
    claim(fleet.store, 0, 1)
    found = claim_attempt(fleet.store, 0, None, SystemClock(), STAMP)
    assert found.number == 1 and sha256_hex(fleet.store.get(fleet.claim_key(0))) == found.claim_sha256


def made_before(scene: Scene, intents: Sequence[int], data: bytes) -> None:
    """Claims of the attempts 1 to 9 of all replicas, under the names that can be foreseen, and junk as some intents."""
    for replica_id in range(2):
        for attempt in range(1, 10):
            claim(scene.fleet.store, replica_id, attempt)
    for attempt in intents:
        scene.fleet.store.create(keys.intent(1, attempt), data)


def test_claims_of_no_intent_shut_no_attempt_out_that_a_coordinator_launches():
    scene = Scene(retry={"backoff_s": 0.0})
    made_before(scene, [], b"")
    coordinator = scene.coordinator()
    coordinator.step()
    zero, one = (claim_attempt(scene.fleet.store, i, 1, SystemClock(), STAMP) for i in range(2))
    scene.ends(1, 1, ReplicaState.FAILED)
    scene.steps(coordinator, 2)
    assert scene.executor.launched == [(0, 1), (1, 1), (1, 2)]
    zero.check_superseded(), one.check_superseded()  # attempt 2 is intended, and only a claim from before is there
    claim_attempt(scene.fleet.store, 1, 2, SystemClock(), STAMP).check_superseded()
    with pytest.raises(Superseded):
        one.check_superseded()
    records = AttemptRecords(scene.fleet.store)
    tokens = [intent.claim_token for who in ((0, 1), (1, 1), (1, 2)) if (intent := records.intent(*who)) is not None]
    assert len(set(tokens)) == 3 and all(len(token) == 16 for token in tokens)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"", b"{}"])
def test_a_coordinator_goes_on_with_the_next_attempt_after_intents_that_are_junk(data: bytes):
    scene = Scene(retry={"backoff_s": 0.0})
    made_before(scene, range(2, 10), data)
    coordinator = scene.coordinator()
    coordinator.step()
    assert scene.executor.launched == [(0, 1), (1, 1)]
    one = claim_attempt(scene.fleet.store, 1, 1, SystemClock(), STAMP)
    one.check_superseded()
    scene.ends(1, 1, ReplicaState.FAILED)
    scene.steps(coordinator, 3)
    assert scene.executor.launched == [(0, 1), (1, 1), (1, 10)]
    assert claim_attempt(scene.fleet.store, 1, 10, SystemClock(), STAMP).number == 10


@pytest.mark.slow
def test_a_real_run_ends_though_claims_of_all_its_attempts_are_there_before_it(start, tmp_path):
    store = open_store(str(tmp_path / "bucket"))
    for replica_id in range(2):
        for attempt in range(1, 10):
            claim(store, replica_id, attempt)
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [1]})
    strike = Strike(tmp_path, [1], signal.SIGKILL)
    assert run.wait(on_poll=strike).status == "completed"
    reader = reader_of(tmp_path / "bucket")
    assert strike.done and reader.attempts.numbers(0) == [1] and reader.attempts.numbers(1) == [1, 2]
    assert verify_run(store).agrees


@pytest.mark.parametrize("junk", [b"[" * 100_000, None], ids=["junk", "of another attempt"])
def test_an_intent_that_is_none_is_claimed_by_nobody(junk: bytes | None):
    fleet = Fleet(replicas=2, rounds=9)
    _, one = fleet.join_all()
    other = Intent(**STAMP(), replica_id=0, attempt=7, leg=1, executor="x", why="x")
    fleet.store.create(keys.intent(1, 2), junk or other.to_bytes())
    claim(fleet.store, 1, 2)
    one._attempt.check_superseded()
    with pytest.raises(ConfigError, match=r"attempt 2 of replica 1 .* has no intent\.json that can be read"):
        claim_attempt(fleet.store, 1, 2, SystemClock(), STAMP)


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
    claim(fleet.store, 1, 7)
    intend(fleet.store, 1, 2)
    honest = answer(zero, 1.0)
    forged = honest.model_copy(update={"replica_id": 1, "claim_sha256": one._attempt.claim_sha256, **change})
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
    key = fleet.claim_key(1)
    kept = fleet.store.get(key)
    fleet.store.put(key, kept.replace(b'"pid":', b'"pid":1'))
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == key
    fleet.store.delete(key)
    found = verify_run(fleet.store).disagreement
    assert found is not None and (found.key, found.words[:10]) == (key, "is missing")
