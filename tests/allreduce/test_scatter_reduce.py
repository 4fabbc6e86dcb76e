"""`ObjectStoreAllReduce(path="scatter_reduce")`: a gather's mean, encoded, whoever dies or lies among the ranks."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fast_s3 import running_fast_s3
from foretold_bytes import bytes_down
from parts_of_a_mean import part
from record_examples import EXAMPLES

from diloco_orchestrator import ObjectStoreAllReduce
from diloco_orchestrator.allreduce.dealing import (
    bytes_down_of_round,
    dealers,
    draw_chance,
    predicted_s,
    shard_numel_for,
)
from diloco_orchestrator.allreduce.mean import EncodedShards, Part, write_blocks
from diloco_orchestrator.allreduce.scatter_reduce import ScatterReduce
from diloco_orchestrator.clock import ManualClock, NoBackground
from diloco_orchestrator.codecs.table import CODECS, Encoded, encode
from diloco_orchestrator.errors import AllReduceTimeout, ConfigError, PayloadCorrupt
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import Reduced
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store

LENGTH = 4096
ROUND = 7


def tensors_of(ranks: int, shards: int = 0) -> list[torch.Tensor]:
    """One for each rank; four shards a rank unless said."""
    numel = LENGTH * (shards or 4 * ranks) - 96
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]


def reduce_all(uri: str, tensors: list[torch.Tensor], path: str, **options: object) -> list[torch.Tensor]:
    """Every rank in a thread of its own."""
    ranks = [ObjectStoreAllReduce(uri, i, len(tensors), 20.0, path=path, **options) for i in range(len(tensors))]
    with ThreadPoolExecutor(len(tensors)) as pool:
        return list(pool.map(lambda rank, tensor: rank.allreduce(tensor, ROUND), ranks, tensors))


@pytest.fixture
def reduced(tmp_path) -> tuple[Store, Callable[[], torch.Tensor], torch.Tensor]:
    """The bucket after three ranks have reduced, a call by which rank 2 does so again, and the mean.

    Rank 2 averages every shard but those that ranks 0 and 1 deal, and one of these, at random.
    """
    tensors, uri = tensors_of(3), str(tmp_path)
    means = reduce_all(uri, tensors, "scatter_reduce")
    again = ObjectStoreAllReduce(uri, 2, 3, path="scatter_reduce", clock=ManualClock())
    return open_store(uri), lambda: again.allreduce(tensors[2], ROUND), means[0]


def of_others() -> list[int]:
    """The shards that ranks 0 and 1 deal."""
    found = [index for index in range(12) if dealers(ROUND, index, 3) == (0, 1)]
    assert len(found) == 4
    return found


def falsify(store: Store, rank: int, **changes: object) -> None:
    """Change what the record of a rank says of the shards that ranks 0 and 1 deal."""
    key = keys.reduced(ROUND, rank)
    record = Reduced.from_bytes(store.get(key), key)
    shards = (each.model_copy(update=changes) if each.shard in of_others() else each for each in record.shards)
    store.put(key, record.model_copy(update={"shards": tuple(shards)}).to_bytes())


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.feedback])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_mean_is_that_of_a_gather_passed_through_the_codec(ranks, codec, tmp_path):
    tensors = tensors_of(ranks)
    gathered = reduce_all(str(tmp_path / "gather"), tensors, "gather", codec=codec)[0]
    scattered = reduce_all(str(tmp_path / "scatter"), tensors, "scatter_reduce", codec=codec)
    passed = [Encoded(encode(each, codec), codec, len(each)).values() for each in gathered.split(LENGTH)]
    expected = gathered if ranks == 2 else torch.cat(passed)  # of two ranks both read everything
    assert all(torch.equal(each, expected) for each in scattered)
    sizes = {info.size for info in open_store(str(tmp_path / "scatter")).list(keys.reduced_shards(ROUND))}
    assert ranks == 2 or CODECS[codec].encoded_size(LENGTH) in sizes


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.feedback])
@pytest.mark.parametrize("path", ["gather", "scatter_reduce"])
def test_any_shape_is_reduced_in_any_codec_by_either_path(codec, path, tmp_path):
    for number, shape in enumerate([(0, 3), (), (5,), (3, 4097)]):
        twice = [torch.full((*shape, 2), float(rank)) for rank in range(4)]
        for each in twice:
            each[..., 1] = 100.0
        tensors = [each[..., 0] for each in twice]  # not contiguous
        means = reduce_all(str(tmp_path / f"{number}"), tensors, path, codec=codec)
        assert all(mean.shape == shape and torch.allclose(mean, torch.tensor(1.5), rtol=1e-6) for mean in means)


def test_every_shard_has_two_dealers_and_all_ranks_as_many_shards():
    for ranks in (3, 4, 7):
        dealt = [rank for shard in range(4 * ranks) for rank in dealers(ROUND, shard, ranks)]
        assert [dealt.count(rank) for rank in range(ranks)] == [8] * ranks
        assert all(len(set(dealers(ROUND, shard, ranks))) == 2 for shard in range(ranks))
        assert {dealers(round_, 0, ranks)[0] for round_ in range(ranks)} == set(range(ranks))
    assert [shard_numel_for(numel, 4, 2**24) for numel in (0, 1, 65536, 65537, 2**40)] == [
        4096,
        4096,
        4096,
        8192,
        2**24,
    ]


def test_the_averages_of_a_rank_that_dies_are_made_from_the_payloads(tmp_path, caplog):
    tensors, uri = tensors_of(4), str(tmp_path)
    dies = ObjectStoreAllReduce(uri, 3, 4, 1.0, path="scatter_reduce", clock=ManualClock())
    with pytest.raises(AllReduceTimeout):  # its payload is there, and it averages nothing
        dies.allreduce(tensors[3], ROUND)
    ranks = [ObjectStoreAllReduce(uri, rank, 4, path="scatter_reduce", clock=ManualClock()) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        means = list(pool.map(lambda rank: rank.allreduce(tensors[rank.rank], ROUND), ranks))
    expected = reduce_all(str(tmp_path / "gather"), tensors, "gather")[0]
    assert all(torch.equal(mean, expected) for mean in means)
    assert "no averages of ranks" in caplog.text


def test_a_reduced_shard_that_differs_from_its_inputs_is_not_used(reduced, caplog):
    store, again, mean = reduced
    for shard in of_others():
        data = bytearray(store.get(keys.reduced_shard(ROUND, shard)))
        data[-1] ^= 1
        store.put(keys.reduced_shard(ROUND, shard), bytes(data))
    assert torch.equal(again(), mean)
    assert caplog.text.count("an average of rank 0 is not used") == 3  # one shard was drawn


@pytest.mark.parametrize("liar", [0, 1])
def test_where_owner_and_checker_disagree_the_payloads_decide_and_the_liar_is_named(liar, reduced, caplog):
    store, again, mean = reduced
    falsify(store, liar, digest="b3:" + "0" * 64)
    assert torch.equal(again(), mean)
    assert caplog.text.count(f"rank {liar} published an average of shard") == 4
    assert f"rank {1 - liar} published" not in caplog.text


def test_two_that_publish_the_same_wrong_average_are_found_out_by_a_draw(reduced):
    store, again, _ = reduced
    falsify(store, 0, digest="b3:" + "0" * 64)
    falsify(store, 1, digest="b3:" + "0" * 64)
    with pytest.raises(PayloadCorrupt, match=r"ranks 0 and 1 published the same average.*do not use this round"):
        again()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{}", "not 'reduced'"),
        (b"junk", "is not JSON"),
        (None, "rank 1 in round 7"),  # the record of another rank
    ],
)
def test_a_record_that_is_not_the_dealers_is_not_used(data, words, reduced, caplog):
    store, again, mean = reduced
    store.put(keys.reduced(ROUND, 0), data or store.get(keys.reduced(ROUND, 1)))
    assert torch.equal(again(), mean)
    assert "the averages of rank 0 are not used" in caplog.text and words in caplog.text


def test_bytes_under_the_key_of_an_average_make_its_owner_take_the_next_key(tmp_path):
    store, tensors = open_store(str(tmp_path)), tensors_of(3)
    for shard in range(12):
        store.create(keys.reduced_shard(ROUND, shard), b"of somebody else")
    means = reduce_all(str(tmp_path), tensors, "scatter_reduce")
    assert all(torch.equal(mean, torch.stack(tensors).sum(0) / 3) for mean in means)
    assert store.get(keys.reduced_shard(ROUND, 0, 2)) != store.get(keys.reduced_shard(ROUND, 0)) == b"of somebody else"


def test_a_call_may_be_repeated(reduced, caplog):
    _, again, mean = reduced
    assert torch.equal(again(), mean)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_ranks_with_different_paths_are_told(tmp_path):
    tensors = tensors_of(3)
    ranks = [
        ObjectStoreAllReduce(str(tmp_path), rank, 3, 20.0, path=path)
        for rank, path in enumerate(["gather", "scatter_reduce", "scatter_reduce"])
    ]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(rank.allreduce, tensor, ROUND) for rank, tensor in zip(ranks, tensors, strict=True)]
        with pytest.raises(ValueError, match="All ranks need the same path, here 'gather'"):
            calls[0].result()
    with pytest.raises(ConfigError, match="unknown path 'scatter'"):
        ObjectStoreAllReduce(str(tmp_path), 0, 3, path="scatter")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "shards", "chosen"), [(2, 0, "gather"), (4, 0, "gather"), (8, 1200, "scatter_reduce")]
)
def test_auto_takes_the_path_of_less_time_and_says_why(ranks, shards, chosen, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    open_store(str(tmp_path)).create(keys.LINK, EXAMPLES["link"].to_bytes())
    means = reduce_all(str(tmp_path), tensors_of(ranks, shards), "auto")
    assert all(torch.equal(mean, means[0]) for mean in means)
    made = list(open_store(str(tmp_path)).list(keys.reduced_shards(ROUND)))
    assert bool(made) == (chosen == "scatter_reduce")
    assert ranks == 2 or f"path '{chosen}': " in caplog.text


def test_time_is_foretold_from_bytes_and_round_trips():
    few, many = predicted_s(1000, "fp32", 4, 2**24), predicted_s(2**28, "fp32", 4, 2**24)
    assert few[0] < 0.3 < few[1]  # three round trips; several more
    assert many[0] == pytest.approx(4 * 2**30 / 62.5e6, rel=0.05) and 0.9 * many[0] < many[1] < many[0]
    wide, packed = predicted_s(2**26, "fp32", 64, 2**24), predicted_s(2**26, "int4", 4, 2**24)
    assert wide[1] < 0.1 * wide[0] and packed[0] < packed[1] < 1.5 * packed[0]
    assert predicted_s(0, "fp32", 3, 2**24)[0] < 0.3  # an empty tensor


@pytest.mark.parametrize(("unforeseen", "read"), [("0" * 16, 8), ("f" * 16, 0)])
def test_of_more_than_two_ranks_a_shard_only_some_average_one_more(unforeseen, read):
    """Eight ranks and one shard: a chance of a quarter."""
    store, clock, numel, counted = MemoryStore(), ManualClock(), LENGTH, list[int]()
    parts = [part(rank, torch.randn(numel), 1.0, numel) for rank in range(8)]
    owner, checker = dealers(ROUND, 0, 8)
    others = [rank for rank in range(8) if rank not in (owner, checker)]
    assert draw_chance(1, 8) == 0.25 and draw_chance(4, 8) == draw_chance(16, 4) == 1

    def counting(one: Part) -> Part:
        return replace(one, read=lambda index: (counted.append(one.replica_id), one.read(index))[1])

    def reduce(rank: int) -> torch.Tensor:
        stamp, averages = Stamp(f"{rank:016x}", clock.wall_time, lambda: unforeseen), EncodedShards([numel], "fp32")
        write = lambda record: store.create(keys.reduced(ROUND, rank), record.to_bytes())  # noqa: E731
        reducing = ScatterReduce(store, clock, NoBackground(), stamp, ROUND, rank, [(owner, checker)], write)
        counted.clear()
        reducing.average_into(averages, [counting(one) for one in parts])
        found = torch.empty(numel)
        write_blocks(averages.shard(0), found)
        return found

    expected = [reduce(owner), reduce(checker)][0]
    assert torch.equal(reduce(others[0]), expected) and len(counted) == read


@pytest.mark.parametrize("ranks", [4, 16, 64, 128, 256, 1024])
def test_a_false_average_is_drawn_as_often_in_a_large_fleet(ranks):
    """22 % at least in small fleets, where each rank draws; 86 % where some do. Bytes are flat, shards no more."""
    numel = 25_000_000
    cut = shard_numel_for(numel, ranks, 2**24, "int4")
    shards, payload_bytes = -(-numel // cut), ranks * CODECS["int4"].encoded_size(numel)
    found = 1 - (1 - draw_chance(shards, ranks) / (shards - 2 * shards / ranks)) ** (ranks - 2)
    assert found > (0.86 if ranks >= 2 * shards else 0.21)
    assert bytes_down_of_round(payload_bytes, [cut] * shards, "int4", ranks) < 5.01 * payload_bytes
    assert shards == min(4 * ranks, 64)


def test_a_payload_that_differs_from_its_manifest_is_never_averaged(reduced):
    store, again, _ = reduced
    for shard in range(12):
        data = bytearray(store.get(keys.payload(ROUND, 0, 1, shard)))
        data[-1] ^= 1
        store.put(keys.payload(ROUND, 0, 1, shard), bytes(data))
    with pytest.raises(PayloadCorrupt, match=r"payload/0/1/\d+\.bin.*read 2 times.*not used"):
        again()


@pytest.mark.slow
def test_the_server_counts_the_bytes_that_are_foretold(monkeypatch):
    """Four ranks. Records come on top: they are small."""
    tensors = [torch.randn(LENGTH * 4 * 16, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    with running_fast_s3() as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        found = []
        for path in ("gather", "scatter_reduce"):
            server.moved()
            reduce_all(f"s3://bucket/{path}", tensors, path)
            found.append(server.moved()["down"])
    foretold = bytes_down([LENGTH * 4] * 16, "fp32", 4)
    assert foretold[1] < 0.75 * foretold[0]
    assert all(expected <= down < 1.02 * expected for down, expected in zip(found, foretold, strict=True))
