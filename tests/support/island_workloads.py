"""Training functions for replicas of several ranks: one small model, plain, in DDP, or sharded by `fully_shard`."""

import functools
import gc
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diloco_orchestrator.outer.base import Base

VOCABULARY, WIDTH, LENGTH, BATCH = 29, 18, 8, 8  # no dimension is a multiple of 4, so that pieces are uneven
_SAMPLE_S = 0.02  # between two measurements of a rank's memory
HIDDEN = 20_011  # 741 k parameters: three shards of 1 MiB, the last one shorter


class TinyModel(torch.nn.Module):
    """A language model whose head is tied to its embedding, with a normalisation that has buffers."""

    def __init__(self, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, WIDTH)
        inwards, outwards = torch.nn.Linear(WIDTH, hidden), torch.nn.Linear(hidden, WIDTH)
        self.hidden = torch.nn.Sequential(inwards, torch.nn.ReLU(), outwards)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.head = torch.nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.hidden(self.embedding(tokens))))
        return found


def global_batch(seed: int, replica_id: int, step: int) -> torch.Tensor:
    """The (BATCH, LENGTH + 1) tokens that one replica trains on in a step, however many ranks it has."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * replica_id + step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (start + torch.arange(LENGTH + 1) * 3) % VOCABULARY


def losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean nats per token of every row."""
    logits = model(tokens[:, :-1])
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return found.view(len(tokens), -1).mean(1)


def heldout(model: torch.nn.Module, items: Any) -> list[float]:
    found: list[float] = losses(model, torch.tensor([list(item) for item in items])).tolist()
    return found


HELDOUT = [[(3 * i + k * 3 + i // 29) % VOCABULARY for k in range(LENGTH + 1)] for i in range(14)]


def train(ctx: Any) -> None:
    """Trains `args["model"]`: plain (gradients averaged by the loop), ddp, fsdp, tp or tp_fsdp, which is both; or
    always_ddp, which does not ask for the number of ranks.

    Faults by `args["fault"]`; `args["frozen"]`: parameters that are not trained; `args["noise"]`: the rank whose losses
    get random weights.
    """
    model: torch.nn.Module = TinyModel(ctx.args.get("hidden", HIDDEN), ctx.args.get("vocabulary", VOCABULARY))
    kind = ctx.args.get("model", "ddp")
    for name in ctx.args.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    _fault(ctx, -1)
    if (kind == "ddp" and ctx.ranks > 1) or kind == "always_ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp" and ctx.ranks > 1:
        shard(model, ctx.args.get("bf16", False), ctx.args.get("offload", False))
    part, parts = ctx.rank, ctx.ranks
    if kind in ("tp", "tp_fsdp") and ctx.ranks > 1:
        part, parts = make_parallel(model, ctx.ranks if kind == "tp" else ctx.ranks // 2)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    meter = StorageMeter(ctx, model) if ctx.args.get("measured") else None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    unsaved = torch.Generator().manual_seed(ctx.seed)
    guard = {"heldout": heldout, "heldout_items": HELDOUT} if ctx.args.get("heldout", True) else {}
    with ctx.attach(model, optimizer, stateful={"schedule": schedule}, **guard) as replica:
        for step in replica.batches(range(1000)):
            if meter is not None:
                meter.pause()
            _fault(ctx, replica.step_count)
            rows = global_batch(ctx.seed, ctx.replica_id, step)[part::parts]
            loss = losses(model, rows).sum() * parts / BATCH  # the mean over ranks is that of the batch
            if ctx.args.get("noise") == ctx.rank:  # of a generator that nobody saves
                loss = loss * (1 + torch.rand((), generator=unsaved))
            if os.environ.get("ISLAND_LIE") == str(ctx.rank) and replica.round == 2:
                loss = 2 * loss
            loss.backward()
            if kind == "plain" and ctx.ranks > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ctx.ranks
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            replica.observe(loss=loss.item(), tokens=rows[:, 1:].numel())
            del loss
            if meter is not None:
                meter.go_on(optimizer)


class StorageMeter(threading.Thread):
    """Measures tensors beside those of model and optimizer, from a step's end to the next one's begin.

    Writes to `args["measured"]`/<replica>.<rank>, whenever it is paused, the bytes of their storages: the last and the
    most so far.
    """

    def __init__(self, ctx: Any, model: torch.nn.Module) -> None:
        super().__init__(daemon=True)
        self._file = Path(ctx.args["measured"]) / f"{ctx.replica_id}.{ctx.rank}"
        self._model = model
        self._theirs: set[int] = set()
        self._measures = threading.Event()
        self._one = threading.Lock()  # held while something is measured, and where that begins or ends
        self._rest = threading.Event()  # never set
        self._last = self._most = 0
        self.start()

    def go_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure until `pause`: gradients are freed and the step is over."""
        state = [each for of in optimizer.state.values() for each in of.values() if isinstance(each, torch.Tensor)]
        self._theirs = {_address(each) for each in [*self._model.parameters(), *self._model.buffers(), *state]}
        self._measures.set()

    def pause(self) -> None:
        """Measure once more, write what was found, and wait for the next `go_on`."""
        with self._one:
            if self._measures.is_set():
                self._measures.clear()
                self._measure()
                self._file.write_text(f"{self._last} {self._most}")

    def run(self) -> None:
        while self._measures.wait():
            with self._one:
                if self._measures.is_set():
                    self._measure()
            self._rest.wait(_SAMPLE_S)

    def _measure(self) -> None:
        # No other thread may run while this one has a list of all objects: in it are tuples that the other is still
        # making, which raises `SystemError` there ("bad argument to internal function", of `_PyTuple_Resize`).
        before = sys.getswitchinterval()
        sys.setswitchinterval(5.0)
        time.sleep(2 * before)  # until nobody waits by the interval of before
        found = {
            _address(each): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu"
        }
        sys.setswitchinterval(before)
        self._last = sum(size for address, size in found.items() if address not in self._theirs)
        self._most = max(self._most, self._last)


def _address(tensor: Any) -> int:
    """Where the storage of a tensor begins, or that of a DTensor's piece."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())


def make_parallel(model: Any, ranks: int) -> tuple[int, int]:
    """Make a `TinyModel` tensor-parallel over `ranks` ranks, and shard it over groups of them if there are several.

    Returns which part of each batch this rank trains on, and of how many: ranks of one group have the same.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    groups = dist.get_world_size() // ranks
    mesh = init_device_mesh("cpu", (groups, ranks), mesh_dim_names=("data", "tensor"))
    parallelize_module(model.hidden, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if groups > 1:
        shard(model, mesh=mesh["data"])
    return mesh["data"].get_local_rank(), groups


def shard(model: Any, bf16: bool = False, offload: bool = False, mesh: Any = None) -> None:
    """Shard a `TinyModel` over all ranks or those of a mesh, its tied weights in one group."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if bf16 else {}
    policy |= {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    policy |= {"mesh": mesh} if mesh is not None else {}
    fully_shard(model.hidden, **policy)
    fully_shard([model.embedding, model.norm, model.head], **policy)
    fully_shard(model, **policy)


def _fault(ctx: Any, step: int) -> None:
    """Do what `args["fault"]` says, once: {"what", "replica", "rank": or "every", "step", "once": a path}."""
    fault = ctx.args.get("fault")
    every = bool(fault) and fault["rank"] == "every"
    rank = ctx.rank if every else fault and fault["rank"]
    if not fault or (fault["replica"], rank, fault["step"]) != (ctx.replica_id, ctx.rank, step):
        return
    try:
        os.close(os.open(f"{fault['once']}-{rank}" if every else fault["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    match fault["what"]:
        case "raise":
            raise RuntimeError("planted")
        case "sleep":
            time.sleep(3600)
        case "flip":
            Path(fault["once"]).write_text(str(_flip_a_bit()))
        case "memory":
            _use_up_the_memory()
        case "memory of the group":
            _use_up_the_memory_of_a_group(Path(fault["once"]))
        case "supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
        case name:
            Path(fault["once"]).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.Signals[name])


def _use_up_the_memory() -> None:
    """Ask for a tensor of 4 GiB where the kernel gives this process 64 MiB more than it has: torch raises."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 64 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.zeros(2**30)


def memory_group() -> Path | None:
    """The folder of a new memory cgroup below this process's, as a container has it; None where none can be made."""
    controllers = (line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = next((path for _, names, path in controllers if "memory" in names.split(",")), None)  # cgroup v1
    group = Path(f"/sys/fs/cgroup/memory{own}/island-{os.getpid()}")
    return group if own is not None and os.access(group.parent, os.W_OK) else None


def _use_up_the_memory_of_a_group(once: Path) -> None:
    """Use 1 GiB in a memory cgroup of 64 MiB in which this process is alone: the kernel kills it.

    The group's folder is written to `once`. Its limit counts what the process has used since it came.
    """
    group = memory_group()
    assert group is not None
    group.mkdir()
    once.write_text(str(group))
    (group / "memory.limit_in_bytes").write_text(str(64 * 2**20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    torch.ones(2**28)


def _flip_a_bit() -> int:
    """Flip the lowest bit of the first number in this process's first shard of the base. Returns the shard's index."""
    (base,) = (each for each in gc.get_objects() if type(each) is Base)
    index, shard = base.own_shards(0)[0]
    shard.parameters.view(torch.int32)[0] ^= 1
    return int(index)


class _Batches(torch.utils.data.Dataset[torch.Tensor]):
    """The batches of a replica by step, of which worker processes load each."""

    def __init__(self, ctx: Any) -> None:
        self._whose = (ctx.seed, ctx.replica_id)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, step: int) -> torch.Tensor:
        return global_batch(*self._whose, step)


def _leave_a_file_at_sigterm(folder: str, number: int) -> None:
    (Path(folder) / f"worker-{os.getpid()}").touch()
    signal.signal(signal.SIGTERM, lambda *_: (Path(folder) / f"got-sigterm-{os.getpid()}").touch())


def train_with_workers(ctx: Any) -> None:
    """Trains on what two worker processes of each rank load, which leave files in `args["folder"]`: at their start,
    and at SIGTERM."""
    model = torch.nn.parallel.DistributedDataParallel(TinyModel(31)) if ctx.ranks > 1 else TinyModel(31)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    started = functools.partial(_leave_a_file_at_sigterm, ctx.args["folder"])
    loader = torch.utils.data.DataLoader(_Batches(ctx), batch_size=None, num_workers=2, worker_init_fn=started)
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=HELDOUT) as replica:
        for tokens in replica.batches(loader):
            loss = losses(model, tokens[ctx.rank :: ctx.ranks]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.observe(loss=loss.item(), tokens=tokens[ctx.rank :: ctx.ranks, 1:].numel())


# -- functions that are refused ---------------------------------------------------------------------------------------


def train_with_other_models(ctx: Any) -> None:
    model = torch.nn.Linear(3, 4 + ctx.rank)
    ctx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train_a_stage_of_a_pipeline(ctx: Any) -> None:
    stage = torch.nn.ModuleDict({f"block {ctx.rank}": torch.nn.Linear(3, 3)})
    ctx.attach(stage, torch.optim.SGD(stage.parameters(), lr=0.1))


def train_with_ties_in_two_groups(ctx: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = TinyModel(31)
    for part in (model.embedding, model.head, model):
        fully_shard(part)
    losses(model, global_batch(ctx.seed, ctx.replica_id, 0))


def train_attached_in_rank_0(ctx: Any) -> None:
    model = torch.nn.Linear(3, 4)
    if ctx.rank == 0:
        ctx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dist.barrier()


def train_that_never_attaches_in_rank_1(ctx: Any) -> None:
    if ctx.rank == 0:
        train(ctx)


def train_without_ddp(ctx: Any) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ctx.attach(model, optimizer) as replica:
        for _ in replica.batches(range(10)):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()


def train_that_ends_early_in_rank_1(ctx: Any) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ctx.attach(model, optimizer) as replica:
        for step in range(3 if ctx.rank else 1000):
            model(torch.full((2, 3), float(step))).sum().backward()
            optimizer.step()
            if not replica.step():
                break


def train_with_fsdp1(ctx: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(torch.nn.Linear(3, 4), device_id=torch.device("cpu"))
    ctx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
