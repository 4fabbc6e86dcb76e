"""`ObjectStoreAllReduce` used alone: means, agreement on bits, and every way it can go wrong."""

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_processes import in_processes, reduce_once

from diloco_orchestrator import ObjectStoreAllReduce
from diloco_orchestrator.allreduce.payload import NotFinite, publish
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import ManualClock, ThreadBackground
from diloco_orchestrator.codecs import table as codecs
from diloco_orchestrator.errors import AllReduceTimeout, ConfigError, PayloadCorrupt, RoundReused
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store

T = TypeVar("T")


def random_tensor(seed: int, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reduce_all(uri: str, tensors: list[torch.Tensor], round_id: int = 0, **options) -> list[torch.Tensor]:
    """Every rank in a thread of its own."""
    ranks = [ObjectStoreAllReduce(uri, rank, len(tensors), 20.0, **options) for rank in range(len(tensors))]
    with ThreadPoolExecutor(len(tensors)) as pool:
        return list(pool.map(lambda rank: ranks[rank].allreduce(tensors[rank], round_id), range(len(tensors))))


@pytest.mark.parametrize("where", ["memory://allreduce-{}", "folder"])
def test_everyone_gets_the_same_mean(where: str, tmp_path: Path):
    uri = str(tmp_path) if where == "folder" else where.format(tmp_path.name)
    tensors = [random_tensor(rank) for rank in range(3)]
    for round_id in range(2):
        means = reduce_all(uri, tensors, round_id)
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert torch.allclose(means[0], torch.stack(tensors).mean(dim=0), atol=1e-6)


@pytest.mark.slow
def test_processes_agree_to_the_last_bit(tmp_path: Path):
    means = in_processes(reduce_once, *((str(tmp_path), rank, 3) for rank in range(3)))
    assert len(set(means)) == 1


def test_the_input_is_left_alone_and_the_output_is_new(tmp_path: Path):
    tensors = [torch.ones(2), torch.zeros(2)]
    means = reduce_all(str(tmp_path), tensors)
    means[0].add_(7)
    assert tensors[0].tolist() == [1, 1] and tensors[1].tolist() == [0, 0]
    assert means[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_come_back_as_they_went(dtype: torch.dtype, tmp_path: Path):
    means = reduce_all(str(tmp_path), [torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([3.0, 6.0], dtype=dtype)])
    assert means[0].dtype == dtype and means[0].tolist() == [2.0, 4.0]


def test_scalars_views_and_empty_tensors(tmp_path: Path):
    assert reduce_all(str(tmp_path / "a"), [torch.tensor(1.0), torch.tensor(2.0)])[0].item() == 1.5
    view = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(reduce_all(str(tmp_path / "b"), [view, view])[0], view)
    assert reduce_all(str(tmp_path / "c"), [torch.empty(0, 3), torch.empty(0, 3)])[0].shape == (0, 3)


def test_bf16_halves_the_payload_and_is_near(tmp_path: Path):
    tensors = [random_tensor(rank, (1000,)) for rank in range(2)]
    exact = reduce_all(str(tmp_path / "fp32"), tensors)[0]
    near = reduce_all(str(tmp_path / "bf16"), tensors, codec="bf16")[0]
    assert torch.allclose(near, exact, atol=0.02) and not torch.equal(near, exact)
    sizes = [
        sum(i.size for i in open_store(str(tmp_path / c)).list("") if i.key.endswith(".bin")) for c in ("fp32", "bf16")
    ]
    assert sizes == [2 * (16 + 4000), 2 * (16 + 2000)]


def test_a_world_of_one_touches_no_bucket(tmp_path: Path):
    tensor = random_tensor(0)
    mean = ObjectStoreAllReduce(str(tmp_path / "bucket"), 0, 1).allreduce(tensor, 0)
    assert torch.equal(mean, tensor) and mean is not tensor
    assert not any((tmp_path / "bucket").glob("**/*.bin"))


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int, tmp_path: Path):
    with pytest.raises(ValueError, match=f"rank {rank} is outside"):
        ObjectStoreAllReduce(str(tmp_path), rank, world_size)


def test_arguments_that_cannot_be_meant_are_refused(tmp_path: Path):
    reducer = ObjectStoreAllReduce(str(tmp_path), 0, 2)
    for round_id in (-1, 1.0, "1", True):
        with pytest.raises(ValueError, match="round_id"):
            reducer.allreduce(torch.zeros(1), round_id)  # type: ignore[arg-type]
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match="convert it to a floating dtype"):
            reducer.allreduce(torch.zeros(1, dtype=dtype), 0)
    for no_tensor, words in (
        ([1.0], "a list: pass a torch"),
        (torch.zeros(1, device="meta"), "the meta device: it has no values"),
        (torch.zeros(1).to_sparse(), r"layout torch\.sparse_coo: call to_dense"),
    ):
        with pytest.raises(TypeError, match=words):
            reducer.allreduce(no_tensor, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown codec"):
        ObjectStoreAllReduce(str(tmp_path), 0, 2, codec="fp64")
    with pytest.raises(ValueError, match="timeout_s"):
        ObjectStoreAllReduce(str(tmp_path), 0, 2, timeout_s=0)


def test_missing_peers_are_named_after_the_timeout(tmp_path: Path):
    clock = ManualClock()
    first = ObjectStoreAllReduce(str(tmp_path), 1, 4, timeout_s=300.0, clock=clock)
    with pytest.raises(AllReduceTimeout, match=r"round 5.*ranks \[0, 2, 3\] after 300 s") as caught:
        first.allreduce(torch.zeros(1), 5)
    assert caught.value.missing == (0, 2, 3) and isinstance(caught.value, TimeoutError)
    assert 300 <= clock.now() < 301


def test_a_repeated_call_is_accepted_with_the_same_numbers_only(tmp_path: Path):
    tensors = [random_tensor(0), random_tensor(1)]
    once = reduce_all(str(tmp_path), tensors)
    assert torch.equal(reduce_all(str(tmp_path), tensors)[0], once[0])
    with pytest.raises(RoundReused, match="next round id"):
        ObjectStoreAllReduce(str(tmp_path), 0, 2).allreduce(random_tensor(9), 0)
    with pytest.raises(RoundReused, match="was one of 2 ranks, this is rank 0 of 3"):
        ObjectStoreAllReduce(str(tmp_path), 0, 3).allreduce(tensors[0], 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_never_published(bad: float, tmp_path: Path):
    with pytest.raises(PayloadCorrupt, match="1 elements that are not finite"):
        ObjectStoreAllReduce(str(tmp_path), 0, 2).allreduce(torch.tensor([1.0, bad]), 0)
    assert list(open_store(str(tmp_path)).list("")) == []


def test_a_double_that_fp32_cannot_hold_is_named_as_such(tmp_path: Path):
    with pytest.raises(PayloadCorrupt, match="round 4: 1 elements are beyond what fp32 holds"):
        ObjectStoreAllReduce(str(tmp_path), 0, 2).allreduce(torch.tensor([1.0, -1e300], dtype=torch.float64), 4)
    assert list(open_store(str(tmp_path)).list("")) == []


def test_ranks_that_disagree_on_the_shape_are_told(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rank \d published .*All ranks must agree"):
        reduce_all(str(tmp_path), [torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize("where", [0, 20, -1])
def test_a_flipped_bit_in_a_payload_is_never_averaged(where: int, tmp_path: Path):
    tensors = [random_tensor(0), random_tensor(1)]
    reduce_all(str(tmp_path), tensors)
    store, key = open_store(str(tmp_path)), keys.payload(0, 1, 1, 0)
    data = bytearray(store.get(key))
    data[where] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(PayloadCorrupt, match=r"payload/1/1/0\.bin.*read 2 times.*not used"):
        ObjectStoreAllReduce(str(tmp_path), 0, 2).allreduce(tensors[0], 0)


# Around the largest fp32 number that bf16 rounds down, and everything else that a codec can turn into infinity.
EDGES = st.sampled_from([3.3961775e38, 3.3961776e38, 3.4028235e38, float("inf"), float("nan"), 1e-40, 0.0])


@pytest.mark.parametrize("codec", codecs.CODECS)
@given(pieces=st.lists(st.lists(st.floats(width=32) | EDGES | EDGES.map(lambda x: -x), max_size=5), max_size=4))
def test_what_is_not_finite_once_encoded_is_refused_before_anything_is_written(codec, pieces):
    tensors, store = [torch.tensor(piece) for piece in pieces], MemoryStore()
    whole = torch.cat([torch.empty(0), *tensors])
    shards = whole.split(3) if len(whole) else []
    encoded = [codecs.Encoded(codecs.encode(shard, codec), codec, len(shard)).values() for shard in shards]
    bad = sum(int((~torch.isfinite(values)).sum()) for values in encoded)
    if bad == 0:
        payload = publish(store, str, FlatTensors(tensors), codec, 3, PayloadCache())
        assert [info.size for info in store.list("")] == [shard.size for shard in payload.shards]
    else:
        with pytest.raises(NotFinite, match=f"holds {bad} elements that are not finite"):
            publish(store, str, FlatTensors(tensors), codec, 3, PayloadCache())
        assert list(store.list("")) == []


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_every_element_is_encoded_once(codec, monkeypatch):
    packed: list[int] = []
    known = codecs.get_codec(codec)

    def pack(flat: torch.Tensor) -> torch.Tensor:
        packed.append(flat.numel())
        return known.pack(flat)

    monkeypatch.setitem(codecs.CODECS, codec, dataclasses.replace(known, pack=pack))
    publish(MemoryStore(), str, FlatTensors([torch.randn(1000)]), codec, 300, PayloadCache())
    assert packed == [300, 300, 300, 100]


def test_shards_are_cut_anywhere():
    """Tensors and shards whose borders do not meet give the same payload bytes as one long vector would."""
    rng = random.Random(3)
    for _ in range(25):
        pieces = [torch.randn(rng.randrange(0, 9)) for _ in range(rng.randrange(1, 6))]
        whole, store = torch.cat(pieces), MemoryStore()
        payload = publish(store, str, FlatTensors(pieces), "fp32", rng.randrange(1, 9), PayloadCache())
        joined = b"".join(store.get(f"{i}")[16:] for i in range(len(payload.shards)))
        assert joined == whole.numpy().tobytes()
        assert [bulk_digest(store.get(f"{i}")) for i in range(len(payload.shards))] == [
            s.digest for s in payload.shards
        ]


class _Threads(ThreadBackground):
    """Counts the calls that it runs."""

    def __init__(self) -> None:
        self.calls = 0

    def start(self, call: Callable[[], T]) -> "Future[T]":
        self.calls += 1
        return super().start(call)


def test_threads_change_nothing_of_what_is_published():
    vector = FlatTensors([torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in range(7)])
    alone, together, background = MemoryStore(), MemoryStore(), _Threads()
    payload = publish(alone, str, vector, "bf16", 3, PayloadCache())
    assert publish(together, str, vector, "bf16", 3, PayloadCache(), background) == payload
    assert background.calls >= 3  # the writes at least, whatever torch's number of threads
    assert [together.get(f"{index}") for index in range(12)] == [alone.get(f"{index}") for index in range(12)]


def test_nothing_is_published_by_threads_either_if_a_later_shard_is_not_finite():
    store = MemoryStore()
    vector = FlatTensors([torch.ones(9), torch.tensor([float("nan"), 1.0, float("inf")])])
    with pytest.raises(PayloadCorrupt, match="holds 2 elements that are not finite"):
        publish(store, str, vector, "fp32", 3, PayloadCache(), ThreadBackground())
    assert not list(store.list(""))
