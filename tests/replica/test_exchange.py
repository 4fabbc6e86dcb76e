"""`exchange_plan`: every element reaches rank 0 once and every rank gets all that it holds, however tensors are cut."""

import itertools

import pytest
import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.exchange import (
    Range,
    Split,
    exchange_plan,
    held_ranges,
    messages,
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


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("name", _MESHES)
def test_gathered_pieces_are_the_tensor_and_scattered_ones_are_the_pieces(name, shape):
    mesh, placements = _MESHES[name]
    if any(each and each[0] >= len(shape) for each in placements):
        pytest.skip("the tensor has no such dimension")
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    splits = [
        [
            Split(placed[0], parts, index, placed[1])
            for placed, parts, index in zip(placements, mesh, coordinate, strict=True)
            if placed
        ]
        for coordinate in _coordinates(mesh)
    ]
    local = [_piece(whole, each).reshape(-1) for each in splits]
    plan = exchange_plan([{"w": held_ranges(shape, each)} for each in splits], {"w": whole.numel()})

    gathered = torch.full((whole.numel(),), -1)
    taken = 0
    for rank, moves in enumerate(plan.gathered):
        for move in moves:
            gathered[move.start : move.stop] = local[rank][move.at : move.at + move.stop - move.start]
            taken += move.stop - move.start
    assert torch.equal(gathered, whole.view(-1)) and taken == whole.numel()

    for rank, moves in enumerate(plan.scattered):
        piece = torch.full_like(local[rank], -1)
        for move in moves:
            piece[move.at : move.at + move.stop - move.start] = whole.view(-1)[move.start : move.stop]
        assert torch.equal(piece, local[rank])


def test_a_piece_whose_later_dimensions_are_whole_is_one_range():
    assert held_ranges((8, 4, 2), [Split(0, 2, 1)]) == [Range(32, 64, 0)]


def test_one_rank_and_ranks_that_hold_everything_send_nothing():
    assert exchange_plan([{"w": [Range(0, 6, 0)]}], {"w": 6}).is_local
    assert exchange_plan([{"w": [Range(0, 6, 0)]}] * 3, {"w": 6}).is_local
    assert not exchange_plan([{"w": [Range(0, 3, 0)]}, {"w": [Range(3, 6, 0)]}], {"w": 6}).is_local


def test_an_element_that_nobody_holds_is_named():
    with pytest.raises(ConfigError, match=r"hold the elements \[\(0, 2\)\] of 'w', which has 6"):
        exchange_plan([{"w": [Range(0, 2, 0)]}, {}], {"w": 6})


def test_messages_are_bounded_and_keep_the_order():
    plan = exchange_plan([{name: [Range(0, 10, 0)] for name in "abc"}], dict.fromkeys("abc", 10))
    sizes = {"a": 4, "b": 4, "c": 2}
    cut = list(messages(plan.gathered[0], sizes, 60))
    assert [[move.name for move in message] for message in cut] == [["a"], ["b", "c"]]
