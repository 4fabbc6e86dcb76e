"""A replica's saved state: the bytes it always had, in pieces if it is large, each read once and checked."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from protocol_fleet import Fleet, answer, close, report

from diloco_orchestrator.allreduce.owners import ALONE
from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.config.schedule import SyncSchedule
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.process.range_comparison import same_state
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.checkpoint import Checkpoint
from diloco_orchestrator.replica.training.diloco_loop import DiLoCoLoop
from diloco_orchestrator.replica.training.fp32_shadow import views_of
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.tensor_tree import pack, state_file, stored_tree, unpack, whole_tree
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.snapshots.stored_state import StoredState
from diloco_orchestrator.store.memory import MemoryStore

LIMIT = 300  # bytes
TREE = {
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(200.0).view(20, 10)}}},
    "none": None,
    "mixed": [
        1,
        (2.5, "text"),
        {"flag": True, "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.zeros(0, 2)},
    ],
}


def same(one, other) -> bool:
    match one:
        case torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list() | tuple():
            return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
        case _:
            return type(one) is type(other) and one == other


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def test_a_state_has_the_bytes_that_safetensors_gives_it():
    data = pack(TREE)
    tree = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["tree"]
    assert data == safetensors.torch.save(safetensors.torch.load(data), metadata={"tree": tree})


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_a_state_comes_back_from_pieces_of_any_size(size):
    assert same(unpack(cut(pack(TREE), size), "here"), TREE)


SPOILT = [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:5], lambda d: b"", lambda d: b"\xff" * 40]


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("size", [50, 10**6])
def test_bytes_that_are_no_state_are_refused(spoil, size):
    with pytest.raises(RecordInvalid, match="here"):
        unpack(cut(spoil(pack(TREE)), size), "here")
    with pytest.raises(RecordInvalid, match="here"):
        stored_tree(StoredState.of(ALONE, spoil(pack(TREE))), "here")


def test_pieces_are_freed_as_tensors_are_taken_from_them():
    stored = StoredState.of(ALONE, pack({"one": torch.arange(5), "other": torch.ones(3)}))
    tree = stored_tree(stored, "here")
    assert tree["one"].whole().tolist() == [0, 1, 2, 3, 4] and stored.held
    assert tree["other"].whole().tolist() == [1.0, 1.0, 1.0] and not stored.held


def test_what_cannot_be_saved_is_named():
    with pytest.raises(ConfigError, match=r"state\['x'\]\[1\] is a set"):
        pack({"x": [1, {2}]})


def test_a_file_is_read_when_it_is_written_unless_it_is_frozen():
    for frozen in (False, True):
        tensor = torch.ones(100)
        file = state_file({"x": tensor}, limit=64)
        if frozen:
            file.freeze()
        tensor.zero_()
        store = MemoryStore()
        file.write(store, 0, 1, 1, NoBackground())
        pieces = [store.get(keys.state_piece(0, 1, 1, index)) for index in range(-(-file.size // 64))]
        assert unpack(pieces, "here")["x"].tolist() == [float(frozen)] * 100


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.reads[key] += 1
        return super().get(key, start, end)


def saved(limit: int, tree: Any = TREE) -> tuple[Fleet, Participant, Contribution]:
    fleet = Fleet(replicas=1, rounds=1, store=Counting())
    participant = fleet.join(0)
    manifest = answer(participant, 1.0, replace(report(), state=state_file(tree, limit=limit)))
    return fleet, participant, manifest


def objects(fleet: Fleet) -> dict[str, int]:
    return {info.key: info.size for info in fleet.store.list(keys.states(0))}


def test_a_small_state_is_one_object_and_a_large_one_an_index_and_pieces():
    small, _, _ = saved(10**6)
    assert list(objects(small)) == ["replicas/0/state/00000001/1.safetensors"]
    large, participant, manifest = saved(LIMIT)
    sizes = objects(large)
    whole = objects(small)[keys.state(0, 1, 1)]
    assert len(sizes) == 1 + -(-whole // LIMIT)
    assert {key: size for key, size in sizes.items() if size > LIMIT}.keys() <= {keys.state(0, 1, 1)}, "the tiny limit"
    assert {keys.parse_round(key) for key in sizes} == {1}, "so that retention finds them"
    large.engine.reads.clear()
    assert same(whole_tree(stored_tree(participant.history.read_state(manifest), "here")), TREE)
    assert set(large.engine.reads.values()) == {1} and set(large.engine.reads) == set(sizes)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_replica_saves_what_it_had_when_it_published_in_objects_of_a_shard(delay):
    model = torch.nn.Linear(600, 300)  # with a momentum of .7 MB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fleet = Fleet(replicas=1, shard_mib=1, sync_every=2, fragment_sync_delay=delay, replica_state="round")
    participant = fleet.join(0, model=model)
    parameters = trainable(model)
    schedule = SyncSchedule(sync_every=2, fragments=1, delay=delay)
    loop = DiLoCoLoop(views_of(parameters, [list(parameters)]), participant, schedule)
    model(torch.ones(600)).sum().backward()
    optimizer.step()
    checkpoint = Checkpoint(participant._attempt, participant, loop, InnerOptimizers(optimizer), {})
    file = checkpoint.encode_if_due()
    assert file is not None
    before = optimizer.state[model.weight]["momentum_buffer"].clone()
    optimizer.step()  # beside the round, if there is a delay
    store = MemoryStore()
    file.write(store, 0, 1, 1, NoBackground())
    names = [info.key for info in store.list(keys.states(0)) if info.size <= 2**20]
    pieces = sorted((name for name in names if name.endswith(".bin")), key=lambda name: int(Path(name).stem))
    saved = unpack(map(store.get, pieces or names), "here")["optimizer"]["state"][0]["momentum_buffer"]
    assert torch.equal(saved, before) is (delay > 0), "with a delay training has gone on meanwhile"
    assert len(pieces) == (2 if delay else 0), "with the local values, another .7 MB"


def test_how_a_state_was_cut_is_no_difference_to_an_audit():
    (small, _, one), (large, _, several) = saved(10**6), saved(LIMIT)
    assert one.state != several.state
    assert same_state(small.store, one, large.store, several)
    other, _, other_manifest = saved(LIMIT, {**TREE, "none": 1})
    assert not same_state(small.store, one, other.store, other_manifest)
    large.store.delete(keys.state_piece(0, 1, 1, 1))
    assert not same_state(small.store, one, large.store, several)


@pytest.mark.parametrize("piece", [0, 2])
def test_a_piece_that_was_changed_or_deleted_is_found(piece):
    fleet, participant, manifest = saved(LIMIT)
    key = keys.state_piece(0, 1, 1, piece)
    data = fleet.store.get(key)
    fleet.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PayloadCorrupt, match=f"1/{piece}.bin"):
        participant.history.read_state(manifest)
    fleet.store.delete(key)
    with pytest.raises(PayloadGone, match=f"1/{piece}.bin"):
        participant.history.read_state(manifest)


def test_verify_reads_every_piece():
    fleet, participant, _ = saved(LIMIT)
    close(participant)
    done = verify_run(fleet.store)
    assert done.agrees and done.checked["payloads and states"] == 1 + len(objects(fleet))
    key = keys.state_piece(0, 1, 1, 1)
    fleet.store.put(key, fleet.store.get(key)[:-1])
    done = verify_run(fleet.store)
    assert done.disagreement is not None and done.disagreement.key == key
