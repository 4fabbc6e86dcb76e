"""A base that is rebuilt a shard at a time beside another one."""

import random

import pytest
import torch
from protocol_fleet import Fleet, answer
from simulation_machines import flip_bit

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild, rebuild_beside
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.snapshots.stored_shards import StoredShards


@pytest.fixture
def fleet_and_base() -> tuple[Fleet, Base]:
    """After three rounds, of which the second has a snapshot."""
    fleet = Fleet(replicas=2, rounds=8, snapshot_every=2)
    both = [fleet.join(0), fleet.join(1)]
    for _ in range(3):
        for number, participant in enumerate(both):
            answer(participant, 1.0 + number)
        for participant in both:
            participant.close()
            participant.write_snapshot_if_due()
    both[0]._snapshots.wait()
    return fleet, both[0].base


def test_it_has_the_digest_of_a_whole_rebuild_and_finds_no_difference(fleet_and_base):
    fleet, base = fleet_and_base
    log = RunLog(fleet.store)
    begin = log.newest_begin().record
    for until in (None, 2, 1):
        tip, beside = rebuild(log, begin, until), rebuild_beside(log, begin, until, base=base)
        assert (beside.digest, beside.snapshot_round) == (tip.digest, tip.snapshot_round)
        assert bool(beside.shards.differing) == (until is not None)
    assert tip.snapshot_round == 0 and rebuild(log, begin).snapshot_round == 2


@pytest.mark.parametrize("where", ["parameters", "momenta"])
def test_a_flipped_bit_is_found_and_corrected_in_place(fleet_and_base, where):
    fleet, base = fleet_and_base
    log, right = RunLog(fleet.store), base.digest()
    flip_bit(getattr(base, where)["bias"], 0)
    assert base.digest() != right
    beside = rebuild_beside(log, log.newest_begin().record, base=base)
    assert beside.digest == right and list(beside.shards.differing) == [(0, 0)]
    beside.correct(base)
    assert base.digest() == right


@pytest.mark.parametrize("file", ["model.safetensors", "outer.safetensors"])
def test_a_snapshot_with_a_flipped_bit_is_not_rebuilt_from(fleet_and_base, file, caplog):
    fleet, base = fleet_and_base
    key = keys.snapshot(2, file)
    data = bytearray(fleet.store.get(key))
    data[-3] ^= 1
    fleet.engine.put(key, bytes(data))
    log = RunLog(fleet.store)
    beside = rebuild_beside(log, log.newest_begin().record, base=base)
    assert beside.snapshot_round == 0 and not beside.shards.differing and "its record names" in caplog.text
    fleet.engine.put(key, bytes(data[:-4]))
    assert rebuild_beside(log, log.newest_begin().record, base=base).snapshot_round == 0
    assert "ends before its header says" in caplog.text


def test_shards_that_cut_tensors_are_read_by_ranges(fleet_and_base):
    fleet, _ = fleet_and_base
    log = RunLog(fleet.store)
    tip, snapshot = rebuild(log, log.newest_begin().record, 2).base, log.snapshot(2)
    start = log.start().record.model_copy(update={"shard_numel": 3})
    cut = Base(tip.parameters, tip.momenta, start.fragments, 3)
    stored = StoredShards(fleet.store, StoredSnapshot(fleet.store, 2, snapshot), start)
    ours = [stored.read(0, index) for index in range(len(cut.shards(0)))]
    assert len(ours) > 1 and all(a.equals(b) for a, b in zip(ours, cut.shards(0), strict=True))
    order = random.Random(0).sample(range(len(ours)), len(ours))
    assert all(torch.equal(stored.read(0, index).parameters, ours[index].parameters) for index in order)
    with pytest.raises(RecordInvalid, match="its record names"):
        stored.check_all()  # the digest covers the layout
