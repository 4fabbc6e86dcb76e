"""What a round believes: bytes, manifests, commits and scores that do not belong where they are found."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from long_history import RequestCounter
from protocol_fleet import BY_HAND, Fleet, answer, play, report, together
from stored_snapshots import complete_snapshots

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.codecs.table import Encoded, encode
from diloco_orchestrator.errors import QuorumLost, RecordInvalid
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.protocol import keys, weights
from diloco_orchestrator.protocol.attempt_records import Intent
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import (
    Commit,
    Contribution,
    Disagreeing,
    Metric,
    Origin,
    Payload,
    Progress,
    Shard,
)
from diloco_orchestrator.store.memory import MemoryStore
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)


def commit_by(participant: Participant) -> Commit:
    """The commit with which a replica closed its open round."""
    participant.close()
    last = participant._tip.last
    assert last is not None
    return last


def forge(fleet: Fleet, manifest: Contribution, values: torch.Tensor) -> Contribution:
    """Put other numbers behind a manifest, which names their digest: its author is faulty, the network is not."""
    assert manifest.payload is not None
    data = encode(values, manifest.payload.codec)
    fleet.store.put(keys.payload(manifest.round, manifest.replica_id, manifest.attempt, 0), data)
    shard = Shard(digest=bulk_digest(data), size=len(data))
    forged = manifest.model_copy(update={"payload": manifest.payload.model_copy(update={"shards": (shard,)})})
    fleet.store.put(keys.contribution(manifest.round, manifest.replica_id), forged.to_bytes())
    return forged


@pytest.mark.parametrize("changes", [{"kind": "scores", "payload": None}, {"base_digest": ""}])
def test_a_manifest_that_no_commit_can_average_makes_none_void(changes):
    """Counted as a contribution it made the commit of every round void, and with the third one the run failed."""
    fleet = Fleet(replicas=3, quorum=2)
    participants = fleet.join_all()
    for round_ in (1, 2, 3):
        manifests = [answer(each, 1.0) for each in participants]
        fleet.engine.put(keys.contribution(round_, 2), manifests[2].model_copy(update=changes).to_bytes())
        commits = together([lambda each=each: commit_by(each) for each in participants])  # type: ignore[misc]
        assert commits[0].applied and [each.kind for each in commits[0].answers] == ["delta", "delta", "unverifiable"]
    assert verify_run(fleet.store).disagreement is None


# -- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_averaged_though_their_digest_is_right(bad):
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    values = torch.ones(12)
    values[7] = bad
    forge(fleet, answer(two, 1.0), values)
    answer(one, 1.0)
    commit = commit_by(one)
    assert [(a.kind, a.averaged) for a in commit.answers] == [("delta", True), ("unverifiable", False)]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in one.base.parameters.values())


@pytest.mark.parametrize("declared", [None, 1.0, 1e30])
def test_finite_numbers_whose_sum_is_not_finite_are_not_averaged(declared):
    """[3e38, 3e38, 1, 1] made a base of -inf. `declared`: the norm in the manifest; None: that of other numbers."""
    fleet = Fleet(replicas=4, quorum=2, timing=BY_HAND)
    clock = ManualClock()
    one, two, *hostile = (fleet.join(i, clock=clock) for i in range(4))
    for each in hostile:
        forged = forge(fleet, answer(each, 1.0), torch.full((12,), 3e38))
        if declared is not None:
            assert forged.payload is not None
            payload = forged.payload.model_copy(update={"norms": (declared,)})
            forged = forged.model_copy(update={"payload": payload})
            fleet.store.put(keys.contribution(1, each._attempt.replica_id), forged.to_bytes())
    answer(one, 1.0), answer(two, 1.0)
    commit = commit_by(one)
    assert [(a.kind, a.averaged) for a in commit.answers] == [("delta", True)] * 2 + [("unverifiable", False)] * 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in one.base.parameters.values())


def test_a_payload_with_more_elements_than_the_fragment_is_not_averaged():
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    said = answer(two, 1.0)
    data = encode(torch.ones(13), "fp32")
    fleet.store.put(keys.payload(1, 1, 1, 0), data)
    assert said.payload is not None
    shards = (Shard(digest=bulk_digest(data), size=len(data)),)
    longer = Payload(codec="fp32", numel=13, shard_numel=said.payload.shard_numel, shards=shards)
    fleet.store.put(keys.contribution(1, 1), said.model_copy(update={"payload": longer}).to_bytes())
    answer(one, 1.0)
    assert [a.kind for a in commit_by(one).answers] == ["delta", "unverifiable"]


def test_equal_bytes_of_two_replicas_are_read_one_by_one():
    """Only one of the two objects is damaged in the store."""
    fleet = Fleet(replicas=3, quorum=2, timing=BY_HAND)
    clock = ManualClock()
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    answer(one, 1.0), answer(two, 1.0)
    key = keys.payload(1, 2, 1, 0)
    fleet.store.put(key, fleet.store.get(key)[:-1] + b"!")
    answer(zero, 1.0)
    assert [a.kind for a in commit_by(zero).answers] == ["delta", "delta", "unverifiable"]


def test_a_replica_reads_every_payload_once_and_its_own_never():
    store = RequestCounter()
    participants = Fleet(replicas=3, store=store).join_all()
    for participant in participants:
        answer(participant, 1.0)
    participants[0].close()
    read = sorted(key for key in store.gets if "/payload/" in key)
    assert read == [keys.payload(1, 1, 1, 0), keys.payload(1, 2, 1, 0)]


def test_what_a_store_lost_of_a_payload_is_found_by_the_other_replicas():
    """Its author, which was answered that the object exists, does not read it back."""
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    answer(two, 1.0), answer(one, 1.0)
    key = keys.payload(1, 0, 1, 0)
    fleet.store.put(key, fleet.store.get(key)[:-1] + b"!")
    assert [(a.kind, a.averaged) for a in commit_by(two).answers] == [("unverifiable", False), ("delta", True)]


# -- manifests --------------------------------------------------------------------------------------------------------


def test_who_follows_a_commit_refuses_a_manifest_that_was_changed_after_it():
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    answer(one, 1.0)
    said = answer(two, 2.0)
    two.close()
    changed = said.model_copy(update={"train_s": said.train_s + 1.0})
    fleet.store.put(keys.contribution(1, 1), changed.to_bytes())
    with pytest.raises(RecordInvalid, match="is not the manifest that the commit of round 1 names"):
        one.close()
    with pytest.raises(RecordInvalid, match="is not the manifest that the commit of round 1 names"):
        fleet.join(0)


def test_who_saw_another_manifest_than_the_commit_names_averages_the_one_that_is_named(caplog):
    """A replica saw a manifest in the store; the writer of the commit saw another one under the same key."""
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    answer(one, 1.0)
    said = answer(two, 2.0)
    one._closer.poll()
    data = encode(torch.full((12,), 5.0), "fp32")
    fleet.store.put(keys.payload(1, 1, 2, 0), data)
    assert said.payload is not None
    shards = (Shard(digest=bulk_digest(data), size=len(data)),)
    payload = said.payload.model_copy(update={"shards": shards, "norms": (Encoded(data, "fp32", 12).measure().norm,)})
    claim = fleet.join(1)._attempt.claim_sha256  # of attempt 2
    other = said.model_copy(update={"attempt": 2, "claim_sha256": claim, "payload": payload})
    fleet.store.put(keys.contribution(1, 1), other.to_bytes())
    fleet.join(0).close()  # another attempt, which sees the other manifest, commits
    one.close()
    assert one.digest == fleet.join(1).digest and fleet.commits()[0].answers[1].attempt == 2
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]  # no detour over the bucket


def test_answers_of_replicas_that_the_run_does_not_have_are_left_aside():
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    stranger = answer(two, 2.0).model_copy(update={"replica_id": 7})
    fleet.store.put(keys.contribution(1, 7), stranger.to_bytes())
    answer(one, 1.0)
    assert [a.replica_id for a in commit_by(one).answers] == [0, 1]


MANY = tuple(Origin(round=10**98 + i, steps=0) for i in range(65_000))
TOO_LONG = [
    lambda said: {"origins": (*said.origins, *MANY)},
    lambda said: {"metrics": {f"extra.{i:060}": Metric(sum=0.0, count=1) for i in range(80_000)}},
    lambda said: {"disagreeing": (Disagreeing(replica_id=9, round=1, shards=1, agreement=0.0, usual=0.0),) * 90_000},
]


@pytest.mark.parametrize("change", TOO_LONG, ids=["origins", "names of metrics", "disagreeing"])
def test_a_manifest_of_which_a_commit_would_repeat_too_much_makes_no_commit_too_long(change):
    """Who wrote the commit followed it, the others read one that is cut off, and so void: three such rounds fail a run.

    With a manifest of one replica, as long as one may be.
    """
    fleet = Fleet(replicas=3, quorum=2, timing=BY_HAND)
    clock = ManualClock()
    one, two, three = (fleet.join(i, clock=clock) for i in (0, 1, 2))
    for each in (one, two, three):
        answer(each, 1.0)
    for each in (one, two, three):
        each.close()
    said = answer(three, 1.0)
    long = said.model_copy(update=change(said)).to_bytes()
    assert len(long) < most_bytes(keys.contribution(2, 2))
    fleet.store.put(keys.contribution(2, 2), long)
    answer(one, 1.0), answer(two, 1.0)
    one.close(), two.close()
    assert len(fleet.store.get(keys.commit(2))) < 20_000
    commit = fleet.commits()[-1]
    assert [(a.kind, a.averaged) for a in commit.answers] == [("delta", True)] * 2 + [("unverifiable", False)]
    assert "no commit can repeat so much" in commit.answers[2].reason
    assert one.digest == two.digest


def test_a_late_manifest_that_says_another_round_changes_no_deadline():
    """It counted as the newest round, so that the times of all others were too old, and no round had a deadline."""
    fleet = Fleet(replicas=3, rounds=9, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    one, two, three = (fleet.join(i, clock=clock) for i in (0, 1, 2))
    for taking in ([one, two, three], [one, two]):
        clock.advance(1.0)
        for each in taking:
            answer(each, 1.0)
        for each in taking:
            each.close()
    before = one._timing.deadline()
    said = answer(three, 1.0)
    far = {"round": 10**9, "origins": (Origin(round=10**9, steps=30),)}
    fleet.store.put(keys.contribution(2, 2), said.model_copy(update=far).to_bytes())
    clock.advance(1.0)
    answer(one, 1.0), answer(two, 1.0)
    one.close(), two.close()
    assert fleet.commits()[-1].round == 3
    assert one._timing.deadline() == before is not None


class DamagesOnce(MemoryStore):
    """Confirms a manifest and keeps other bytes of it; raises if a reader does not stop to ask for it."""

    reads = 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.reads += key == keys.contribution(2, 0)
        assert self.reads < 100, "it is read without end"
        return super().get(key, start, end)

    def create(self, key: str, data: bytes) -> bool:
        created = super().create(key, data)
        if created and key == keys.contribution(2, 0):
            self.put(key, data[:-20])
        return created


def test_a_replica_whose_manifest_the_store_damaged_ends_its_round_though_others_are_away():
    """It took its own manifest for good, read it back, dropped it and took it for good again, without end."""
    fleet = Fleet(replicas=3, rounds=9, quorum=1, timing=BY_HAND, store=DamagesOnce())
    clock = ManualClock()
    one, two, three = (fleet.join(i, clock=clock) for i in (0, 1, 2))
    for each in (one, two, three):
        answer(each, 1.0)
    for each in (one, two, three):
        each.close()
    answer(one, 1.0), answer(two, 1.0)
    one.close(), two.close()
    commit = fleet.commits()[-1]
    assert [(a.replica_id, a.kind) for a in commit.answers] == [(0, "unverifiable"), (1, "delta")]
    said = answer(one, 1.0)
    assert [origin.round for origin in said.origins] == [2, 3]  # it is carried


def test_a_manifest_that_cannot_be_read_hides_nobody_else_from_the_next_roster():
    fleet = Fleet(replicas=4, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    zero, one, two, three = (fleet.join(i, clock=clock) for i in range(4))
    play_round = [zero, one, two, three]
    clock.advance(2.0)
    for participant in play_round:
        answer(participant, 1.0)
    for participant in play_round:
        participant.close()
    clock.advance(2.0)
    answer(zero, 1.0)
    zero.close()
    assert zero.open.roster == (0,)
    fleet.store.put(keys.contribution(2, 1), b"not json")
    answer(two, 1.0)  # late, but there
    clock.advance(2.0)
    answer(zero, 1.0)
    zero.close()
    assert zero.open.roster == (0, 2)


def test_a_late_manifest_that_cannot_be_read_is_read_once_however_long_the_round_waits():
    """It was read at every poll: up to 8 MiB, by every replica, several times a second."""
    store = RequestCounter()
    fleet = Fleet(replicas=3, rounds=9, quorum=2, timing=BY_HAND, store=store)
    clock = ManualClock()
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    for taking in ([zero, one, two], [zero, one]):
        clock.advance(2.0)
        for participant in taking:
            answer(participant, 1.0)
        for participant in taking:
            participant.close()
    fleet.store.put(keys.contribution(2, 2), b"not json")
    clock.advance(2.0)
    answer(zero, 1.0)
    store.forget()
    with pytest.raises(QuorumLost):
        zero.close()
    assert store.gets.count(keys.contribution(2, 2)) == 1 and store.lists > 10


# -- commits ----------------------------------------------------------------------------------------------------------


def test_a_commit_copied_from_another_round_is_void():
    fleet = Fleet(replicas=1)
    participant = fleet.join(0)
    play([participant], [1.0])
    fleet.store.put(keys.commit(2), fleet.store.get(keys.commit(1)))
    again = fleet.join(0)
    assert again.open.round == 3 and again.digest == participant.digest
    assert fleet.commits()[1].reason.endswith("it says it is round 1")


def test_a_commit_that_does_not_continue_the_log_is_void_and_whoever_knows_better_is_not_followed():
    """It was changed after one replica had followed it. The two read different logs until the next commit."""
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    play([one, two], [1.0, 1.0])
    answer(one, 1.0), answer(two, 1.0)
    two.close()
    body = json.loads(fleet.store.get(keys.commit(2)))
    fleet.store.put(keys.commit(2), json.dumps({**body, "previous": "0" * 64}).encode())
    assert not one.close().applied and one.digest != two.digest
    answer(one, 1.0), answer(two, 1.0)
    two.close()
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        one.close()


def test_who_loses_the_race_for_the_commit_follows_the_winners():
    """Both see a quorum, but not the same answers; whose commit comes second takes the first one's base."""
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    answer(one, 1.0)
    first = commit_by(one)
    assert [a.replica_id for a in first.answers] == [0]
    answer(two, 5.0)
    assert commit_by(two) == first and two.digest == one.digest


class Contested(MemoryStore):
    """Calls `before_commit` once, when a commit is about to be created."""

    before_commit: Callable[[], object] | None = None

    def create(self, key: str, data: bytes) -> bool:
        if key == keys.commit(1) and self.before_commit is not None:
            call, self.before_commit = self.before_commit, None
            call()
        return super().create(key, data)


def test_who_would_have_averaged_others_than_the_commit_that_was_first_averages_those(caplog):
    store, clock = Contested(), ManualClock()
    fleet = Fleet(replicas=2, quorum=1, store=store, timing=BY_HAND)
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    answer(one, 1.0)
    one._closer.poll()
    answer(two, 5.0)
    clock.advance(30.0)
    store.before_commit = lambda: one._closer._commit(*one._closer._decide())  # it has seen its own answer only
    assert [a.replica_id for a in commit_by(two).answers] == [0]
    one.close()
    assert two.digest == one.digest
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]  # no detour over the bucket


def test_a_step_that_was_interrupted_half_way_is_not_taken_up_again(monkeypatch, caplog):
    """Ctrl-C in a notebook, then the cell again: the base is rebuilt from the bucket."""
    fleet = Fleet(replicas=1)
    participant = fleet.join(0)
    answer(participant, 1.0)

    def half_way(*_: object) -> None:
        participant.base.parameters["bias"].fill_(7.0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(outer_step, "step_shard", half_way)
        with pytest.raises(KeyboardInterrupt):
            participant.close()
    assert participant.open.round == 1
    participant.close()
    assert participant.base.digest() == participant.digest == fleet.join(0).digest
    assert "elsewhere; rebuilding" in caplog.text


def test_a_round_has_one_commit_though_all_write_it_at_once():
    for _ in range(5):
        fleet = Fleet(replicas=4, quorum=1)
        participants = fleet.join_all()
        for value, participant in enumerate(participants):
            answer(participant, float(value))
        together([participant.close for participant in participants])
        assert {p._tip.position.sha256 for p in participants} == {sha256_hex(fleet.store.get(keys.commit(1)))}
        assert len({p.digest for p in participants}) == 1


def test_a_void_commit_averages_nobody_for_everybody_and_its_work_is_carried(monkeypatch):
    """The writer's machine derives another weight than all others: nobody refuses its commit, and nobody applies it."""
    fleet = Fleet(replicas=2, rounds=9)
    one, two = fleet.join_all()
    before = one.digest
    with monkeypatch.context() as wrong:
        seven = {"weight": 7}
        wrong.setattr(weights, "weighed", lambda answers, shares: tuple(a.model_copy(update=seven) for a in answers))
        answer(one, 1.0), answer(two, 3.0)
        one.close()
    two.close()
    assert one.digest == two.digest == before == fleet.join(0).digest
    assert one._tip.position == two._tip.position and one.open.outer_step == 0 and one.open.round == 2
    assert not one.open.final_evaluation and fleet.commits()[0].reason.startswith(
        "void, so that nobody is averaged: replica 0 has"
    )
    for participant in (one, two):
        assert [origin.round for origin in answer(participant, 1.0).origins] == [1, 2]
    one.close(), two.close()
    assert one.digest == two.digest != before and one.open.outer_step == 1
    done = verify_run(fleet.store)
    assert done.agrees and "is void and averages nobody" in done.notes[0]


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_that_holds_another_base_is_not_confirmed_and_not_loaded():
    """Whole and consistent in itself, but of another round. The newest confirmed one is loaded instead."""
    fleet = Fleet(replicas=1, snapshot_every=1)
    participant = fleet.join(0)
    for _ in range(2):
        play([participant], [1.0])
        participant.write_snapshot_if_due()
    for info in list(fleet.store.list(keys.snapshot(1, ""))):
        name = info.key.rpartition("/")[2]
        data = fleet.store.get(info.key).replace(b'"round":1', b'"round":2')
        fleet.store.put(keys.snapshot(2, name), data)
    again = fleet.join(0)
    assert (again.digest, again._tip.value.snapshot_round) == (participant.digest, 1)


def test_a_round_that_moved_nothing_leaves_no_snapshot():
    """Not from who saw it, nor from who rebuilt what was before it, nor at the end of the leg."""
    fleet = Fleet(replicas=1, snapshot_every=1, rounds=9)
    participant = fleet.join(0)
    for value in (1.0, float("nan")):
        play([participant], [value])
        participant.write_snapshot_if_due()
    again = fleet.join(0)
    again.write_snapshot_if_due()
    for _ in range(2):
        play([again], [float("nan")])
    assert again.open.stopped
    again.finish_leg()
    assert complete_snapshots(fleet.store) == [0, 1]


def test_the_lowest_contributor_writes_the_snapshot_though_replica_0_is_away():
    fleet = Fleet(replicas=3, snapshot_every=1, quorum=1, timing=BY_HAND)
    clock = ManualClock()
    joined = [fleet.join(i, clock=clock) for i in (1, 2)]
    for participant in joined:
        answer(participant, 1.0)
    for participant in joined:
        participant.close()
    joined[1].write_snapshot_if_due()
    assert complete_snapshots(fleet.store) == [0]
    joined[0].write_snapshot_if_due()
    assert complete_snapshots(fleet.store) == [0, 1]


def test_snapshots_are_due_by_outer_steps_and_not_by_rounds():
    fleet = Fleet(replicas=1, snapshot_every=2, rounds=9)
    participant = fleet.join(0)
    for value in (1.0, float("nan"), 1.0, 1.0):  # outer steps 1, 1, 2, 3 after rounds 1 to 4
        play([participant], [value])
        participant.write_snapshot_if_due()
    assert complete_snapshots(fleet.store) == [0, 3]


# -- scores -----------------------------------------------------------------------------------------------------------


def test_a_score_of_a_share_that_was_dealt_to_another_replica_does_not_count():
    fleet = Fleet(replicas=2, scored=True)
    participants = fleet.join_all()
    play(participants, [1.0, 1.0], [report(share=0, score=0.25), report(share=0, score=0.75)])
    verdict = fleet.commits()[0].verdict
    assert verdict is not None and verdict.value == pytest.approx(0.25)


def test_scores_of_another_base_are_not_folded():
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND, scored=True)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    said = answer(two, 1.0, report(share=1, score=0.9))
    fleet.store.put(keys.contribution(1, 1), said.model_copy(update={"base_digest": "b3:" + "0" * 64}).to_bytes())
    answer(one, 1.0, report(share=0, score=0.1))
    commit = commit_by(one)
    assert [a.kind for a in commit.answers] == ["delta", "wrong_base"]
    assert commit.verdict is not None and commit.verdict.value == pytest.approx(0.1)


def test_scores_of_who_is_not_averaged_count_and_its_training_metric_does_not():
    """The model was scored before the round; what went wrong in training says nothing about that."""
    fleet = Fleet(replicas=2, quorum=1, timing=BY_HAND, scored=True)
    clock = ManualClock()
    one, two = (fleet.join(i, clock=clock) for i in (0, 1))
    answer(two, float("nan"), report(share=1, score=0.9, in_loop=5.0))
    answer(one, 1.0, report(share=0, score=0.1, in_loop=1.0))
    commit = commit_by(one)
    assert commit.verdict is not None and commit.verdict.value == pytest.approx(0.5)
    assert commit.guard is not None and commit.guard["in_loop"] == 1.0


@pytest.mark.parametrize(("broken_ones", "fires"), [((1,), False), ((0, 1), True)])
def test_training_metrics_that_are_not_finite_stop_the_run_only_if_most_are(broken_ones, fires):
    fleet = Fleet(replicas=2, rounds=4, guard={"rule": "heldout", "min_steps": 100}, scored=True)
    participants = fleet.join_all()
    reports = [report(share=i, score=0.1) for i in (0, 1)]
    for index in broken_ones:
        reports[index] = replace(reports[index], in_loop=Metric(sum=None, count=30))
    for _ in range(4):
        play(participants, [1.0, 1.0], reports)
        if participants[0].open.stopped:
            break
    verdict = fleet.commits()[-1].verdict
    assert verdict is not None and verdict.fire is fires and ("nonfinite" in verdict.reason) is fires


# -- attempts ---------------------------------------------------------------------------------------------------------


def test_an_attempt_stays_while_its_successor_is_only_meant_to_be_launched():
    """A coordinator that cannot see this process writes an intent; the process leaves when somebody claims."""
    fleet = Fleet(replicas=1)
    participant = fleet.join(0)
    intent = Intent(**STAMP(), replica_id=0, attempt=2, leg=1, executor="far", why="it looks dead from here")
    fleet.store.create(keys.intent(0, 2), intent.to_bytes())
    participant._attempt.check_superseded()
    play([participant], [1.0])
    assert fleet.commits()[0].answers[0].attempt == 1


def test_who_loses_its_manifest_to_another_attempt_goes_on_from_that_ones_progress():
    fleet = Fleet(replicas=1)
    old = fleet.join(0)
    new = fleet.join(0)
    said = replace(report(), progress=Progress(cursor={"next": 7}, rng={}, inner_steps=7, tokens=0))
    first = answer(new, 1.0, said)
    standing = answer(old, 2.0)
    assert standing == first and standing.attempt == 2
    old.close()
    assert fleet.commits()[0].answers[0].attempt == 2
