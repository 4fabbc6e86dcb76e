"""Snapshots of models that one file may not hold: cut as transformers cuts them, one file at a time in memory."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from protocol_fleet import Fleet, play, start_of, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import ConfigError, ObjectMissing, RecordInvalid, StoreError, StoreFull
from diloco_orchestrator.inspection.pull import copy_model, write_folder
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Snapshot
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.file_plan import plan_files
from diloco_orchestrator.snapshots.layout import ModelFiles, existing_files, write_snapshot
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, encode, file_size, read_header
from diloco_orchestrator.store.base import OBJECT_LIMIT, Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store

STAMP = Stamp("test", lambda: 0.0)
LIMIT = 4096  # bytes; of the models below about 16 KiB


def llama(dtype: torch.dtype = torch.float32, tied: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(dtype)


def moved_base(model: torch.nn.Module) -> Base:
    """A base after one outer step, with momenta."""
    first = Base.fresh(trainable(model), OuterConfig())
    generator = torch.Generator().manual_seed(1)
    gradients = {n: torch.randn(p.shape, generator=generator) for n, p in first.parameters.items()}
    return step(first, gradients, OuterConfig())


class CountingStore(MemoryStore):
    """Counts how often each object is read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        whole = super().get(key)
        if start == 0 and (end is None or end > len(whole)):
            self.reads[key.rpartition("/")[2]] += 1
        return whole[start:end]


def written(model: torch.nn.Module, limit: int = LIMIT, round_: int = 7) -> tuple[CountingStore, Base]:
    store, base = CountingStore(), moved_base(model)
    write_snapshot(store, round_, base, base.digest(), ModelFiles.of(model), STAMP, limit)
    return store, base


def stored(store: Store, round_: int = 7) -> StoredSnapshot:
    key = keys.snapshot(round_, keys.SNAPSHOT_RECORD)
    return StoredSnapshot(store, round_, Snapshot.from_bytes(store.get(key), key))


# -- one file ---------------------------------------------------------------------------------------------------------

DTYPES = sorted((dtype for dtype in safetensors.torch._SIZE), key=str)


def of_dtype(dtype: torch.dtype, size: int = 32) -> torch.Tensor:
    raw = torch.arange(size, dtype=torch.uint8)
    return raw % 2 == 1 if dtype is torch.bool else raw.view(dtype)


@pytest.mark.parametrize(
    "tensors",
    [
        {str(dtype): of_dtype(dtype) for dtype in DTYPES},
        {'ü"\\\n': torch.ones(2), "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "b": torch.ones(3, 2)},
        {},
    ],
    ids=["every dtype", "odd names and shapes", "nothing"],
)
def test_a_file_has_the_bytes_that_safetensors_gives_it(tensors):
    data = encode(tensors)
    assert data == safetensors.torch.save(tensors, metadata={"format": "pt"})
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    assert file_size(specs) == len(data)
    header = read_header(lambda start, end: data[start:end], "here")
    assert header.specs == specs and header.metadata == {"format": "pt"}


def test_a_dtype_that_no_file_can_hold_is_refused_with_the_tensors_name():
    with pytest.raises(ConfigError, match="'odd' is complex128"):
        encode({"odd": torch.zeros(2, dtype=torch.complex128)})


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{"])
def test_what_is_no_header_is_refused(data):
    with pytest.raises(RecordInvalid, match="here is no safetensors file"):
        read_header(lambda start, end: data[start:end], "here")


# -- the plan ---------------------------------------------------------------------------------------------------------


def specs_of(*sizes: int) -> dict[str, TensorSpec]:
    return {f"layer.{index}": TensorSpec("float32", (size,)) for index, size in enumerate(sizes)}


def test_what_fits_into_one_file_stays_one_file_to_the_byte():
    specs = specs_of(100, 200, 300)
    size = file_size(specs)
    assert [each.name for each in plan_files("model", specs, size)] == ["model.safetensors"]
    names = [each.name for each in plan_files("model", specs, size - 1)]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_no_file_is_larger_than_the_limit_and_every_tensor_is_in_one():
    specs = specs_of(*(7 * n % 500 for n in range(300)))
    files = plan_files("outer", specs, 3000)
    assert len(files) > 50 and all(each.size <= 3000 for each in files)
    assert [name for each in files for name in each.specs] == sorted(specs)


def test_a_tensor_above_the_limit_is_a_file_of_its_own():
    files = plan_files("model", specs_of(10, 5000, 10, 10), 1000)
    assert [list(each.specs) for each in files] == [["layer.0"], ["layer.1"], ["layer.2", "layer.3"]]
    assert [each.name for each in plan_files("model", specs_of(5000), 1000)] == ["model.safetensors"]


def test_the_limit_of_real_snapshots_is_one_gib():
    layer = TensorSpec("float32", (2**28 - 100,))  # 1 GiB less 400 bytes: its header fits too
    assert len(plan_files("model", {"a": layer}, OBJECT_LIMIT)) == 1
    assert len(plan_files("model", {"a": layer, "b": TensorSpec("float32", (100,))}, OBJECT_LIMIT)) == 2


# -- a snapshot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_a_sharded_snapshot(dtype, tied, tmp_path: Path):
    model = llama(dtype, tied)
    base = moved_base(model)
    write_snapshot(open_store(str(tmp_path)), 7, base, base.digest(), ModelFiles.of(model), STAMP, LIMIT)
    folder = tmp_path / "snapshots" / "00000007"
    assert len(list(folder.glob("model-*.safetensors"))) >= 3 and not (folder / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(base.parameters[name])
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_index_is_the_one_that_transformers_writes(tmp_path: Path):
    model = llama(torch.bfloat16, tied=False)
    model.save_pretrained(tmp_path, max_shard_size=LIMIT)
    theirs = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    store, _ = written(model)
    data = store.get(keys.snapshot(7, "model.safetensors.index.json"))
    index = json.loads(data)
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert data.decode() == json.dumps(index, indent=2, sort_keys=True) + "\n"
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load(store.get(keys.snapshot(7, file)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_of_base_and_momenta_comes_back_and_every_file_is_read_once(dtype):
    model = llama(dtype)
    store, base = written(model)
    snapshot = stored(store)
    sizes = [info.size for name, info in snapshot.record.files.items() if name.endswith(".safetensors")]
    assert len(sizes) > 6 and max(sizes) <= LIMIT
    store.reads.clear()
    assert snapshot.check(start_of(model)).digest() == base.digest()
    assert store.reads == Counter(dict.fromkeys(snapshot.record.files, 1))


def test_a_base_in_bf16_is_read_from_the_outer_files_alone():
    model = llama(torch.bfloat16)
    store, base = written(model)
    store.reads.clear()
    assert stored(store).base(start_of(model)).digest() == base.digest()
    assert {name.partition("-")[0] for name in store.reads} == {"outer", "snapshot.json"}


def test_another_base_is_written_from_a_stored_snapshot_with_the_same_bytes():
    """With frozen tensors in every file, so that each has something that the base does not hold."""
    model = llama(torch.bfloat16, tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    base, files = moved_base(model), ModelFiles.of(model)
    store = CountingStore()
    write_snapshot(store, 0, base, base.digest(), files, STAMP, LIMIT)
    told = stored(store, 0).model_files(start_of(model), files.extra)
    store.reads.clear()
    planned, expected = told.planned(base, LIMIT), files.planned(base, LIMIT)
    assert [(each.name, each.size) for each in planned] == [(each.name, each.size) for each in expected]
    assert [each.encode() for each in planned] == [each.encode() for each in expected]
    assert max(store.reads.values()) == 1


class Discarding(MemoryStore):
    """Forgets what is written, and remembers the largest object."""

    largest = 0

    def create(self, key: str, data: bytes) -> bool:
        self.largest = max(self.largest, len(data))
        return super().create(key, b"")


def test_a_writer_holds_one_file_at_a_time():
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(32)))  # 8 MiB, and 8 MiB of momenta
    base, files, store, limit = moved_base(model), ModelFiles.of(model), Discarding(), 2**20
    digest = base.digest()
    tracemalloc.start()
    try:
        write_snapshot(store, 0, base, digest, files, STAMP, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert store.largest <= limit
    assert peak < 2 * limit, "two files, or a second copy of one, were in memory"


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_writer_that_died_half_way_is_completed_by_the_next():
    model = llama()
    whole, base = written(model)
    names = sorted(info.key for info in whole.list("snapshots/") if not info.key.endswith("snapshot.json"))
    for kept in (1, len(names) // 2, len(names)):
        store = MemoryStore()
        for key in names[:kept]:
            store.put(key, whole.get(key))
        write_snapshot(store, 7, base, base.digest(), ModelFiles.of(model), STAMP, LIMIT)
        assert stored(store).check(start_of(model)).digest() == base.digest()


def test_one_shard_of_another_base_is_not_completed_and_the_next_take_is_written():
    model = llama()
    other = Base.fresh(trainable(model), OuterConfig())
    base, files, store = moved_base(model), ModelFiles.of(model), MemoryStore()
    shard = files.planned(other, LIMIT)[2]
    store.put(keys.snapshot(7, shard.name), shard.encode())
    assert write_snapshot(store, 7, base, base.digest(), files, STAMP, LIMIT) == "rebuilt"
    assert existing_files(store, 7) == {shard.name}  # nothing is mixed into the other one


def test_a_snapshot_begun_in_another_layout_is_not_completed_and_the_own_take_is_written():
    model = llama()
    base, files, store = moved_base(model), ModelFiles.of(model), MemoryStore()
    whole = files.planned(base)[0]
    store.put(keys.snapshot(7, whole.name), whole.encode())
    assert write_snapshot(store, 7, base, base.digest(), files, STAMP, LIMIT, by=3) == "r3"
    assert existing_files(store, 7) == {whole.name}
    store.put(keys.snapshot(8, whole.name), b""), store.put(keys.snapshot(8, whole.name, "r3"), b"")
    with pytest.raises(RecordInvalid, match=r"cannot be written.*snapshots/00000008\.r3/"):
        write_snapshot(store, 8, base, base.digest(), files, STAMP, LIMIT, by=3)


def damage(store: Store, how: str) -> None:
    second = next(i.key for i in store.list("snapshots/") if "outer-00002-of" in i.key)
    match how:
        case "missing":
            store.delete(second)
        case "truncated":
            store.put(second, store.get(second)[:-100])
        case "of another shard":
            store.put(second, store.get(second.replace("-00002-of", "-00001-of")))


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("missing", ObjectMissing, r"outer-00002-of-\d{5}\.safetensors does not exist"),
        ("truncated", RecordInvalid, r"outer-00002-of-\d{5}\.safetensors .* changed after it was written"),
        ("of another shard", RecordInvalid, r"outer-00002-of-\d{5}\.safetensors .* changed after it was written"),
    ],
)
def test_a_damaged_shard_is_named(how, error, words):
    model = llama()
    store, _ = written(model)
    damage(store, how)
    with pytest.raises(error, match=words):
        stored(store).base(start_of(model))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "", "a\\b", "a\0b", "x" * 256])
def test_a_record_that_names_no_file_name_is_refused(name):
    store, _ = written(llama())
    record = stored(store).record
    forged = record.model_copy(update={"files": {**record.files, name: next(iter(record.files.values()))}})
    with pytest.raises(RecordInvalid, match="no file name"):
        Snapshot.from_bytes(forged.to_bytes(), "snapshot.json")


def test_a_record_that_names_another_base_is_refused():
    model = llama()
    store, base = written(model)
    forged = stored(store).record.model_copy(update={"base_digest": "b3:" + "0" * 64})
    with pytest.raises(RecordInvalid, match=f"holds base {base.digest()[:12]}, its record names b3:000000000"):
        StoredSnapshot(store, 7, forged).base(start_of(model))


def test_a_record_without_one_of_the_shards_is_refused():
    model = llama()
    store, _ = written(model)
    record = stored(store).record
    fewer = {name: info for name, info in record.files.items() if "outer-00001-of" not in name}
    with pytest.raises(RecordInvalid, match="outer-00001-of"):
        StoredSnapshot(store, 7, record.model_copy(update={"files": fewer})).base(start_of(model))


# -- a run in shards --------------------------------------------------------------------------------------------------


def sharded_run() -> Fleet:
    """Two rounds of two replicas and the final evaluation, snapshots 0 and 2; no file holds more than one tensor."""
    fleet = Fleet(replicas=2, rounds=2, snapshot_every=2, object_limit=150)
    participants = fleet.join_all()
    for value in (1.0, -2.0):
        play(participants, [value, value + 1])
    participants[0].write_snapshot_if_due()
    play(participants, [0.0, 0.0])
    return fleet


def test_a_run_in_shards_is_verified_resumed_and_pulled(tmp_path: Path):
    fleet = sharded_run()
    names = {info.key.rpartition("/")[2] for info in fleet.store.list(keys.snapshot(2, ""))}
    assert {"model-00002-of-00002.safetensors", "outer-00002-of-00002.safetensors"} <= names
    done = verify_run(fleet.store)
    assert done.agrees and done.checked["snapshots"] == 2
    assert fleet.join(0).digest == fleet.commits()[-1].base_digest
    for round_ in (0, 1, 2):  # 1 is rebuilt
        assert copy_model(RunLog(fleet.store), tmp_path / str(round_), round_) == round_
    assert {path.name for path in (tmp_path / "2").iterdir()} == {"model.safetensors", "outer.safetensors", "README.md"}
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


@pytest.mark.parametrize("name", ["../planted", "/tmp/planted-by-a-snapshot", "a/b"])
def test_a_pull_writes_nothing_outside_of_its_destination(tmp_path: Path, name: str):
    """A record that names such a file is no snapshot: the model is rebuilt from the one before."""
    fleet = sharded_run()
    record = RunLog(fleet.store).snapshot(2)
    info = next(iter(record.files.values()))
    forged = record.model_copy(update={"files": {**record.files, name: info}})
    fleet.store.put(keys.snapshot(2, "snapshot.json"), forged.to_bytes())
    copy_model(RunLog(fleet.store), tmp_path / "model", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and not Path("/tmp/planted-by-a-snapshot").exists()
    assert all(path.is_file() and path.parent == tmp_path / "model" for path in (tmp_path / "model").rglob("*"))
    assert verify_run(fleet.store).disagreement is not None


def test_a_file_that_is_there_already_is_neither_overwritten_nor_followed(tmp_path: Path):
    (tmp_path / "mine").write_text("years of work")

    def files() -> Iterator[tuple[str, bytes]]:
        (draft,) = (path for path in tmp_path.iterdir() if path.is_dir())
        (draft / "model.safetensors").symlink_to(tmp_path / "mine")
        yield "model.safetensors", b"other bytes"

    with pytest.raises(StoreError, match="Nothing was kept"):
        write_folder(tmp_path / "model", files())
    assert (tmp_path / "mine").read_text() == "years of work" and not (tmp_path / "model").exists()


@pytest.mark.parametrize("round_", [1, 2])
def test_a_pull_that_meets_a_damaged_shard_leaves_no_folder(tmp_path: Path, round_):
    fleet = sharded_run()
    for snapshot in (0, 2):
        key = keys.snapshot(snapshot, "outer-00002-of-00002.safetensors")
        fleet.store.put(key, fleet.store.get(key)[:-1] + b"\1")
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        copy_model(RunLog(fleet.store), tmp_path / "model", round_)
    assert list(tmp_path.iterdir()) == []


def test_a_pull_into_an_empty_folder_fills_it(tmp_path: Path):
    (tmp_path / "model").mkdir()
    copy_model(RunLog(sharded_run().store), tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_pull_onto_a_full_disk_leaves_nothing(small_disk: Path):
    model = torch.nn.Linear(256, 512)  # 512 KiB; the disk holds 256
    fleet = Fleet(replicas=1, object_limit=2**17)
    fleet.join(0, model=model)
    with pytest.raises(StoreFull, match=r"Nothing was kept\. Free some space"):
        copy_model(RunLog(fleet.store), small_disk / "model")
    assert list(small_disk.iterdir()) == []
    copy_model(RunLog(sharded_run().store), small_disk / "model")


def test_a_snapshot_that_was_begun_twice_has_one_winner():
    model = tiny_model()
    first, second = moved_base(model), moved_base(model)
    store = MemoryStore()
    for base in (first, second):
        write_snapshot(store, 3, base, base.digest(), ModelFiles.of(model), STAMP, 150)
    assert stored(store, 3).base(start_of(model)).digest() == first.digest()
