"""`exchange_plan`: owners get each element once and ranks get all that they hold, however tensors are cut."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer.base import BaseLayout
from diloco_orchestrator.replica.training.exchange import (
    Range,
    Split,
    exchange_plan,
    held_ranges,
    local_part,
    messages,
    owned_by_shard,
    ranges_in,
    ranks_on_one_batch,
)

_SHAPES = [(7, 3), (1, 5), (2,), (5, 4, 3), (), (0, 4), (64, 8)]


def _coordinates(mesh):
    return list(itertools.product(*map(range, mesh)))


def _piece(whole, splits):
    """The piece of `whole` as torch cuts it: one `chunk` after another, strided cuts last."""
    for split in sorted(splits, key=lambda each: each.strided):
        chunks = whole.chunk(split.parts, dim=split.dim)
        whole = chunks[split.index] if split.index < len(chunks) else whole.narrow(split.dim, 0, 0)
    return whole


_MESHES = {
    "fully_shard": ((3,), [(0, False)]),
    "more ranks than rows": ((8,), [(0, False)]),
    "replicated": ((2,), [None]),
    "hybrid: replicated, then sharded": ((2, 2), [None, (0, False)]),
    "tensor parallel by columns": ((2,), [(1, False)]),
    "fully_shard of rows that are tensor parallel": ((2, 2), [(0, True), (0, False)]),
    "fully_shard of columns that are tensor parallel": ((2, 3), [(0, False), (1, False)]),
}


def _splits(name):
    """The cuts of a tensor that each rank of a mesh holds."""
    mesh, placements = _MESHES[name]
    return [
        [
            Split(placed[0], parts, index, placed[1])
            for placed, parts, index in zip(placements, mesh, coordinate, strict=True)
            if placed
        ]
        for coordinate in _coordinates(mesh)
    ]


@pytest.mark.parametrize("shard_numel", [None, 5, 1000])
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("name", _MESHES)
def test_owners_get_every_element_once_and_holders_get_their_pieces_back(name, shape, shard_numel):
    """`shard_numel`: None: rank 0 owns the tensor; else it lies behind another one in a base of such shards."""
    if any(each and each[0] >= len(shape) for each in _MESHES[name][1]):
        pytest.skip("the tensor has no such dimension")
    splits, numel = _splits(name), torch.Size(shape).numel()
    whole = torch.arange(numel).view(shape)
    local = [_piece(whole, each).reshape(-1) for each in splits]
    owned = {"w": [(0, numel, 0)]}
    if shard_numel:
        shapes = {"before": torch.Size((3,)), "w": torch.Size(shape)}
        owned = owned_by_shard(BaseLayout.of(shapes, [], shard_numel), len(splits))
        assert {owner for *_, owner in owned["w"]} <= {(3 + at) // shard_numel % len(splits) for at in range(numel)}
    plan = exchange_plan([{"w": held_ranges(shape, each), "before": [Range(0, 3, 0)]} for each in splits], owned)

    there = [torch.full((numel,), -1) for _ in splits]  # what each rank gets as an owner
    for move in [move for move in plan.gathered if move.name == "w"]:
        values = local[move.holder][move.at : move.at + move.stop - move.start]
        assert bool((there[move.owner][move.start : move.stop] == -1).all()), "it comes once"
        there[move.owner][move.start : move.stop] = values
    for start, stop, owner in owned["w"]:
        assert torch.equal(there[owner][start:stop], whole.view(-1)[start:stop])

    pieces = [torch.full_like(each, -1) for each in local]
    for move in [move for move in plan.scattered if move.name == "w"]:
        target = pieces[move.holder][move.at : move.at + move.stop - move.start]
        target.copy_(there[move.owner][move.start : move.stop])
    assert all(map(torch.equal, pieces, local))


def test_a_piece_whose_later_dimensions_are_whole_is_one_range():
    assert held_ranges((8, 4, 2), [Split(0, 2, 1)]) == [Range(32, 64, 0)]


def test_shards_of_all_fragments_are_dealt_in_turn():
    shapes = {name: torch.Size((size,)) for name, size in {"a": 4, "b": 7, "c": 2}.items()}
    owned = owned_by_shard(BaseLayout.of(shapes, [["a", "c"], ["b"]], 3), 2)
    assert owned == {"a": [(0, 3, 0), (3, 4, 1)], "c": [(0, 2, 1)], "b": [(0, 3, 1), (3, 6, 0), (6, 7, 1)]}


@pytest.mark.parametrize(
    ("held", "is_sent"),
    [([(0, 6)] * 3, False), ([(0, 3), (3, 6)], False), ([(0, 4), (4, 6)], True)],
    ids=["everything", "what they own", "other parts"],
)
def test_ranks_that_hold_what_they_own_send_nothing(held, is_sent):
    pieces = [{"w": [Range(start, stop, 0)]} for start, stop in held]
    plan = exchange_plan(pieces, {"w": [(0, 3, 0), (3, 6, 1)]})
    assert any(move.holder != move.owner for move in plan.gathered) == is_sent


def test_an_element_that_nobody_holds_is_named():
    with pytest.raises(ConfigError, match=r"hold the elements \[\(0, 2\)\] of 'w', which has 6"):
        exchange_plan([{"w": [Range(0, 2, 0)]}, {}], {"w": [(0, 3, 0), (3, 6, 1)]})


@pytest.fixture
def four_ranks():
    """A process group of four ranks of which this process is the first, and the others are not there."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("groups", "together"),
    [((4, 1), (0,)), ((2, 2), (0, 1)), ((1, 4), (0, 1, 2, 3))],
    ids=["sharded", "parallel, then sharded", "parallel"],
)
def test_ranks_between_which_tensors_are_parallel_are_on_one_batch(four_ranks, groups, together):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4), torch.nn.LayerNorm(4))
    mesh = init_device_mesh("cpu", groups, mesh_dim_names=("data", "tensor"))
    if groups[1] > 1:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if groups[0] > 1:
        fully_shard(model, mesh=mesh["data"])
    assert ranks_on_one_batch(model, 0) == together
    for name, parameter in model.named_parameters():
        held = sum(each.stop - each.start for each in ranges_in(parameter, name))
        assert held == local_part(parameter).numel()


def test_ranks_of_a_module_that_is_sharded_over_two_meshes_have_batches_of_their_own(four_ranks):
    """As experts and their router are: `fully_shard` has a group of parameters for each mesh."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    infos = [common.FSDPMeshInfo(each, shard_mesh_dim=0) for each in (mesh["inner"], mesh["outer"])]
    model = torch.nn.Linear(8, 16)
    fully_shard(
        model,
        mesh=mesh["inner"],
        shard_placement_fn=lambda each: common.ShardPlacementResult(Shard(0), infos[each.ndim - 1]),
    )
    assert {each.device_mesh.mesh_dim_names for each in model.parameters()} == {("outer",), ("inner",)}
    assert ranks_on_one_batch(model, 0) == (0,)


def test_a_model_that_is_parallel_over_two_meshes_is_refused(four_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    parallelize_module(model, mesh["data"], {"1": ColwiseParallel()})
    with pytest.raises(ConfigError, match=r"over the ranks \(0, 2\), others over \(0, 1\).*one tensor-parallel mesh"):
        ranks_on_one_batch(model, 0)


def test_messages_are_bounded_and_keep_the_order():
    plan = exchange_plan([{name: [Range(0, 10, 0)] for name in "abc"}], {name: [(0, 10, 0)] for name in "abc"})
    sizes = {"a": 4, "b": 4, "c": 2}
    cut = list(messages(plan.gathered, sizes, 60))
    assert [[move.name for move in message] for message in cut] == [["a"], ["b", "c"]]


def test_no_code_of_ours_makes_a_whole_parameter_in_every_rank():
    """An embedding of 150,000 x 8,000 has 4.9 GB. Tests compare what `Exchange` moves with torch's `full_tensor`."""
    root = Path(__file__).parents[2]
    files = [path for of in ("diloco_orchestrator", "replica", "executors") for path in (root / of).rglob("*.py")]
    assert len(files) > 300, "the packages are there"
    assert [str(path) for path in files if "full_tensor" in path.read_text()] == []
