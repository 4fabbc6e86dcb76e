"""Training functions and entrypoints that tests launch in processes of their own."""

import ctypes
import os
import time
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from diloco_orchestrator import (
    ObjectStoreManager,
    OuterConfig,
    ReplicaContext,
    ReplicaSession,
    make_diloco_outer_loop,
)

# -- a tiny regression ------------------------------------------------------------------------------------------------

TRUTH = torch.tensor([[1.0], [-2.0], [0.5], [3.0]])


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return x, x @ TRUTH


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def inner_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def heldout(model: torch.nn.Module, items: list[Any]) -> list[float]:
    """One squared error per item; an item is a seed."""
    losses = []
    for item in items:
        x, y = batch_of(1_000_000 + item)
        losses.append(torch.nn.functional.mse_loss(model(x), y).item())
    return losses


def attach(ctx: ReplicaContext, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ReplicaSession:
    return ctx.attach(model, optimizer, heldout=heldout, heldout_items=list(range(16)), in_loop="loss")


def data_of(ctx: ReplicaContext) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch_of(1000 * ctx.replica_id + i) for i in range(50)]


# -- workloads for `launch` -------------------------------------------------------------------------------------------


def train(ctx: ReplicaContext, model: torch.nn.Module | None = None) -> None:
    """A healthy run. `args["pause_s"]` stretches every inner step."""
    model = model or mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(ctx.args.get("lr", 0.01)))  # type: ignore[arg-type]
    pause_s = float(ctx.args.get("pause_s", 0))  # type: ignore[arg-type]
    with attach(ctx, model, optimizer) as replica:
        for batch in replica.batches(data_of(ctx)):
            replica.observe(loss=inner_step(model, optimizer, batch), tokens=8)
            time.sleep(pause_s)


def train_dealt(ctx: ReplicaContext) -> None:
    """One data set for all replicas. A file in `args["folder"]` has round, step and batch of each inner step."""
    model, pause_s = mlp(), float(ctx.args.get("pause_s", 0))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    path = Path(str(ctx.args["folder"])) / f"took-{ctx.replica_id}-{ctx._attempt.number}"
    with attach(ctx, model, optimizer) as replica, path.open("a") as took:
        for number in replica.batches(range(10**6)):
            took.write(f"{replica.round} {replica.step_count} {number}\n"), took.flush()
            replica.observe(loss=inner_step(model, optimizer, batch_of(number)), tokens=8)
            time.sleep(pause_s)


def train_holding(ctx: ReplicaContext) -> None:
    """In the middle of round 2 the replicas in `args["hold"]`, in their first attempt, wait for a file `release`."""
    folder, pause_s = Path(str(ctx.args["folder"])), float(ctx.args.get("pause_s", 0))  # type: ignore[arg-type]
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with attach(ctx, model, optimizer) as replica:
        for step, batch in enumerate(replica.batches(data_of(ctx))):
            replica.observe(loss=inner_step(model, optimizer, batch))
            time.sleep(pause_s)
            if replica.round == 2 and step % 3 == 1 and ctx.replica_id in ctx.args["hold"]:  # type: ignore[operator]
                hold_once(folder / f"held-{ctx.replica_id}", folder / "release")


class DeadOnce(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches, of which number 7 waits for ever in the process that makes the file `marker`."""

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 7 and not self.marker.exists():
            self.marker.touch()
            Event().wait()
        return batch_of(index)


def train_behind_a_dead_loader(ctx: ReplicaContext) -> None:
    """The worker of replica 1's data loader never answers in round 3 of the first attempt."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dead = DataLoader(DeadOnce(str(ctx.args["marker"])), batch_size=None, num_workers=1)
    data = dead if ctx.replica_id == 1 else data_of(ctx)
    with attach(ctx, model, optimizer) as replica:
        for batch in replica.batches(data):
            replica.observe(loss=inner_step(model, optimizer, batch))


def train_holding_the_interpreter(ctx: ReplicaContext) -> None:
    """In round 2 replica 1's first attempt enters a library that keeps the interpreter's lock and does not return."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with attach(ctx, model, optimizer) as replica:
        for batch in replica.batches(data_of(ctx)):
            replica.observe(loss=inner_step(model, optimizer, batch))
            if replica.round == 2 and ctx.replica_id == 1 and not Path(str(ctx.args["marker"])).exists():
                Path(str(ctx.args["marker"])).touch()
                never_returns()


def never_returns() -> None:
    mutex = ctypes.create_string_buffer(64)  # of pthreads; no signal interrupts the wait for it
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def hold_once(marker: Path, release: Path) -> None:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    while not release.exists():
        time.sleep(0.01)


def train_collapsing(ctx: ReplicaContext) -> None:
    """The reported training loss falls while the model is pushed away from the truth."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(ctx, model, optimizer) as replica:
        for step, (x, y) in enumerate(replica.batches(data_of(ctx))):
            inner_step(model, optimizer, (x, 0.1 * step - y))
            replica.observe(loss=10.0 - 0.1 * step)


def train_failing(ctx: ReplicaContext) -> None:
    """One replica raises in its second round, every time."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(ctx, model, optimizer) as replica:
        for batch in replica.batches(data_of(ctx)):
            if replica.round == 2 and ctx.replica_id == 1:
                raise ZeroDivisionError("a bug in the user's own code")
            replica.observe(loss=inner_step(model, optimizer, batch))


def train_failing_once(ctx: ReplicaContext) -> None:
    """One replica raises in its second round, the first time."""
    marker = Path(str(ctx.args["marker"]))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(ctx, model, optimizer) as replica:
        for batch in replica.batches(data_of(ctx)):
            if replica.round == 2 and ctx.replica_id == 1 and not marker.exists():
                marker.touch()
                raise OSError("a hiccup of the user's file system")
            replica.observe(loss=inner_step(model, optimizer, batch))


def train_nan_once(ctx: ReplicaContext) -> None:
    """One replica's loss is NaN in round 2, once."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    poisoned = False
    with attach(ctx, model, optimizer) as replica:
        for x, y in replica.batches(data_of(ctx)):
            bad = replica.round == 2 and ctx.replica_id == 1 and not poisoned
            poisoned = poisoned or bad
            replica.observe(loss=inner_step(model, optimizer, (x * float("nan") if bad else x, y)))


def train_different(ctx: ReplicaContext) -> None:
    """Replicas build models of different sizes."""
    model = torch.nn.Linear(4, 1 + ctx.replica_id)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ctx.attach(model, optimizer) as replica:
        for x, _ in replica.batches(data_of(ctx)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


def train_leaving_early(ctx: ReplicaContext) -> None:
    """Returns in the first round."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(ctx, model, optimizer) as replica:
        for batch in replica.batches(data_of(ctx)):
            inner_step(model, optimizer, batch)
            break


def train_telling_secrets(ctx: ReplicaContext) -> None:
    """Prints a credential from its environment, then fails with it."""
    secret = os.environ["MY_API_TOKEN"]
    print(f"using {secret}")
    raise RuntimeError(f"cannot log in with {secret}")


NOT_A_FUNCTION = 3


# -- for the low-level form -------------------------------------------------------------------------------------------


def diloco_by_hand(folder: str, sync_every: int, rounds: int) -> dict[str, Any]:
    """A library user's loop: no coordinator, no `ReplicaContext`."""
    rank, replicas = int(os.environ["REPLICA_RANK"]), int(os.environ["REPLICA_WORLD_SIZE"])
    torch.manual_seed(0)
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = ObjectStoreManager.join(folder, rank, replicas, rounds=rounds, outer=OuterConfig())
    with make_diloco_outer_loop(model, optimizer, manager, sync_every):
        for step in range(sync_every * rounds):
            inner_step(model, optimizer, batch_of(1000 * rank + step))
    momenta = manager.participant.base.momenta.values()
    return {
        "bytes": b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex(),
        "moved": all(not torch.equal(p, before[name]) for name, p in model.named_parameters()),
        "syncs": manager.current_step(),
        "momenta": sum(bool(m.abs().sum() > 0) for m in momenta),
        "parameters": len(before),
    }


# -- strangers --------------------------------------------------------------------------------------------------------

FOR_STRANGERS = 352  # held-out items: 32 for each of eleven replicas


def heldout_at_once(model: torch.nn.Module, items: list[Any]) -> list[float]:
    """As `heldout`, with one forward pass."""
    batches = [batch_of(1_000_000 + item) for item in items]
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    return ((model(x) - y) ** 2).view(len(items), -1).mean(dim=1).tolist()  # type: ignore[no-any-return]


STEPS_FOR_STRANGERS = 5  # of a round


def train_or_attack(ctx: ReplicaContext) -> None:
    """A healthy run. Machines with `HOSTILE` in their environment contribute what that script of theirs sends."""
    if script := os.environ.get("HOSTILE"):
        from hostile_machines import attack

        attack(ctx, script)
    model, draw = mlp(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # the same first values in every run and thread
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=draw) / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    given = {"heldout": heldout_at_once, "heldout_items": list(range(FOR_STRANGERS))}
    with ctx.attach(model, optimizer, **given) as replica:
        for batch in replica.batches(data_of(ctx)):
            replica.observe(loss=inner_step(model, optimizer, batch))
