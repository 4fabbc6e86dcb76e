"""Which payload shards a replica receives: those that the dealing names, and no others."""

import pytest
from protocol_fleet import Fleet, answer

from diloco_orchestrator.allreduce.recent_payloads import RecentPayloads
from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.protocol import keys
from replica.rounds.counted_work import CountedWork
from replica.rounds.payload_shards import PayloadShard, all_shards
from replica.rounds.received import ExpectedContribution, ReceivedResponses


def but_of_two(manifests):
    return [shard for shard in all_shards(manifests) if shard.manifest.replica_id != 2]


@pytest.mark.parametrize(("dealing", "kinds"), [(all_shards, "delta delta unverifiable"), (but_of_two, "delta " * 3)])
def test_what_is_not_dealt_is_neither_verified_nor_held(dealing, kinds):
    fleet = Fleet(replicas=3)
    participants = fleet.join_all()
    manifests = [answer(each, 1.0) for each in participants]
    fleet.engine.put(keys.payload(1, 2, 1, 0), b"other bytes")
    payloads, attempt = RecentPayloads(), participants[0]._attempt
    received = ReceivedResponses(fleet.store, NoBackground(), payloads, attempt.authors, dealing, CountedWork(attempt))
    expected = ExpectedContribution(
        round=1, leg=1, fragment=0, numel=12, shard_numel=fleet.config.shard_numel, config=fleet.config
    )
    received.receive(received.unread(expected), expected)
    assert [each.kind for each in received.answers()] == kinds.split()
    assert [PayloadShard(each, 0).name in payloads for each in manifests] == [True, True, False]


def test_an_own_manifest_that_the_store_damaged_is_noticed_before_a_commit_names_it():
    fleet = Fleet(replicas=2)
    zero, _ = fleet.join_all()
    manifest, attempt = answer(zero, 1.0), zero._attempt
    authors, counted = attempt.authors, CountedWork(attempt)
    received = ReceivedResponses(fleet.store, NoBackground(), RecentPayloads(), authors, all_shards, counted)
    expected = ExpectedContribution(
        round=1, leg=1, fragment=0, numel=12, shard_numel=fleet.config.shard_numel, config=fleet.config
    )
    received.take_own(manifest.to_bytes(), 0, expected)
    assert received.unread(expected) == {} and received.confirm_own(0, 1)
    received.take_own(manifest.to_bytes(), 0, expected)
    fleet.engine.put(keys.contribution(1, 0), manifest.to_bytes().replace(b"delta", b"atled"))
    assert not received.confirm_own(0, 1)
    received.receive(received.unread(expected), expected)
    assert [each.kind for each in received.answers()] == ["unverifiable"]
