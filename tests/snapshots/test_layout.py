"""Snapshots in the bucket: loadable with transformers, exact, deterministic, and safe to race."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_fleet import Fleet, answer, model_bytes, play, start_of, tiny_model
from stored_snapshots import complete_snapshots
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Snapshot
from diloco_orchestrator.run_log.run_log import RunLog, complete_takes
from diloco_orchestrator.snapshots.layout import (
    ModelFiles,
    write_snapshot,
)
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store

STAMP = Stamp("test", lambda: 0.0)


def llama(dtype: torch.dtype = torch.float32, tied: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(dtype)


def stored(store: Store, round_: int) -> StoredSnapshot:
    key = keys.snapshot(round_, keys.SNAPSHOT_RECORD)
    return StoredSnapshot(store, round_, Snapshot.from_bytes(store.get(key), key))


def moved_base(model: torch.nn.Module) -> Base:
    """A base after one outer step, with momenta."""
    first = Base.fresh(trainable(model), OuterConfig())
    generator = torch.Generator().manual_seed(1)
    gradients = {n: torch.randn(p.shape, generator=generator) for n, p in first.parameters.items()}
    return step(first, gradients, OuterConfig())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_a_snapshot_and_computes_with_it(dtype, tied, tmp_path: Path):
    model = llama(dtype, tied)
    base = moved_base(model)
    write_snapshot(open_store(str(tmp_path)), 7, base, base.digest(), ModelFiles.of(model), STAMP)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "snapshots" / "00000007", dtype=dtype)
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(base.parameters[name])
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    if dtype is torch.float32:  # `.to(bfloat16)` above also rounds the rotary frequencies, which no file holds
        tokens = torch.arange(10)[None]
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_snapshot_gives_back_every_bit_of_base_and_momenta(dtype):
    model, store = llama(dtype), MemoryStore()
    base = moved_base(model)
    write_snapshot(store, 7, base, base.digest(), ModelFiles.of(model), STAMP)
    assert stored(store, 7).base(start_of(model)).digest() == base.digest()


def test_the_same_model_gives_the_same_bytes():
    contents = []
    for _ in range(2):
        store, model = MemoryStore(), llama()
        base = moved_base(model)
        write_snapshot(store, 7, base, base.digest(), ModelFiles.of(model), STAMP)
        files = [info.key for info in store.list("snapshots/") if not info.key.endswith("snapshot.json")]
        contents.append({key: store.get(key) for key in files})
    assert contents[0] == contents[1]
    names = {key.rpartition("/")[2] for key in contents[0]}
    assert names == {"model.safetensors", "outer.safetensors", "config.json", "generation_config.json"}


def test_the_tokenizers_files_lie_beside_the_model_and_load(tmp_path: Path):
    model, words = llama(), {"<unk>": 0, "outer": 1, "inner": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), unk_token="<unk>")
    base = Base.fresh(trainable(model), OuterConfig())
    write_snapshot(open_store(str(tmp_path)), 0, base, base.digest(), ModelFiles.of(model, tokenizer), STAMP)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "snapshots" / "00000000")
    assert loaded.convert_tokens_to_ids(["inner", "outer", "other"]) == [2, 1, 0]


def test_buffers_and_frozen_parameters_are_in_the_snapshot():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    store = MemoryStore()
    base = Base.fresh(trainable(model), OuterConfig())
    write_snapshot(store, 0, base, base.digest(), ModelFiles.of(model), STAMP)
    from safetensors.torch import load

    assert sorted(load(store.get(keys.snapshot(0, "model.safetensors")))) == sorted(model.state_dict())


def test_the_users_live_config_is_left_alone():
    model = llama()
    model.config.architectures = ["MyOwnLlama"]
    before = model.config.to_dict()
    extra = ModelFiles.of(model).extra
    assert model.config.to_dict() == before
    assert json.loads(extra["config.json"])["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_snapshot_of_a_plain_module_says_how_to_load_it(tied: bool, tmp_path: Path, monkeypatch: Any):
    def built() -> torch.nn.Module:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        if tied:
            model["b"].weight = model["a"].weight
        return model

    trained, base_limit = built(), 200  # bytes, so that the model is in several files
    base = moved_base(trained)
    store = open_store(str(tmp_path))
    write_snapshot(store, 7, base, base.digest(), ModelFiles.of(trained), STAMP, base_limit)
    folder = tmp_path / "snapshots" / "00000007"
    monkeypatch.chdir(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model = built()
    exec((folder / "README.md").read_text().split("```python\n")[1].split("```")[0], {"model": model})
    assert all(torch.equal(model.get_parameter(name), value) for name, value in base.parameters.items())


def test_a_snapshot_counts_only_when_its_record_is_there():
    store, model = MemoryStore(), tiny_model()
    base = moved_base(model)
    store.put(keys.snapshot(3, "model.safetensors"), b"half-written")
    assert complete_snapshots(store) == []
    write_snapshot(store, 4, base, base.digest(), ModelFiles.of(model), STAMP)
    assert complete_snapshots(store) == [4]


def test_a_writer_that_died_half_way_is_completed_by_the_next():
    store, model = MemoryStore(), tiny_model()
    base, files = moved_base(model), ModelFiles.of(model)
    store.put(keys.snapshot(4, "model.safetensors"), model_bytes(files, base))
    write_snapshot(store, 4, base, base.digest(), files, STAMP)
    write_snapshot(store, 4, base, base.digest(), files, STAMP)
    assert stored(store, 4).base(start_of(model)).digest() == base.digest()


def test_a_snapshot_of_another_base_whole_or_half_stays_and_the_right_one_is_in_its_writers_own_take():
    store, model = MemoryStore(), tiny_model()
    base, files = moved_base(model), ModelFiles.of(model)
    other = Base.fresh(trainable(model), OuterConfig())
    store.put(keys.snapshot(4, "model.safetensors"), model_bytes(files, other))
    assert write_snapshot(store, 4, base, base.digest(), files, STAMP, by=1) == "r1"
    assert complete_takes(store) == {4: ["r1"]}
    write_snapshot(store, 4, other, other.digest(), files, STAMP)
    assert complete_takes(store) == {4: ["", "r1"]}
    assert write_snapshot(store, 4, base, base.digest(), files, STAMP, by=1) == "r1"
    assert write_snapshot(store, 4, base, base.digest(), files, STAMP) == "rebuilt"


@pytest.mark.parametrize("name", ["model.safetensors", "outer.safetensors"])
def test_a_changed_file_is_found(name: str):
    store, model = MemoryStore(), tiny_model()
    base = moved_base(model)
    write_snapshot(store, 4, base, base.digest(), ModelFiles.of(model), STAMP)
    data = bytearray(store.get(keys.snapshot(4, name)))
    data[-1] ^= 1
    store.put(keys.snapshot(4, name), bytes(data))
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        stored(store, 4).base(start_of(model))


def test_the_newest_base_is_snapshotted_from_the_bucket_alone():
    """As the coordinator does when no replica lived to do it: the same bytes as a replica's own."""
    fleets = [Fleet(replicas=2, rounds=9, snapshot_every=every) for every in (100, 3)]
    for fleet in fleets:
        participants = fleet.join_all()
        for value in (1.0, -2.0, 0.5):
            play(participants, [value, value + 1])
    write_rebuilt_snapshot(RunLog(fleets[0].store), 3, STAMP)
    participants[0].write_snapshot_if_due()
    for name in ("model.safetensors", "outer.safetensors"):
        key = keys.snapshot(3, name)
        assert fleets[0].store.get(key) == fleets[1].store.get(key)


def test_a_base_is_rebuilt_from_any_snapshot_with_the_same_digest():
    fleet = Fleet(replicas=1, rounds=9, snapshot_every=2)
    participant = fleet.join(0)
    for value in (1.0, -2.0, 0.5, 3.0, 0.1):
        answer(participant, value)
        participant.close()
        participant.write_snapshot_if_due()
    assert complete_snapshots(fleet.store) == [0, 2, 4]
    digest = participant.digest
    for round_ in (4, 2):
        assert fleet.join(0).digest == digest
        fleet.store.delete(keys.snapshot(round_, keys.SNAPSHOT_RECORD))
    assert fleet.join(0).digest == digest  # from snapshot 0, five outer steps


def test_another_model_writes_a_snapshot_from_what_the_first_one_tells():
    store, model = MemoryStore(), llama(torch.bfloat16)
    base, files = moved_base(model), ModelFiles.of(model)
    write_snapshot(store, 0, base, base.digest(), files, STAMP)
    told = stored(store, 0).model_files(start_of(model), files.extra)
    assert model_bytes(told, base) == model_bytes(files, base) and told.extra == files.extra
