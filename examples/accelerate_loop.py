"""An accelerate loop as a replica, by `replica.step`: `python examples/accelerate_loop.py [FOLDER]`."""

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from diloco_orchestrator import ReplicaContext, launch


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


def train(ctx: ReplicaContext) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(ctx.replica_id))  # this replica's part of the data
    order = Shuffled(len(x), seed=ctx.replica_id)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16, sampler=order)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ctx.total_steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    plain, objects = accelerator.unwrap_model(model), {"schedule": schedule, "order": order}
    with ctx.attach(plain, optimizer, stateful=objects) as replica:
        going = True
        while going:
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                # What was trained on, by all ranks of this replica: the loader is a batch ahead.
                order.taken += len(batch) * accelerator.num_processes
                if accelerator.sync_gradients and not (going := replica.step(loss=loss.item(), tokens=len(batch))):
                    break


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    result = launch("accelerate_loop:train", store=folder, replicas=2, rounds=5, sync_every=10).wait()
    print(f"{result.status} after {result.rounds} rounds: {folder}")
