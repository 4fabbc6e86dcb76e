"""Exchanges over drawn DTensors, of any placement, shape, fragment and shard, in the ranks of a gloo group."""

import functools
import os
import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.outer.base import BaseLayout
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.replica.training.exchange import Move, is_sharded, owned_by_shard
from diloco_orchestrator.replica.training.ranks import Exchange, Ranks, pieces_in, read_in_parts
from diloco_orchestrator.replica.training.tensor_tree import pack, state_file, stored_tree
from diloco_orchestrator.snapshots.pieces_of_ranks import TensorInRanks
from diloco_orchestrator.snapshots.saved_state import read_state
from diloco_orchestrator.snapshots.stored_state import StoredState, StoredTensor
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, memory_of
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

Tensors = dict[str, torch.Tensor]

_OWN: list[Any] = []  # of this rank, in the case that runs
_STORE: list[Store] = []


def exchanged(meeting: str, rank: int, ranks: int, cases: int) -> list[str]:
    """Run so many drawn cases as one rank of a new process group that meets at the file `meeting`.

    Returns one line for each case, with the placement of each tensor ("Shard", "_StridedShard", "Replicate", "plain"),
    and "empty" where this rank's piece is. Raises `AssertionError` with the case's number if values differ.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(meeting, ranks)
    limit = timedelta(seconds=30)  # for the other ranks, where one of them has raised
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        _STORE[:] = [open_store(f"{meeting}.bucket")]
        joined = Ranks.joined(rank, "127.0.0.1", limit.total_seconds(), store=_STORE[0])
        found = [_exchange(joined, case) for case in range(cases)]
        joined.close()
        return found
    finally:
        dist.destroy_process_group()


def _exchange(ranks: Ranks, case: int) -> str:
    """One case: owners must get what torch's own `full_tensor` gives, and all ranks what the owners send back."""
    drawn = random.Random(case)
    torch.manual_seed(case)
    tensors = dict(_model(drawn, ranks.ranks) if drawn.random() < 0.5 else _tensors(drawn, ranks.ranks))
    if len(tensors) > 1 and drawn.random() < 0.3:  # as with adapters: the others are frozen
        tensors = dict(drawn.sample(sorted(tensors.items()), drawn.randint(1, len(tensors) - 1)))
    names = sorted(tensors)
    drawn.shuffle(names)
    cut = drawn.randint(0, len(names))
    shapes = {name: tensors[name].shape for name in names}
    layout = BaseLayout.of(shapes, [each for each in (names[:cut], names[cut:]) if each], drawn.randint(1, 60))
    owned = owned_by_shard(layout, ranks.ranks)
    exchange = Exchange(ranks, tensors, pieces_in(ranks, tensors), owned)
    whole = {name: _whole(each) for name, each in tensors.items()}

    got = {name: torch.full((each.numel(),), torch.nan) for name, each in whole.items()}

    def put(move: Move, values: torch.Tensor) -> None:
        there = got[move.name][move.start : move.stop]
        assert there.isnan().all(), f"case {case}: {move} comes twice"
        there.copy_(values)

    exchange.collect(names, put)
    for name in names:
        mine = torch.zeros(whole[name].numel(), dtype=torch.bool)
        for start, stop, owner in owned[name]:
            mine[start:stop] = owner == ranks.rank
        expected = whole[name].reshape(-1).float().masked_fill(~mine, torch.nan)
        assert torch.equal(got[name].nan_to_num(-9), expected.nan_to_num(-9)), f"case {case}: {name} as its owner"

    new = {name: torch.randn(each.shape).to(each.dtype) for name, each in whole.items()}  # the same in all ranks

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        assert any(low <= start and stop <= high and owner == ranks.rank for low, high, owner in owned[name])
        return new[name].reshape(-1)[start:stop].float()

    exchange.spread(names, read)
    for name in names:
        assert torch.equal(_whole(tensors[name]), new[name]), f"case {case}: {name} as its owners sent it"
    _OWN.append(read_in_parts(ranks, tensors))
    dist.barrier()
    if not ranks.rank:
        found = ranks.owners.make(_own).digests(names)
        assert found == {name: bulk_digest(memory_of(new[name])) for name in names}, f"case {case}: read in parts"
    dist.barrier()
    _saved(ranks, drawn, tensors, new, case)
    return " ".join(_kind(each) for each in tensors.values())


def _saved(ranks: Ranks, drawn: random.Random, tensors: dict[str, Any], new: Tensors, case: int) -> None:
    """A saved state must have the bytes that one process gives it, and ranks must get it back from its pieces."""
    _OWN.append(read_in_parts(ranks, {name: each for name, each in tensors.items() if is_sharded(each)}))
    dist.barrier()
    if not ranks.rank:
        pieces = ranks.owners.make(_own)
        tree: dict[str, Any] = {"steps": 3, **tensors}
        for name, each in tensors.items():
            if is_sharded(each):
                tree[name] = TensorInRanks(pieces, name, TensorSpec.of(each))
        file, store = state_file(tree, ranks.owners, 8 * drawn.randint(1, 60)), _STORE[0]
        if drawn.random() < 0.5:
            file.freeze()
        shard = file.write(store, 0, case, 1, NoBackground())
        manifest: Any = SimpleNamespace(state=shard, replica_id=0, round=case, attempt=1)
        assert b"".join(read_state(store, manifest)) == pack({"steps": 3, **new}), f"case {case}: saved"
        stored = StoredState.read_from(ranks.owners, store, manifest, NoBackground())
        found = stored_tree(stored, "here")
        assert found["steps"] == 3
    found = ranks.shared(None if ranks.rank else {name: (found[name].spec, found[name].start) for name in tensors})
    if not ranks.rank:
        ranks.owners.each(_put, stored)
    dist.barrier()
    state: Any = _OWN.pop()
    with torch.no_grad():
        for name, (spec, start) in found.items():
            each = StoredTensor(state, spec, start)
            tensors[name].zero_()
            exchange = Exchange(
                ranks, {name: tensors[name]}, pieces_in(ranks, {name: tensors[name]}), {name: each.owned()}
            )
            exchange.spread([name], lambda _, low, high, each=each: each.read(low, high))
            assert torch.equal(_whole(tensors[name]), new[name]), f"case {case}: {name} as it was saved"
            each.release()
    assert not state.held, f"case {case}: {state.held} bytes stay"


def _put(stored: StoredState) -> None:
    _OWN.append(stored)


def _own() -> Any:
    return _OWN.pop()


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()
    return found.clone()


def _kind(tensor: Any) -> str:
    kinds = {type(each).__name__ for each in tensor.placements} if is_sharded(tensor) else {"plain"}
    empty = " empty" if is_sharded(tensor) and not tensor.to_local().numel() and tensor.numel() else ""
    return max(kinds - {"Replicate"}, default="Replicate") + empty


def _mesh(drawn: random.Random, ranks: int, names: tuple[str, str]) -> DeviceMesh:
    """All ranks in one row, in one column, or in a square where their number allows it."""
    shapes = [(ranks, 1), (1, ranks), *([(2, ranks // 2)] if ranks % 2 == 0 else [])]
    return _mesh_of(drawn.choice(shapes), names)


@functools.cache  # as long as this process's only group
def _mesh_of(shape: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _tensors(drawn: random.Random, ranks: int) -> Any:
    """Tensors placed at will, of any shape, some of them empty or with fewer rows than ranks; some plain."""
    for number in range(drawn.randint(1, 4)):
        shape = [drawn.choice((0, 1, 2, 3, 5, 7, 8)) for _ in range(drawn.randint(0, 3))]
        dtype = drawn.choice((torch.float32, torch.bfloat16))
        tensor = torch.randn(shape).to(dtype)  # ranks have the same: their generators were seeded alike
        if drawn.random() < 0.8:
            mesh = _mesh(drawn, ranks, ("first", "second"))
            dims = range(len(shape))
            placed = [Shard(drawn.choice(dims)) if dims and drawn.random() < 0.8 else Replicate() for _ in range(2)]
            tensor = distribute_tensor(tensor, mesh, placed, src_data_rank=None)
        yield f"t{number}", torch.nn.Parameter(tensor)


def _model(drawn: random.Random, ranks: int) -> Any:
    """Parameters of a model with tied weights, sharded by `fully_shard`, tensor-parallel, or both."""
    sizes = [drawn.randint(1, 9) for _ in range(3)]
    model = torch.nn.Sequential(
        torch.nn.Linear(sizes[0], sizes[1]),
        torch.nn.Linear(sizes[1], sizes[2]),
        torch.nn.LayerNorm(sizes[2]),
        torch.nn.Linear(sizes[0], sizes[1], bias=False),
    )
    tied: Any = model[3]
    mesh = _mesh(drawn, ranks, ("data", "tensor"))
    if mesh["tensor"].size() > 1:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    tied.weight = model[0].weight
    if mesh["data"].size() > 1:
        by_columns = drawn.random() < 0.5

        def placed(parameter: Any) -> Shard | None:
            even = parameter.ndim > 1 and parameter.shape[1] % mesh["data"].size() == 0  # uneven ones torch refuses
            return Shard(1) if by_columns and even and not isinstance(parameter, DTensor) else None

        fully_shard(model, mesh=mesh["data"], shard_placement_fn=placed)
    return model.named_parameters()
