"""Check records of one replica, a stranger too, that say more than an honest one can: none counts, or fills memory."""

import tracemalloc
from typing import Any

import pytest
from long_history import RequestCounter
from protocol_fleet import Fleet, answer, close, together

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import (
    AverageCheck,
    Checked,
    DealtScore,
    PublishedAverage,
    ReadShards,
    WorkScore,
)
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.store.base import Store
from replica.rounds.participant import Participant

LIAR, FIRST, MIB = 4, 20, 2**20  # FIRST: number of its first false record
DIGEST = bulk_digest(b"any")


def read_of(manifest: int, *indices: int) -> ReadShards:
    return ReadShards(manifest_sha256=f"{manifest:064x}", good=indices)


def averages(count: int) -> tuple[AverageCheck, ...]:
    published = (PublishedAverage(round=1, shard=shard, replicas=(1, 2), digest=DIGEST) for shard in range(count))
    return tuple(AverageCheck(average=each, false=True) for each in published)


def scores(count: int) -> tuple[WorkScore, ...]:
    said = {"payload": DIGEST, "count": 2, "change": 0.0, "squares": 0.0, "beside": None, "beside_squares": None}
    return tuple(WorkScore(replica_id=each, **said) for each in range(count))


def dealt(count: int) -> tuple[DealtScore, ...]:
    return tuple(DealtScore(replica_id=each, payload=DIGEST, gap=0.0, usual=0.0) for each in range(count))


# Of five replicas, whose payloads have one shard each.
TOO_MUCH: dict[str, list[dict[str, Any]]] = {
    "8 MiB": [{"read": (read_of(each, *range(1_050_000)),)} for each in range(4)],
    "a shard that no payload has": [{"read": (read_of(1, 1),)}],
    "a shard twice": [{"read": (read_of(1, 0, 0),)}],
    "contributions": [{"read": tuple(read_of(each) for each in range(6))}],
    "averages": [{"averages": averages(65)}],
    "scores": [{"scored": scores(6)}],
    "scores on dealt data": [{"dealt": dealt(6)}],
}


def written(participants: list[Participant], fields: dict[str, Any], number: int) -> int:
    """The bytes of a record with these fields, which the liar has created."""
    attempt = participants[LIAR]._attempt
    who = {"replica_id": LIAR, "attempt": 1, "claim_sha256": attempt.claim_sha256, "number": number}
    record = Checked(**attempt.stamp(), **who, round=1, leg=1, **{"read": (), **fields})
    assert attempt.writer.create(record) is not None
    return len(record.to_bytes())


def closed(participants: list[Participant]) -> list[int]:
    """The numbers of the liar's false records that the round's commit names."""
    for each in participants:
        answer(each, 1.0)
    commit = together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]
    assert commit.applied and all(each.averaged for each in commit.answers)
    return [each.number for each in commit.checks or () if each.replica_id == LIAR and each.number >= FIRST]


def fleet_of(store: Store | None = None) -> tuple[Fleet, list[Participant]]:
    fleet = Fleet(store=store, replicas=5, invited=[3, LIAR], quorum="all", path="scatter_reduce", aggregate="mean")
    return fleet, fleet.join_all()


@pytest.mark.parametrize("what", TOO_MUCH)
def test_a_check_record_that_says_more_than_an_honest_one_can_is_named_by_no_commit(what):
    fleet, participants = fleet_of()
    for number, fields in enumerate(TOO_MUCH[what], FIRST):
        written(participants, fields, number)
    assert closed(participants) == []
    assert verify_run(fleet.store).disagreement is None


def test_an_attempt_reports_as_many_shards_as_there_are():
    """Records about contributions that do not exist; of the last one some shards are too many."""
    fleet, participants = fleet_of()
    for number in range(3):
        about = tuple(read_of(10 * number + each, 0) for each in range(2))
        written(participants, {"read": about}, FIRST + number)
    assert len(closed(participants)) < 3
    assert verify_run(fleet.store).disagreement is None


def test_long_check_records_fill_nobodys_memory():
    """Each took 430 MB of every replica until the round ended, and one replica has 64 that count.

    The last one is where this replica would write its own first record, which somebody without a key may have taken.
    """
    store = RequestCounter()
    _, participants = fleet_of(store)
    for number, fields in enumerate(TOO_MUCH["8 MiB"], FIRST):
        assert 6 * MIB < written(participants, fields, number) < most_bytes(keys.checked(1, LIAR, number))
    taken = Checked.from_bytes(store.get(keys.checked(1, LIAR, FIRST)), "")
    store.put(keys.checked(1, 0, 1), taken.model_copy(update={"replica_id": 0, "number": 1}).to_bytes())
    for each in participants:
        answer(each, 1.0)
    del taken
    store.forget()
    tracemalloc.start()
    try:
        participants[0]._closer.poll()
        participants[0]._closer._checks.exchange(participants[0]._closer._received)
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()
    assert not [key for key in store.gets if key.startswith("rounds/00000001/checked/4.2")]
    assert keys.checked(1, 0, 2) in store.gets  # its own
