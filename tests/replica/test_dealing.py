"""Which payload shards a replica receives: those that the dealing names, and no others."""

import pytest
from protocol_fleet import Fleet, answer

from diloco_orchestrator.allreduce.recent_payloads import RecentPayloads
from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.protocol import keys
from replica.rounds.received import ExpectedContribution, PayloadShard, ReceivedResponses, everything


def but_of_two(manifests):
    return [shard for shard in everything(manifests) if shard.manifest.replica_id != 2]


@pytest.mark.parametrize(("dealing", "kinds"), [(everything, "delta delta unverifiable"), (but_of_two, "delta " * 3)])
def test_what_is_not_dealt_is_neither_verified_nor_held(dealing, kinds):
    fleet = Fleet(replicas=3)
    participants = fleet.join_all()
    manifests = [answer(each, 1.0) for each in participants]
    fleet.engine.put(keys.payload(1, 2, 1, 0), b"other bytes")
    payloads, attempt = RecentPayloads(), participants[0]._attempt
    received = ReceivedResponses(fleet.store, NoBackground(), payloads, attempt.authors, dealing)
    expected = ExpectedContribution(round=1, leg=1, fragment=0, numel=12, config=fleet.config)
    received.receive(received.unread(expected), expected)
    assert [each.kind for each in received.answers()] == kinds.split()
    assert [PayloadShard(each, 0).name in payloads for each in manifests] == [True, True, False]
