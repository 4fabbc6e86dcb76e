"""A Lightning trainer as a replica, by `replica.step`: `python examples/lightning_loop.py [FOLDER]`."""

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from diloco_orchestrator import ReplicaContext, ReplicaSession, launch


class Shuffled(torch.utils.data.Sampler[int]):
    """Indices in another order every epoch, from a position that `stateful` saves and restores."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.taken = count, seed, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        epoch, begin = divmod(self.taken, self.count)
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        yield from order[begin:].tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Regression(lightning.LightningModule):
    """`sharded`: over the ranks of this replica, by ModelParallelStrategy."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Replica(lightning.Callback):
    """Attaches when training begins, and synchronises after each batch."""

    def __init__(self, ctx: ReplicaContext, order: Shuffled) -> None:
        self.ctx = ctx
        self.order = order
        self.session: ReplicaSession | None = None

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.session = self.ctx.attach(module, module.optimizers(), stateful={"order": self.order}).__enter__()

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        assert self.session is not None
        self.order.taken += len(batch[0])
        trainer.should_stop = not self.session.step(loss=float(outputs["loss"]), tokens=len(batch[0]))

    def teardown(self, trainer: lightning.Trainer, module: lightning.LightningModule, stage: str) -> None:
        if self.session is not None:
            self.session.__exit__(None, None, None)


def train(ctx: ReplicaContext) -> None:
    part = ctx.replica_id * ctx.ranks + ctx.rank  # of the data, this rank's own
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(part))
    order = Shuffled(len(x), seed=ctx.replica_id)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16, sampler=order)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy: Any = "ddp" if ctx.ranks > 1 else "auto"
    if sharded := ctx.ranks > 1 and bool(ctx.args.get("sharded")):
        strategy = ModelParallelStrategy(data_parallel_size=ctx.ranks, tensor_parallel_size=1)
    ranks: dict[str, Any] = {"devices": ctx.ranks, "strategy": strategy, "use_distributed_sampler": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=-1, callbacks=[Replica(ctx, order)], **ranks, **quiet)
    trainer.fit(Regression(sharded), loader)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    result = launch("lightning_loop:train", store=folder, replicas=2, rounds=5, sync_every=10).wait()
    print(f"{result.status} after {result.rounds} rounds: {folder}")
